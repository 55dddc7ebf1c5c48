"""Options that several commands share, and what they settle before JAX is imported."""

import functools
import logging
import math
import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from multipod import runtime
from multipod.cli import cluster
from multipod.layout.layout import parse_shape
from multipod.train.heartbeat import CONTROL_FD, Heartbeat

if TYPE_CHECKING:
    from multipod.recipe.recipe import Recipe

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class Where:
    """Where a command runs: mesh, devices, time-out, cache. None of it changes what a run learns.

    `heartbeat` is what the launcher listens to; None if this process was not launched by one.
    """

    mesh: tuple[int, int] | None
    cpu_devices: int
    timeouts: runtime.Timeouts
    cache: Path | None
    cluster: cluster.Cluster
    heartbeat: Heartbeat | None = None


def where_options(command: F) -> F:
    """Adds --mesh, --cpu-devices, --timeout and --cache; the command gets one argument `where`, and JAX is ready."""

    @click.option("--mesh", metavar="RxC", help="Rows x columns of devices, as 2x4.  [default: all devices]")
    @click.option(
        "--cpu-devices",
        type=click.IntRange(1, 4096),
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
        cpu_devices: int | None,
        timeout: float,
        cache: str | None,
        **kwargs: Any,
    ) -> Any:
        return command(*args, where=settle(mesh, cpu_devices, timeout, cache), **kwargs)

    return with_where  # type: ignore[return-value]


def what_options(command: F) -> F:
    """Adds --set and --seed; the command gets one argument `changes`, a list of `name=value`."""

    @click.option(
        "--set", "sets", multiple=True, metavar="NAME=VALUE", help="Change a field of the recipe. Repeatable."
    )
    @click.option("--seed", type=click.IntRange(0), help="The same as --set seed=N.")
    @functools.wraps(command)
    def with_changes(*args: Any, sets: tuple[str, ...], seed: int | None, **kwargs: Any) -> Any:
        return command(*args, changes=[*sets, *([] if seed is None else [f"seed={seed}"])], **kwargs)

    return with_changes  # type: ignore[return-value]


def settle(
    mesh: str | None,
    cpu_devices: int | None,
    timeout: float,
    cache: str | None,
    environment: MutableMapping[str, str] = os.environ,
) -> Where:
    """Reads the options and the environment, and prepares JAX; it must not have been imported before.

    Raises:
      LayoutError: a malformed mesh.
      ClusterError: a cluster whose processes cannot be joined.
    """
    for talker in ("absl", "asyncio"):
        logging.getLogger(talker).setLevel(logging.CRITICAL)  # Orbax also logs what it raises
    shape = parse_shape(mesh) if mesh else None
    try:
        timeouts = runtime.Timeouts(timeout)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    found = cluster.find(environment)
    devices = cpu_devices or max(1, (math.prod(shape) if shape and found.processes > 1 else 8) // found.processes)
    folder = None if cache == "off" else Path(cache) if cache else runtime.default_cache()
    here = found.processes if found.explicit else 1  # only the launcher's are known to share this host
    runtime.prepare(devices, timeouts, folder, here, environment)
    descriptor = environment.get(CONTROL_FD)
    heartbeat = None if descriptor is None else Heartbeat(int(descriptor), timeouts.beat_s)
    cluster.join(found, timeouts)
    return Where(shape, devices, timeouts, folder, found, heartbeat)


def chosen_recipe(name: str, changes: list[str], where: Where) -> "Recipe":
    """The recipe of this name with `changes`, and the mesh of `where` in its layout.

    Raises:
      RecipeError: no such recipe, or a change that does not fit.
    """
    from multipod.recipe.override import override
    from multipod.recipes.find import load

    mesh = [] if where.mesh is None else [f"layout.mesh={where.mesh[0]}x{where.mesh[1]}"]
    return override(load(name), [*changes, *mesh])
