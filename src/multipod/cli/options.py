"""Options that several commands share, and what they settle before JAX is imported."""

import functools
import logging
import math
import os
import shlex
import sys
import threading
from collections.abc import Callable, MutableMapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import click

from multipod import runtime
from multipod.cli import cluster, completion
from multipod.cli.main import started_s
from multipod.elastic.heartbeat import CONTROL_FD, Heartbeat
from multipod.layout.layout import parse_shape
from multipod.layout.text import layout_changes, layout_help
from multipod.runs.options import RuntimeOptions

F = TypeVar("F", bound=Callable[..., Any])


def where_options(command: F) -> F:
    """Adds --mesh, --fail, --cpu-devices, --timeout and --cache.

    The command gets one argument `where`, and JAX is ready.
    """

    @click.option("--mesh", metavar="RxC", help="Rows x columns of devices, as 2x4.  [default: all devices]")
    @click.option(
        "--fail",
        multiple=True,
        metavar="CHIPS",
        help="Do without these chips of the mesh: 0,1 is row 0, column 1; 0-1,2-3 a block. Repeatable.",
    )
    @click.option(
        "--cpu-devices",
        type=click.IntRange(1, 2048),
        help="Virtual CPU devices of this process.  [default: 8]",
    )
    @click.option(
        "--timeout", type=float, default=runtime.Timeouts().limit_s, show_default=True, metavar="SECONDS",
        help="The longest that anything waits for a peer.",
    )  # fmt: skip
    @click.option("--cache", metavar="DIR", help="Compiled programs; `off` for none.  [default: ~/.cache/multipod/xla]")
    @functools.wraps(command)
    def with_where(
        *args: Any,
        mesh: str | None,
        fail: tuple[str, ...],
        cpu_devices: int | None,
        timeout: float,
        cache: str | None,
        **kwargs: Any,
    ) -> Any:
        return command(*args, where=settle(mesh, fail, cpu_devices, timeout, cache), **kwargs)

    return with_where  # type: ignore[return-value]


def what_options(command: F) -> F:
    """Adds --layout, --set, --seed and --gradient-sum; the command gets a list of `name=value`, `changes`."""

    @click.option(
        "--set", "sets", multiple=True, metavar="NAME=VALUE", help="Change a field of the recipe. Repeatable."
    )
    @click.option("--seed", type=click.IntRange(0), help="The same as --set seed=N.")
    @click.option(
        "--gradient-sum",
        shell_complete=completion.gradient_sums,
        metavar="NAME",
        help="The same as --set layout.gradient_sum=NAME, as ring or tree-packing.",
    )
    @click.option(
        "--layout",
        metavar="LAYOUT",
        help=f"{layout_help()} Of train: or PLAN.json, as `multipod plan --save` wrote it.",
    )
    @functools.wraps(command)
    def with_changes(
        *args: Any,
        sets: tuple[str, ...],
        seed: int | None,
        gradient_sum: str | None,
        layout: str | None,
        **kwargs: Any,
    ) -> Any:
        short = {"seed": seed, "layout.gradient_sum": gradient_sum}
        laid = layout_changes(layout) if layout and plan_file(layout) is None else []
        changes = [*laid, *sets, *(f"{name}={value}" for name, value in short.items() if value is not None)]
        return command(*args, changes=changes, **kwargs)

    return with_changes  # type: ignore[return-value]


def start_options(command: F) -> F:
    """Adds --fresh, --without and --library: what of another library's weights is taken."""
    options = (
        click.option(
            "--fresh", multiple=True, metavar="NAMES", help="Tensors of ours that begin fresh, as 'head/*'. Repeatable."
        ),
        click.option(
            "--without", multiple=True, metavar="NAMES", help="Tensors of theirs to leave out, as 'fc.*'. Repeatable."
        ),
        click.option(
            "--library", default="", metavar="LIBRARY", help="Whose weights they are.  [default: told by their names]"
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def plan_file(layout: str | None) -> Path | None:
    """The plan that --layout names; None where it spells a layout."""
    return Path(layout) if layout and layout.endswith(".json") else None


def quiet_savers() -> None:
    """Lets a save that fails be told once, by us: Orbax also logs what it raises, and TensorStore prints tracebacks."""
    for talker in ("absl", "asyncio"):
        logging.getLogger(talker).setLevel(logging.CRITICAL)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_unless_closed
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = lambda thrown: None if is_closed_loop(thrown.exc_value) else _thread_hook(thrown)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = lambda thrown: None if is_closed_loop(thrown.exc_value) else _unraisable_hook(thrown)


def print_unless_closed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Prints what nobody caught, but not that Orbax had closed the event loop of a thread of TensorStore."""
    if not is_closed_loop(error):
        sys.__excepthook__(kind, error, trace)


def is_closed_loop(error: BaseException | None) -> bool:
    """Whether this is what a thread of TensorStore finds where Orbax has ended a save that failed."""
    return isinstance(error, RuntimeError) and str(error) == "Event loop is closed"


_thread_hook, _unraisable_hook = threading.__excepthook__, sys.__unraisablehook__


def settle(
    mesh: str | None,
    fail: tuple[str, ...],
    cpu_devices: int | None,
    timeout: float,
    cache: str | None,
    environment: MutableMapping[str, str] = os.environ,
) -> RuntimeOptions:
    """Reads the options and the environment, and prepares JAX; it must not have been imported before.

    Raises:
      LayoutError: a malformed mesh.
      ClusterError: a cluster whose processes cannot be joined.
    """
    quiet_savers()
    shape = parse_shape(mesh) if mesh else None
    try:
        timeouts = runtime.Timeouts(timeout)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    found = cluster.find(environment)
    devices = cpu_devices or max(1, (math.prod(shape) if shape and found.processes > 1 else 8) // found.processes)
    folder = None if cache == "off" else Path(cache) if cache else runtime.default_cache()
    here = found.processes if found.explicit else 1  # only the launcher's are known to share this host
    runtime.prepare(devices, timeouts, folder, here, found.survives, environment)
    command = shlex.join(["multipod", *sys.argv[1:]])
    if found.waits:  # it says nothing, and joins nobody
        return RuntimeOptions(shape, fail, devices, timeouts, folder, found, None, command, started_s())
    descriptor = environment.get(CONTROL_FD)
    heartbeat = None if descriptor is None else Heartbeat(int(descriptor), timeouts.beat_s)
    if not found.survives:  # else it joins one world after the other, as it hears of them
        cluster.join(found, timeouts)
    return RuntimeOptions(shape, fail, devices, timeouts, folder, found, heartbeat, command, started_s())
