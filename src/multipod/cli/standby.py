"""`multipod train` as a process that waits for the place of one that ended: under `multipod launch --standby`."""

import importlib
import os
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from multipod.cli.main import cli, starts_now
from multipod.cli.options import Where, chosen_recipe
from multipod.train.heartbeat import CONTROL_FD
from multipod.train.standby import WAITS, told

if TYPE_CHECKING:
    from multipod.cli.train import Request

NEEDED = (
    "orbax.checkpoint",
    "multipod.step.programs",
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
    """Imports what the run needs, waits, and then runs what the launcher says; returns its exit code."""
    from multipod.cli.train import remembered
    from multipod.train.joining import devices_made

    for name in NEEDED:
        importlib.import_module(name)
    with suppress(Exception):  # whoever runs it says what is wrong
        request, where = remembered(request, where, where.cluster.processes * where.cpu_devices)
        recipe = chosen_recipe(request.recipe, request.changes, replace(where, fail=()))
        recipe.data.train()
        recipe.data.test()
    if devices_made():
        return 0  # such a process cannot join others any more: one that starts then takes its place
    said = told(int(os.environ[CONTROL_FD]))
    if said is None:
        return 0
    arguments, environment = said
    del os.environ[WAITS]
    os.environ.update(environment)
    sys.argv[1:] = arguments
    starts_now()
    return int(cli.main(arguments, standalone_mode=False) or 0)
