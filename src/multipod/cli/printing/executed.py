"""What `multipod schedule check --executed` prints: what a schedule sends when JAX devices run it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click

from multipod.collectives.schedule import Schedule
from multipod.execute.engines import jax as engine
from multipod.execute.engines.rounds import build_rounds
from multipod.layout.hlo import Text, sum_link_bytes
from multipod.simulate.picture import bytes_text


@dataclass(frozen=True)
class Executed:
    """What a schedule's program sends.

    Attributes:
      chips: devices that run it.
      nbytes: the vector on each.
      steps: that wait for each other.
      permutes: of the whole run.
      written: of them, in the program's text.
      own: bytes that the schedule itself sends, all together.
      by_link: bytes by (kind of message dimension of the link), all together.
    """

    chips: int
    nbytes: int
    steps: int
    permutes: int
    written: int
    own: int
    by_link: Mapping[Any, float]

    def data(self) -> dict[str, Any]:
        """Returns the counts by name, as JSON has them."""
        links = [{"kind": kind, "dimension": link, "bytes": n} for (kind, link), n in sorted(self.by_link.items())]
        return {**vars(self), "by_link": links}


def count_executed(schedule: Schedule, nbytes: int) -> Executed:
    """Lowers the program of the schedule for TPUs that need not be here, and counts in its text.

    The environment must have been settled by `multipod.runtime.absent_tpus`.

    Raises:
      ScheduleError: the schedule cannot be executed.
    """
    elements = max(1, nbytes // 4)
    rounds = build_rounds(schedule, elements)
    text = Text(engine.lower(schedule, elements).as_text("hlo"))
    by_link = sum_link_bytes(text.collectives, schedule.topology)
    chips, own = len(schedule.topology.chips), 4 * schedule.sent(elements)
    return Executed(chips, 4 * elements, rounds.steps, rounds.count, rounds.written, own, by_link)


def print_executed(counted: Executed) -> None:
    """Prints what was counted."""
    chips, sent = counted.chips, sum(counted.by_link.values())
    click.echo(
        f"executed on {chips:,} JAX devices, {bytes_text(counted.nbytes)} each: {counted.steps:,} steps that wait for "
        f"each other, {counted.permutes:,} permutes, {counted.written:,} in the program"
    )
    times = f", {sent / counted.own:.4f} times what the schedule sends" if counted.own else ""
    click.echo(f"sends {bytes_text(sent / chips)} a device{times}")
    for (kind, link), carried in sorted(counted.by_link.items()):
        click.echo(f"  {kind} over dimension {link}: {bytes_text(carried / chips)} a device")
