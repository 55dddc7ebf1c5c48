"""Adasum of Keras optimizers with TensorFlow and with JAX, between two of MPI's ranks."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import engines
import pytest


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_changes_of_keras_optimizers_are_combined(backend):
    for needed in ("keras", backend, "mpi4py"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: pip install 'multipod[keras]'")
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("mpirun is not installed")
    script = Path(__file__).with_name("keras_ranks.py")
    command = [mpirun, "-n", "2", "--oversubscribe", "--bind-to", "none", sys.executable, script]
    environment = engines.environment() | {"KERAS_BACKEND": backend}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert told.returncode == 0, told.stderr[-4000:]
    assert sorted(line.split(":")[0] for line in told.stdout.splitlines()) == ["rank 0", "rank 1"]
