"""What a process prepares while it waits for the place of one that ended: the compiled program of its run."""

import importlib
from contextlib import suppress
from dataclasses import replace

from multipod.layout.mesh import make_mesh
from multipod.recipe.text import to_text
from multipod.runs.options import RuntimeOptions
from multipod.runs.request import TrainRequest, remember, requested_recipe
from multipod.runtime import release_memory
from multipod.step.program import Program, program_of

NEEDED = (
    "orbax.checkpoint",
    "multipod.train.observers.progress",
    "multipod.train.observers.report",
    "multipod.train.observers.tensorboard",
    "jax.experimental.multihost_utils",
)
"""What a run imports on its way; the recipe brings what is its own."""

_prepared: list[Program] = []
"""What this process has compiled while it waited: one program or none."""


def import_needed(request: TrainRequest, options: RuntimeOptions) -> tuple[TrainRequest, RuntimeOptions]:
    """Imports what the run needs and opens its data; returns what the run's folder remembers of it.

    What is wrong with the request is left for the run itself to say.
    """
    for name in NEEDED:
        with suppress(ImportError):  # of a package that is not installed
            importlib.import_module(name)
    with suppress(Exception):
        request, options = remember(request, options, options.cluster.processes * options.cpu_devices)
        recipe = requested_recipe(request, replace(options, fail=()))
        recipe.data.train()
        recipe.data.test()
    return request, options


def prepare(request: TrainRequest, options: RuntimeOptions) -> None:
    """Compiles the update of the request for this process's devices, and keeps the program for `reuse_prepared`."""
    recipe = requested_recipe(request, options)
    program = program_of(recipe, make_mesh(recipe.layout))
    program.compile_update(request.reading.image_order)
    release_memory()
    _prepared.append(program)


def reuse_prepared(program: Program) -> Program:
    """Returns the program that this process compiled while it waited, if it equals `program`; else `program`."""

    def describe(program: Program) -> tuple[str, object, bool]:
        layout = replace(program.recipe.layout, mesh=())  # a resumed run names the mesh that the first chose
        return to_text(replace(program.recipe, layout=layout)), program.mesh, program.faulty

    return next((waiting for waiting in _prepared if describe(waiting) == describe(program)), program)
