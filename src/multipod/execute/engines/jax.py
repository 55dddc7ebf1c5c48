"""Runs a `Schedule` between JAX devices, inside `jax.shard_map`, by `lax.ppermute`.

The device with row-major number r over the given mesh axes stands for the live chip of rank r: chips
that have failed are no part of the mesh. Sums are added in the schedule's order, so the bits are those
of the NumPy reference.
"""

from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multipod.collectives.schedule import ADD, Schedule
from multipod.errors import ScheduleError
from multipod.execute.engines.rounds import Rounds, RoundShape, build_rounds
from multipod.execute.target import target_platform

Form = Literal["written out", "looped"]

WRITTEN_OUT = 8
"""Rounds up to which the steps are written out one by one, so that XLA may overlap them with what is around them."""

SEGMENT_BYTES = 128 << 10, 1 << 20
"""On CPU devices messages are cut to an eighth of the vector, no less than the first and no more than the second, where
that changes nothing. Long messages take fresh memory, which is slow, and a loop with a switch pads all messages to the
longest: `halving-doubling` of 16 MB on 8 devices took 183 ms uncut and 87 cut, and of 1 MB 11.5 and 7.6 (two cores of a
Xeon, 2026-11-21)."""


def run(schedule: Schedule, vector: jax.Array, axes: Sequence[str], form: Form | None = None) -> jax.Array:
    """This device's vector after the schedule's last step, of any collective.

    Few steps are written out, many are one loop over tables of places and lengths, with a switch
    over the distinct permutations: it compiles in a time that hardly grows with the number of steps. `form`
    chooses between the two; the results are the same. If it is None, up to `WRITTEN_OUT` rounds are written out,
    and on CPU devices just one: there XLA copies the vector once more than in a loop.

    It is made of sends and sums that JAX differentiates, in either direction.

    Raises:
      ScheduleError: the axes do not hold one device for each live chip, or the vector is not flat.
    """
    names, chips = tuple(axes), len(schedule.topology.chips)
    if vector.ndim != 1:
        raise ScheduleError(f"{schedule}: a vector of shape {vector.shape} is not flat. Pass vector.ravel().")
    if lax.axis_size(names) != chips:
        raise ScheduleError(
            f"{schedule} is for {chips} chips, and mesh axes {', '.join(names)} have {lax.axis_size(names)} devices. "
            "Leave the devices of failed chips out of the mesh, or build the schedule for this one."
        )
    platform = target_platform()
    if form is None:
        few = 1 if platform == "cpu" else WRITTEN_OUT
        form = (
            "written out" if choose_rounds(schedule, vector, share=False, platform=platform).count <= few else "looped"
        )
    rounds = choose_rounds(schedule, vector, share=form == "looped", platform=platform)
    return (_run_looped if form == "looped" and rounds.count else _run_written_out)(rounds, vector, names)


def choose_rounds(
    schedule: Schedule, vector: jax.Array | jax.ShapeDtypeStruct, *, share: bool, platform: str
) -> Rounds:
    """The rounds of the schedule for such a vector on devices of this platform; `share` as for `build_rounds`."""
    if platform != "cpu":
        return build_rounds(schedule, vector.size, share)
    least, most = SEGMENT_BYTES
    segment = min(max(least, vector.size * vector.dtype.itemsize // 8), most)
    return build_rounds(schedule, vector.size, share, max(1, segment // vector.dtype.itemsize))


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def all_reduce(schedule: Schedule, vector: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of the devices' vectors, on each of them; vectors of any length and dtype.

    Like `psum` in `shard_map` without `check_vma`, it is its own derivative: the gradient with respect to one
    device's vector is the sum of the gradients with respect to all results.

    Raises:
      ScheduleError: a schedule of another collective; as `run`.
    """
    _check_collective(schedule, "all-reduce")
    return run(schedule, vector, axes)


def _all_reduce_forward(schedule: Schedule, vector: jax.Array, axes: tuple[str, ...]) -> tuple[jax.Array, None]:
    return all_reduce(schedule, vector, axes), None


def _all_reduce_backward(schedule: Schedule, axes: tuple[str, ...], _: None, ct: jax.Array) -> tuple[jax.Array]:
    return (all_reduce(schedule, ct, axes),)


all_reduce.defvjp(_all_reduce_forward, _all_reduce_backward)


def reduce_scatter(schedule: Schedule, vector: jax.Array, axes: Sequence[str]) -> jax.Array:
    """Share r of the sum of the devices' vectors, on the device of rank r. All shares are equally long.

    An all-reduce schedule does it too, at its own cost.

    Raises:
      ScheduleError: a length that does not divide by the devices, a schedule of another collective; as `run`.
    """
    _check_collective(schedule, "reduce-scatter", "all-reduce")
    chips = len(schedule.topology.chips)
    if len(vector) % chips:
        raise ScheduleError(
            f"{schedule}: {len(vector)} elements do not divide into {chips} shares. "
            f"Pad the vector to {-(-len(vector) // chips) * chips}."
        )
    share = len(vector) // chips
    return lax.dynamic_slice(run(schedule, vector, axes), (lax.axis_index(tuple(axes)) * share,), (share,))


def all_gather(schedule: Schedule, share: jax.Array, axes: Sequence[str]) -> jax.Array:
    """The devices' shares, equally long, one after the other by rank, on each of them.

    An all-reduce schedule does it too, at its own cost: the rest of the vector is then -0.0, which added to
    anything leaves its bits as they are.

    Raises:
      ScheduleError: a schedule of another collective; as `run`.
    """
    _check_collective(schedule, "all-gather", "all-reduce")
    padded = jnp.full(len(share) * len(schedule.topology.chips), -0.0, share.dtype)
    begin = (lax.axis_index(tuple(axes)) * len(share),)
    return run(schedule, lax.dynamic_update_slice(padded, share, begin), axes)


def _check_collective(schedule: Schedule, *collectives: str) -> None:
    if schedule.collective not in collectives:
        raise ScheduleError(
            f"{schedule} is no {' or '.join(collectives)}. Build it with collective={collectives[0]!r}."
        )


def _run_written_out(rounds: Rounds, vector: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    rank = lax.axis_index(axes)
    for number, table in zip(rounds.shape_of, rounds.tables, strict=True):
        vector = _run_step(rounds.shapes[number], axes, vector, _select_rows(table, rank))
    return vector


def _run_looped(rounds: Rounds, vector: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """One loop for all steps. Only the messages go through the switch: it would copy the vector."""
    if len(rounds.shapes) == 1:
        step = partial(_run_step, rounds.shapes[0], axes)
        rows = _select_rows(np.stack(rounds.tables), lax.axis_index(axes))
        return lax.scan(lambda vector, row: (step(vector, row), None), vector, rows)[0]
    widths = [max(lengths) for lengths in zip_longest(*(shape.lengths for shape in rounds.shapes), fillvalue=0)]
    ops = frozenset().union(*(op for shape in rounds.shapes for op in shape.ops))
    tables = np.zeros((len(rounds.tables), len(widths), *rounds.tables[0].shape[1:]), np.int32)
    for padded, table in zip(tables, rounds.tables, strict=True):
        padded[: len(table)] = table

    def exchange(shape: RoundShape, messages: list[jax.Array]) -> list[jax.Array]:
        sent = [lax.ppermute(message, axes, pairs) for message, pairs in zip(messages, shape.pairs, strict=False)]
        return sent + messages[len(sent) :]

    def body(vector: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        number, rows = step
        messages = [_slice(vector, row[0], width) for row, width in zip(rows, widths, strict=True)]
        arrived = lax.switch(number, [partial(exchange, shape) for shape in rounds.shapes], messages)
        for message, row in zip(arrived, rows, strict=True):
            vector = _write(vector, message, row, ops, full=False)
        return vector, None

    steps = jnp.asarray(rounds.shape_of, jnp.int32), _select_rows(tables, lax.axis_index(axes))
    return lax.scan(body, vector, steps)[0]


def _select_rows(table: np.ndarray, rank: jax.Array) -> jax.Array:
    """This device's rows of a table [..., chips, 4]."""
    return lax.dynamic_index_in_dim(jnp.asarray(table), rank, table.ndim - 2, keepdims=False)


def _run_step(shape: RoundShape, axes: tuple[str, ...], vector: jax.Array, rows: jax.Array) -> jax.Array:
    """The vector after one step; `rows` is this device's part of the step's table, [rounds, 4]."""
    one_by_one = shape.independent and target_platform() == "cpu"
    before = vector
    arrived = []
    for pairs, length, row, ops, full in zip(shape.pairs, shape.lengths, rows, shape.ops, shape.full, strict=True):
        if one_by_one:
            # Where no round reads what another one writes, each may read what the one before it has left. Without
            # this XLA for CPU puts writes before reads and copies the vector: 8 times slower at 16 MB (2026-11-21).
            # Elsewhere the rounds of a step are to travel at the same time.
            message = lax.ppermute(_slice(vector, row[0], length), axes, pairs)
            vector = _write(vector, message, row, ops, full)
        else:
            arrived.append(lax.ppermute(_slice(before, row[0], length), axes, pairs))
    for message, row, ops, full in zip(arrived, rows, shape.ops, shape.full, strict=False):
        vector = _write(vector, message, row, ops, full)
    return vector


def _write(vector: jax.Array, payload: jax.Array, row: jax.Array, ops: frozenset[int], full: bool) -> jax.Array:
    """`vector` with an arrived message added or copied between row[1] and row[2]."""
    begin, end, op = row[1], row[2], row[3]
    old = _slice(vector, begin, len(payload))
    start = _start_of(vector, begin, len(payload))
    new = payload if ADD not in ops else old + payload if ops == {ADD} else jnp.where(op == ADD, old + payload, payload)
    if not full:  # the message is shorter than the round's longest, or there is none for this device
        place = start + lax.iota(jnp.int32, len(payload))
        new = jnp.where((place >= begin) & (place < end), new, old)
    return lax.dynamic_update_slice(vector, new, (start,))


def _slice(vector: jax.Array, begin: jax.Array, length: int) -> jax.Array:
    return lax.dynamic_slice(vector, (_start_of(vector, begin, length),), (length,))


def _start_of(vector: jax.Array, begin: jax.Array, length: int) -> jax.Array:
    """Where a slice of `length` begins that holds the message at `begin`: earlier, if it would pass the end.

    Sender and receiver find the same place, since a message lies at the same place in both vectors.
    """
    return jnp.minimum(begin, len(vector) - length)
