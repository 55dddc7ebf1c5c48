"""What `multipod schedule check --executed` prints: what a schedule sends when JAX devices run it."""

import click

from multipod.collectives.schedule import Schedule
from multipod.execute.engines import jax as engine
from multipod.execute.engines.rounds import build_rounds
from multipod.layout.hlo import Text, sum_link_bytes
from multipod.simulate.picture import bytes_text


def print_executed(schedule: Schedule, nbytes: int) -> None:
    """Lowers the program of the schedule for TPUs that need not be here, and prints what is counted in its text.

    The environment must have been settled by `multipod.runtime.absent_tpus`.

    Raises:
      ScheduleError: the schedule cannot be executed.
    """
    elements = max(1, nbytes // 4)
    rounds = build_rounds(schedule, elements)
    text = Text(engine.lower(schedule, elements).as_text("hlo"))
    by_link = sum_link_bytes(text.collectives, schedule.topology)
    sent, own = sum(by_link.values()), 4 * schedule.sent(elements)
    chips = len(schedule.topology.chips)
    click.echo(
        f"executed on {chips:,} JAX devices, {bytes_text(4 * elements)} each: {rounds.steps:,} steps that wait for "
        f"each other, {rounds.count:,} permutes, {rounds.written:,} in the program"
    )
    times = f", {sent / own:.4f} times what the schedule sends" if own else ""
    click.echo(f"sends {bytes_text(sent / chips)} a device{times}")
    for (kind, link), carried in sorted(by_link.items()):
        click.echo(f"  {kind} over dimension {link}: {bytes_text(carried / chips)} a device")
