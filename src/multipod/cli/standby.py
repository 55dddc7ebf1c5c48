"""`multipod train` as a process that waits for the place of one that ended: under `multipod launch --standby`."""

import importlib
import os
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from multipod.cli.cluster import join
from multipod.cli.main import cli, starts_now
from multipod.cli.options import Where, chosen_recipe
from multipod.elastic.heartbeat import CONTROL_FD
from multipod.elastic.launcher.standby import WAITS, told
from multipod.errors import ClusterError
from multipod.runtime import release_memory

if TYPE_CHECKING:
    from multipod.cli.train import Request
    from multipod.step.program import Program

NEEDED = (
    "orbax.checkpoint",
    "multipod.step.program",
    "multipod.train.checkpoint",
    "multipod.train.loop",
    "multipod.train.observers.jsonl",
    "multipod.train.observers.progress",
    "multipod.train.observers.report",
    "multipod.train.observers.tensorboard",
    "jax.experimental.multihost_utils",
)
"""What a run imports on its way; the recipe brings what is its own."""


def stand_by(request: "Request", where: Where) -> int:
    """Makes all ready that the run needs, waits, and then runs what the launcher says; returns its exit code.

    The processes that wait are joined with each other in a world of their own, on whose devices the update is compiled:
    when they are told to go on they read the checkpoint, and train.
    """
    from multipod.cli.train import remembered
    from multipod.elastic.worker.jax_world import devices_made

    for name in NEEDED:
        importlib.import_module(name)
    with suppress(Exception):  # whoever runs it says what is wrong
        request, where = remembered(request, where, where.cluster.processes * where.cpu_devices)
        recipe = chosen_recipe(request.recipe, request.changes, replace(where, fail=()))
        recipe.data.train()
        recipe.data.test()
    if devices_made():
        return 0  # such a process cannot join others any more: one that starts then takes its place
    try:
        join(where.cluster, where.timeouts)
    except ClusterError:
        return 0  # one of them has ended: the launcher starts new ones
    with suppress(Exception):
        _prepared.append(prepared(request, where))
    said = told(int(os.environ[CONTROL_FD]))
    if said is None:
        return 0
    arguments, environment = said
    del os.environ[WAITS]
    os.environ.update(environment)
    sys.argv[1:] = arguments
    starts_now()
    return int(cli.main(arguments, standalone_mode=False) or 0)


_prepared: list["Program"] = []
"""What this process has compiled while it waited: one program or none."""


def prepared(request: "Request", where: Where) -> "Program":
    """The program of the request on this process's devices, its update compiled."""
    from multipod.layout.mesh import make_mesh
    from multipod.step.program import program_of

    recipe = chosen_recipe(request.recipe, request.changes, where)
    program = program_of(recipe, make_mesh(recipe.layout))
    program.compile_update(request.reading.image_order)
    release_memory()
    return program


def ready(program: "Program") -> "Program":
    """The program that this process compiled while it waited, if it is the same as `program`; else `program`."""
    from multipod.recipe.text import to_text

    def described(one: "Program") -> tuple[str, object, bool]:
        layout = replace(one.recipe.layout, mesh=())  # a resumed run names the mesh that the first chose
        return to_text(replace(one.recipe, layout=layout)), one.mesh, one.faulty

    return next((one for one in _prepared if described(one) == described(program)), program)
