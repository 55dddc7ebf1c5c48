"""Eight virtual CPU devices for every test; small pieces that many tests need."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from processes import CACHE, clean_environment

from multipod import runtime

# Tests compile much and compute little: LLVM's optimizations would be half of their time. Processes that tests start
# have them on, as users do.
os.environ["XLA_FLAGS"] = " ".join(["--xla_backend_optimization_level=0", os.environ.get("XLA_FLAGS", "")]).strip()
runtime.prepare(cpu_devices=8, cache=CACHE)

import pytest  # noqa: E402  (what imports JAX comes after the environment is settled)

from multipod.layout.layout import Layout  # noqa: E402
from multipod.layout.sync import Sync  # noqa: E402
from multipod.models.resnet import SmallResNet  # noqa: E402
from multipod.recipe.recipe import Recipe  # noqa: E402
from multipod.recipes.digits import digits  # noqa: E402


@pytest.fixture
def small() -> Callable[..., Recipe]:
    """The digits recipe, narrow and short, with any field changed."""

    def make(mesh: tuple[int, ...] = (2, 4), gradient_sum: str = "xla", shard_update: bool = False, **fields) -> Recipe:
        layout = Layout(mesh, sync=Sync(gradient_sum, sharding="zero1" if shard_update else "none"))
        base = replace(digits(), model=SmallResNet(width=8, blocks=(1,)), batch=56, updates=8)
        return replace(base, layout=layout, **{"evaluate_every": 0, "checkpoint_every": 0, **fields})

    return make


@pytest.fixture
def multipod(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess]:
    """Runs the command line in a process of its own, in an empty folder."""

    def run(*args: str, timeout: float = 240, **kwargs) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "multipod", *args]
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            **kwargs,
        )

    return run
