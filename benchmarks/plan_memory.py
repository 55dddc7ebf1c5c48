"""Memory of a step before it is compiled, by the planner, beside XLA's own for that very step: every recipe.

python benchmarks/plan_memory.py [RECIPE ...] > docs/results/plan_memory.md

Nothing is run and no weight is allocated. The plan asks XLA for the step of one replica alone; what it is held against
is the program of a run with the recipe's own rules and update, on 2 x 4 devices of this host. Recipes whose data lie in
files get examples of the same shapes.
"""

import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import machine
import numpy as np

from multipod import runtime

MESH = (2, 4)
runtime.prepare(math.prod(MESH))  # before JAX is imported

from multipod.errors import MultipodError  # noqa: E402
from multipod.layout.layout import Layout  # noqa: E402
from multipod.layout.split import ModelSplit  # noqa: E402
from multipod.plan.calibration.host import memory_bytes  # noqa: E402
from multipod.plan.machine import here  # noqa: E402
from multipod.plan.predict import predict_step  # noqa: E402
from multipod.plan.traced.program import workload_of  # noqa: E402
from multipod.plan.traced.splits import Splits  # noqa: E402
from multipod.recipe.override import override  # noqa: E402
from multipod.recipe.recipe import Recipe  # noqa: E402
from multipod.recipes.find import RECIPES, load  # noqa: E402

ROWS = 12
"""Of each device."""

LIMIT_S = 900
"""Seconds that a recipe may take."""


@dataclass(frozen=True)
class Shaped:
    """Data without files: zeros of the shapes that `Clicks` has."""

    ids: int
    length: int = 4096

    def train(self) -> "Shaped":
        """Itself."""
        return self

    test = train

    def __len__(self) -> int:
        return self.length

    def read(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        """Zeros."""
        n = len(indices)
        label, ids = (np.zeros((n, many), np.int32) for many in (1, self.ids))
        return {"label": label, "dense": np.zeros((n, 13), np.float32), "ids": ids}


def with_data(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with examples, where its own lie in files that are not here."""
    kind = type(recipe.data).__name__
    if kind == "ImageFiles":
        from PIL import Image

        for name in ("a", "b"):
            (folder / name).mkdir()
            Image.new("RGB", (256, 256)).save(folder / name / "0.jpg")
        return override(recipe, [f"data.train_files={folder}", f"data.test_files={folder}"])
    if kind == "Clicks":
        return replace(recipe, data=Shaped(len(recipe.model.rows)))  # type: ignore[attr-defined, arg-type]
    return recipe


def measured(name: str) -> dict[str, Any]:
    """Bytes by XLA, by the planner that asked XLA for one replica, and by the operators alone."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = replace(with_data(load(name), Path(folder)), accumulate=1)
        devices, own = math.prod(MESH), recipe.layout
        laid = Layout(MESH, split=ModelSplit(rules=own.split.rules), sync=own.sync)
        small = replace(recipe, batch=ROWS * devices, layout=laid)
        host = here(devices, 2)
        found: dict[str, Any] = {"recipe": name}
        for key, splits in (("guess", None), ("plan", Splits(recipe))):
            found[key] = predict_step(workload_of(recipe, splits), laid, small.batch, host).memory.total
        return found | {"xla": memory_bytes(small)}


def apart(name: str) -> dict[str, Any]:
    """`measured` in a process of its own, or why not."""
    began = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--one", name], capture_output=True, text=True, timeout=LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return {"recipe": name, "why": f"not compiled within {LIMIT_S} s"}
    lines = done.stdout.splitlines()
    print(f"{name}: {time.monotonic() - began:.0f} s {lines[-1:]}", file=sys.stderr, flush=True)
    failed = (done.stderr.splitlines() or ["?"])[-1][:160]
    return json.loads(lines[-1]) if done.returncode == 0 and lines else {"recipe": name, "why": failed}


def row(found: dict[str, Any]) -> tuple[str, ...]:
    """A line of the table."""
    if "why" in found:
        return (found["recipe"], "", "", "", "", found["why"])
    errors = [f"{found[key] / found['xla'] - 1:+.1%}" for key in ("plan", "guess")]
    sizes = [f"{found[key] / 2**20:,.1f}" for key in ("xla", "plan")]
    return (found["recipe"], *sizes, *errors, "")


def main(names: list[str]) -> None:
    """Prints the page; with --one, a recipe's numbers."""
    if names[:1] == ["--one"]:
        try:
            print(json.dumps(measured(names[1])))
        except MultipodError as error:
            sys.exit(str(error).splitlines()[0])
        return
    rows = [row(apart(name)) for name in names or RECIPES]
    on = f"commit {machine.commit()}, {machine.headline(machine.facts())}"
    print(f"# Memory before the run\n\n`python benchmarks/plan_memory.py`, {on}.\n")
    head = ("recipe", "XLA's own, MiB", "planned, MiB", "error", "without --splits", "")
    print(machine.table(head, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
