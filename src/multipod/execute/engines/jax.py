"""Runs a `Schedule` between JAX devices, inside `jax.shard_map`, by `lax.ppermute`.

The device with row-major number r over the given mesh axes stands for the live chip of rank r: chips
that have failed are no part of the mesh. Sums are added in the schedule's order, so the bits are those
of the NumPy reference.
"""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

from multipod.collectives.schedule import ADD, Schedule
from multipod.errors import ScheduleError
from multipod.execute.engines.permutations import RankPair
from multipod.execute.engines.rounds import Column, Phase, Rounds, RoundShape, build_rounds
from multipod.execute.target import target_platform

Form = Literal["written out", "looped", "switched"]

WRITTEN_OUT = 8
"""Rounds up to which the steps are written out one by one, so that XLA may overlap them with what is around them."""

FEW_KERNELS = 4
"""Rounds in the text up to which CPU devices run plain loops. XLA for CPU compiles two kernels for each, some 50 ms;
one loop with a switch over the permutations has few kernels in all, and pads all messages to the longest."""

SEGMENT_BYTES = 128 << 10, 1 << 20
"""On CPU devices messages are cut to an eighth of the vector, no less than the first and no more than the second, where
that changes nothing. Long messages take fresh memory, which is slow, and a switch pads all messages to the longest:
`halving-doubling` of 16 MB on 8 devices took 183 ms uncut and 87 cut, and of 1 MB 11.5 and 7.6 (two cores of a Xeon,
2026-11-21)."""


def run(schedule: Schedule, vector: jax.Array, axes: Sequence[str], form: Form | None = None) -> jax.Array:
    """This device's vector after the schedule's last step, of any collective.

    Steps that repeat are loops over tables of places, the others are written out; up to `WRITTEN_OUT` rounds, all are.
    Where that would be many kernels, CPU devices run one loop with a switch over the permutations. `form` is chosen
    so if it is None; the results are the same.

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
    rounds = choose_rounds(schedule, vector, platform)
    form = form or choose_form(rounds, platform)
    if form == "switched" and rounds.phases:
        return _run_switched(rounds, vector, names)
    rank, places = lax.axis_index(names), jnp.asarray(rounds.places)
    for phase in rounds.phases:
        vector = _run_phase(phase, _select_rows(phase, places, rank), vector, names, loop=form == "looped")
    return vector


def choose_form(rounds: Rounds, platform: str) -> Form:
    """The form of program for such devices; the results are the same."""
    if platform == "cpu":
        return "looped" if rounds.written <= FEW_KERNELS else "switched"
    return "written out" if rounds.count <= WRITTEN_OUT else "looped"


def choose_rounds(schedule: Schedule, vector: jax.Array | jax.ShapeDtypeStruct, platform: str) -> Rounds:
    """The rounds of the schedule for such a vector on devices of this platform."""
    if platform != "cpu":
        return build_rounds(schedule, vector.size)
    least, most = SEGMENT_BYTES
    segment = min(max(least, vector.size * vector.dtype.itemsize // 8), most)
    return build_rounds(schedule, vector.size, max(1, segment // vector.dtype.itemsize))


def lower(schedule: Schedule, elements: int, platform: str = "tpu") -> jax.stages.Lowered:
    """The program of `run` for float32 vectors of so many elements, on devices of this platform that need not be here.

    Seconds for thousands of devices; device number r stands for the live chip of rank r.

    Raises:
      ScheduleError: as `run`.
    """
    chips = len(schedule.topology.chips)
    device = AbstractDevice(device_kind=platform, num_cores=None, platform=platform)
    mesh = AbstractMesh((chips,), ("chip",), axis_types=(AxisType.Auto,), abstract_device=device)
    spec = PartitionSpec("chip")
    function = jax.shard_map(
        lambda vector: run(schedule, vector[0], ("chip",))[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    vectors = jax.ShapeDtypeStruct((chips, elements), jnp.float32, sharding=NamedSharding(mesh, spec))
    return jax.jit(function).trace(vectors).lower(lowering_platforms=(platform,))


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


def _run_phase(phase: Phase, rows: jax.Array, vector: jax.Array, axes: tuple[str, ...], loop: bool) -> jax.Array:
    """The vector after a phase, as a loop or written out; `rows` as from `_select_rows`."""

    def trip(vector: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
        first = 0
        for shape in phase.shapes:
            vector = _run_step(shape, axes, vector, row[first : first + len(shape.pairs)])
            first += len(shape.pairs)
        return vector, None

    return lax.scan(trip, vector, rows, unroll=1 if loop else phase.times)[0]


def _run_switched(rounds: Rounds, vector: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The vector after one loop over all steps. Only the messages go through the switch: it would copy the vector."""
    shapes = [shape for phase in rounds.phases for _ in range(phase.times) for shape in phase.shapes]
    widths = rounds.widths
    ops = frozenset().union(*(op for shape in shapes for op in shape.ops))
    branches = {shape.pairs: number for number, shape in reversed(list(enumerate(shapes)))}
    order = {number: place for place, number in enumerate(sorted(branches.values()))}
    numbers = jnp.array([order[branches[shape.pairs]] for shape in shapes], jnp.int32)

    def exchange(pairs_of: Sequence[Sequence[RankPair]], messages: list[jax.Array]) -> list[jax.Array]:
        sent = [lax.ppermute(message, axes, pairs) for message, pairs in zip(messages, pairs_of, strict=False)]
        return sent + messages[len(sent) :]

    def body(vector: jax.Array, step: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        number, row_of = step
        messages = [_slice(vector, row[0], width) for row, width in zip(row_of, widths, strict=True)]
        arrived = lax.switch(number, [partial(exchange, shapes[number].pairs) for number in order], messages)
        for message, row in zip(arrived, row_of, strict=True):
            vector = _write(vector, message, row, ops, full=False)
        return vector, None

    table = np.concatenate([_write_steps(phase, rounds.places, len(widths)) for phase in rounds.phases])
    rows = lax.dynamic_index_in_dim(jnp.asarray(table), lax.axis_index(axes), 2, keepdims=False)
    return lax.scan(body, vector, (numbers, rows))[0]


def _write_steps(phase: Phase, places: np.ndarray, slots: int) -> np.ndarray:
    """int32 [steps, slots, chips, 4]: the table of a phase by steps; what is added neither sends nor receives."""
    table = phase.write_table(places)
    steps = np.zeros((phase.times, len(phase.shapes), slots, *table.shape[2:]), np.int32)
    first = 0
    for number, shape in enumerate(phase.shapes):
        steps[:, number, : len(shape.pairs)] = table[:, first : first + len(shape.pairs)]
        first += len(shape.pairs)
    return steps.reshape(-1, *steps.shape[2:])


def _select_rows(phase: Phase, places: jax.Array, rank: jax.Array) -> jax.Array:
    """This device's part of `Phase.write_table`, worked out on the device: int32 [times, rounds, 4]."""
    send, receive, count, op, low = (_select_column(column, rank) for column in phase.columns)
    lengths = jnp.array([length for shape in phase.shapes for length in shape.lengths], jnp.int32)
    begin = places[receive] + low
    end = jnp.where(count == 0, begin, jnp.minimum(begin + lengths, places[receive + count]))
    return jnp.stack([places[send] + low, begin, end, op], axis=-1)


def _select_column(column: Column, rank: jax.Array) -> jax.Array:
    """int32 [times, rounds] of a column, or what broadcasts to that."""
    base = jnp.asarray(column.base)[rank]
    kind = 0 if len(column.pattern) == 1 else jnp.asarray(column.kind)[rank]
    return base + jnp.asarray(column.pattern)[kind]


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
