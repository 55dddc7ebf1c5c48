"""`multipod train` as a process that waits for the place of one that ended: under `multipod launch --standby`."""

import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from multipod.cli.cluster import join
from multipod.cli.main import cli, starts_now
from multipod.elastic.heartbeat import CONTROL_FD
from multipod.elastic.launcher.standby import STANDBY_VARIABLE, wait_for_command
from multipod.errors import ClusterError
from multipod.runs.options import RuntimeOptions

if TYPE_CHECKING:
    from multipod.runs.request import TrainRequest


def stand_by(request: "TrainRequest", options: RuntimeOptions) -> int:
    """Compiles and connects, waits for the launcher's go, then runs the given command. Returns its exit code.

    The processes that wait are joined with each other in a world of their own, on whose devices the update is compiled:
    when they are told to go on they read the checkpoint, and train.
    """
    from multipod.elastic.worker.jax_world import has_devices
    from multipod.runs.standby import import_needed, prepare

    request, options = import_needed(request, options)
    if has_devices():
        return 0  # such a process cannot join others any more: one that starts then takes its place
    try:
        join(options.cluster, options.timeouts)
    except ClusterError:
        return 0  # one of them has ended: the launcher starts new ones
    with suppress(Exception):  # whoever runs it says what is wrong
        prepare(request, options)
    command = wait_for_command(int(os.environ[CONTROL_FD]))
    if command is None:
        return 0
    arguments, environment = command
    del os.environ[STANDBY_VARIABLE]
    os.environ.update(environment)
    sys.argv[1:] = arguments
    starts_now()
    return int(cli.main(arguments, standalone_mode=False) or 0)
