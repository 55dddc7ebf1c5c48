"""Schedules on JAX devices: the bits of the NumPy reference, in every form of program, and their derivatives."""

import itertools
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, PartitionSpec
from processes import clean_environment

from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import ADASUM, COPY, Schedule, even_bounds, make_step
from multipod.errors import MultipodError, ScheduleError
from multipod.execute.engines import jax as engine
from multipod.execute.engines import numpy as reference
from multipod.execute.engines.permutations import collect_sends, colour_pairs
from multipod.execute.engines.rounds import build_rounds
from multipod.execute.sums import build_scheduled_sum
from multipod.topology.topology import Topology

pytestmark = pytest.mark.jax_version

MACHINES = {
    "mesh": (Topology((2, 4)), (2, 4)),
    "line": (Topology((8,)), (8,)),
    "cube": (Topology((2, 2, 2), wrap=True), (2, 2, 2)),
    "mesh with a hole": (Topology((2, 4), failed_chips=frozenset({(0, 1)})), (1, 7)),
}
"""What a schedule is built for, and the sizes of the JAX mesh that it runs on."""
FORMS = ("written out", "looped", "switched")
LENGTHS = (1003, 3, 64, 0, 1)
SHORT = {"tree-packing": {"rounds": 2}, "double-tree": {"segments": 3}}
"""Pipelines that compile quickly when all their steps are written out."""
DTYPES = (np.float32, np.int32, jnp.bfloat16, np.float16, np.uint8)
LINE = Topology((4,))
FAN = Schedule(
    "broadcast",
    "fans",
    LINE,
    4,
    even_bounds(4),
    # Chip 1 passes on what it overwrites in the same step, to two chips: no order of these messages is right.
    [
        make_step([0, 1, 1], [1, 2, 3], 0, 2, COPY),
        make_step([0, 1, 1, 2], [1, 2, 3, 0], [2, 2, 2, 3], [4, 3, 4, 4], [COPY, 0, COPY, 0]),
        make_step([1, 2], [0, 3], 1),
        make_step([3, 3, 1, 1], [2, 2, 0, 0], [0, 3, 0, 2]),
    ]
    * 3,
)


def on_devices(function, sizes, *inputs):
    """`function(axes, *vectors)` on each device of a mesh of `sizes`; inputs and results are [devices, ...]."""
    axes = tuple("abc"[: len(sizes)])
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)

    def local(*vectors):
        return jax.tree.map(lambda leaf: leaf[None], function(axes, *(vector[0] for vector in vectors)))

    split = PartitionSpec(axes)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    return jax.tree.map(np.asarray, jax.jit(mapped)(*inputs))


def vectors(devices, length, dtype):
    """Different on every device, of all sizes, so that the order of a sum shows."""
    rng = np.random.default_rng(length)
    scale = np.logspace(-2, 2, devices)[:, None]
    values = rng.normal(size=(devices, length)) * scale
    return (values * 100).astype(np.int64).astype(dtype) if np.dtype(dtype).kind in "iu" else values.astype(dtype)


def expected(schedule, inputs):
    """What the devices must end with, one row each."""
    ended = reference.run(schedule, dict(zip(schedule.topology.chips, inputs, strict=True)))
    return np.stack([ended[chip] for chip in schedule.topology.chips])


def schedules():
    """Every algorithm on every machine that it fits, for all-reduce; and where there is a hole for all that it does."""
    for (algorithm, builder), machine in itertools.product(ALGORITHMS.items(), MACHINES):
        for collective in builder.collectives if "hole" in machine else builder.collectives[:1]:
            try:
                yield algorithm, machine, build(algorithm, MACHINES[machine][0], collective, **SHORT.get(algorithm, {}))
            except MultipodError:
                continue  # the test below counts which algorithms had no machine at all


CASES = list(schedules())


def test_every_algorithm_has_a_case():
    assert {algorithm for algorithm, _, _ in CASES} == set(ALGORITHMS)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_gives_the_bits_of_numpy(algorithm):
    for number, (_, machine, schedule) in enumerate(case for case in CASES if case[0] == algorithm):
        form = (None, "looped", None, "switched", None, "written out")[number % 6]
        dtypes = DTYPES[number % 5], DTYPES[(number + 1) % 5]
        inputs = [
            vectors(len(schedule.topology.chips), n, d) for n, d in zip(LENGTHS[number % 5 :], dtypes, strict=False)
        ]
        run = lambda axes, *v: [engine.run(schedule, one, axes, form) for one in v]  # noqa: B023, E731
        for found, given_ in zip(on_devices(run, MACHINES[machine][1], *inputs), inputs, strict=True):
            assert found.dtype == given_.dtype
            assert found.tobytes() == expected(schedule, given_).tobytes(), (machine, form, given_.shape)


@pytest.mark.parametrize("schedule", [FAN, build("double-tree", LINE, segments=6)], ids=str)
def test_all_forms_of_program_are_the_same(schedule):
    inputs = [vectors(4, 37, np.float32)]
    run = lambda axes, *v: [[engine.run(schedule, one, axes, form) for form in FORMS] for one in v]  # noqa: E731
    for found, given_ in zip(on_devices(run, (2, 2), *inputs), inputs, strict=True):
        for form, one in zip(FORMS, found, strict=True):
            assert one.tobytes() == expected(schedule, given_).tobytes(), form


@pytest.mark.parametrize(
    "schedule",
    [FAN, build("ring", LINE), build("halving-doubling", LINE), build("tree-packing", LINE, rounds=2)],
    ids=str,
)
@pytest.mark.parametrize("segment_bytes", [4, 28, 400])
def test_cut_messages_change_nothing(monkeypatch, schedule, segment_bytes):
    monkeypatch.setattr(engine, "SEGMENT_BYTES", (segment_bytes, segment_bytes))
    inputs = vectors(4, 61, np.float32)
    found = on_devices(lambda axes, v: engine.run(schedule, v, axes, "looped"), (4,), inputs)
    assert found.tobytes() == expected(schedule, inputs).tobytes()


def test_a_step_that_reads_what_it_overwrites_is_not_cut():
    swap = make_step([0, 1], [1, 0], 0, op=COPY)  # each part of a swap is a swap
    shift = make_step([0, 1], [1, 0], [0, 1], [2, 3], COPY)  # chip 1 passes on what the first part gives it
    for step, steps in ((swap, 2), (shift, 1)):
        schedule = Schedule("all-reduce", "cut", Topology((2,)), 3, even_bounds(3), [step])
        assert build_rounds(schedule, 12, most=3).steps == steps


@pytest.mark.parametrize(
    "schedule", [build("double-tree", Topology((2, 4)), segments=40), build("tree-packing", Topology((2, 4)))], ids=str
)
def test_a_long_pipeline_shares_few_shapes(schedule):
    rounds = build_rounds(schedule, 10_000)
    assert rounds.steps == len(schedule.steps)
    assert rounds.written <= rounds.count / 8
    inputs = vectors(8, 10_000, np.float32)
    found = on_devices(lambda axes, v: engine.run(schedule, v, axes), (2, 4), inputs)
    assert found.tobytes() == expected(schedule, inputs).tobytes()


def test_peers_of_a_tile_are_summed_apart():
    schedule = build("ring", Topology((2, 4)), tile=(1, 2))
    inputs = vectors(8, 50, np.float32)
    found = on_devices(lambda axes, v: engine.all_reduce(schedule, v, axes), (2, 4), inputs)
    assert found.tobytes() == expected(schedule, inputs).tobytes()
    for first in (0, 1):
        np.testing.assert_allclose(found[first], inputs[first::2].sum(0), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tree-packing", "double-tree"])
def test_long_vectors_are_cut_finer(name):
    topology = MACHINES["mesh with a hole"][0]

    def pieces(length):
        with pytest.MonkeyPatch.context() as patch:
            built = []
            patch.setattr(engine, "all_reduce", lambda schedule, vector, axes: built.append(schedule))
            build_scheduled_sum(name, topology, ("a",)).all_reduce(jax.ShapeDtypeStruct((length,), np.float32))
        return built[0].pieces

    assert pieces(10) <= 2 < pieces(100_000) < pieces(10_000_000)


def test_halves_are_inverse_and_an_all_reduce_stands_in_for_them():
    inputs = vectors(7, 70, np.int32)
    topology, sizes = MACHINES["mesh with a hole"]
    for algorithm in ("ring", "double-tree"):

        def halves(axes, vector, algorithm=algorithm):
            total = build_scheduled_sum(algorithm, topology, axes)
            share = total.reduce_scatter(vector)
            return share, total.all_gather(share), total.all_reduce(vector)

        share, gathered, whole = on_devices(halves, sizes, inputs)
        np.testing.assert_array_equal(share.ravel(), inputs.sum(0))
        np.testing.assert_array_equal(gathered, np.broadcast_to(inputs.sum(0), (7, 70)))
        np.testing.assert_array_equal(whole, gathered)


@pytest.mark.slow
def test_derivatives_are_those_of_psum():
    inputs, weights = vectors(8, 24, np.float32), vectors(8, 24, np.float32)[::-1].copy()
    topology, sizes = MACHINES["mesh"]
    names = {"ring": "looped", "halving-doubling": "written out"}

    def gradients(axes, vector, weight):
        def grad(all_reduce, reduce_scatter, all_gather):
            def loss(v):
                share = reduce_scatter(jnp.sin(v))
                return (weight * all_reduce(v) ** 2).sum() + (weight * all_gather(share**2)).sum()

            return jax.grad(loss)(vector)

        def jvp(all_reduce):
            return jax.jvp(lambda v: all_reduce(v**2), (vector,), (weight,))[1]

        psum = (
            lambda v: lax.psum(v, axes),
            lambda v: lax.psum_scatter(v, axes, tiled=True),
            lambda v: lax.all_gather(v, axes, tiled=True),
        )
        found = [grad(*psum)]
        for name in names:
            total = build_scheduled_sum(name, topology, axes)
            found.append(grad(total.all_reduce, total.reduce_scatter, total.all_gather))
        forward = [jvp(lambda v: engine.run(build(n, topology), v, axes, form)) for n, form in names.items()]  # noqa: B023
        return found, [jvp(psum[0]), *forward]

    for first, *others in on_devices(gradients, sizes, inputs, weights):
        for other in others:
            np.testing.assert_allclose(other, first, rtol=2e-4, atol=2e-3 * np.abs(first).max())


def test_gathered_shares_keep_the_sign_of_zero():
    inputs = np.full((4, 3), -0.0, np.float32)
    for name in ("ring", "double-tree"):
        found = on_devices(lambda axes, v, name=name: build_scheduled_sum(name, LINE, axes).all_gather(v), (4,), inputs)
        assert np.signbit(found).all(), name


def test_nan_and_infinity_pass_through_as_in_any_sum():
    inputs = np.zeros((4, 9), np.float32)
    inputs[1, 2], inputs[2, 5], inputs[0, 7], inputs[3, 7] = np.nan, np.inf, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        total = inputs.sum(0)
    found = on_devices(lambda axes, v: engine.all_reduce(build("ring", LINE), v, axes), (4,), inputs)
    np.testing.assert_array_equal(found, np.broadcast_to(total, (4, 9)))


def test_one_device_keeps_its_vector():
    inputs = vectors(1, 5, np.float32)
    found = on_devices(lambda axes, v: engine.all_reduce(build("ring", Topology((1, 1))), v, axes), (1, 1), inputs)
    np.testing.assert_array_equal(found, inputs)


PIPES = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
RANK = """
import sys
from multipod import runtime
runtime.prepare(cpu_devices=4, processes=2)
import jax
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{sys.argv[1]}", num_processes=2, process_id=int(sys.argv[2]))
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from multipod.execute.engines import jax as engine
from test_execute_jax import CASES, expected, vectors
split = PartitionSpec("x")
for algorithm, machine, schedule in CASES:
    if machine not in ("line", "mesh with a hole") or schedule.collective != "all-reduce":
        continue
    chips = len(schedule.topology.chips)
    mesh = Mesh(np.array(jax.devices())[[d for d in range(8) if chips == 8 or d != 1]], ("x",))
    inputs = vectors(chips, 100, np.float32)
    local = lambda v: engine.all_reduce(schedule, v[0], ("x",))[None]
    mapped = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    placed = jax.make_array_from_callback(inputs.shape, NamedSharding(mesh, split), lambda index: inputs[index])
    wanted = expected(schedule, inputs)
    for shard in jax.block_until_ready(mapped(placed)).addressable_shards:
        assert np.asarray(shard.data).tobytes() == wanted[shard.index].tobytes(), (algorithm, machine, shard.index)
    print("right:", algorithm, chips, flush=True)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_give_the_bits_of_numpy():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = clean_environment() | {"PYTHONPATH": str(Path(__file__).parent)}
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK, port, str(rank)], env=environment, text=True, **PIPES)
        for rank in range(2)
    ]
    done = [rank.communicate(timeout=200) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], done
    wanted = {algorithm for algorithm, machine, _ in CASES if machine in ("line", "mesh with a hole")}
    for out, _ in done:
        assert {line.split()[1] for line in out.splitlines() if line.startswith("right: ")} == wanted


def refused(function, sizes=(4,), length=8):
    """The message with which tracing on a mesh is refused."""
    with pytest.raises(ScheduleError) as caught:
        on_devices(function, sizes, vectors(int(np.prod(sizes)), length, np.float32))
    return str(caught.value)


def test_what_does_not_fit_is_refused():
    ring, gather = build("ring", LINE), build("ring", LINE, "all-gather")
    assert "is for 4 chips, and mesh axes a, b have 8 devices. Leave the devices of failed chips out" in refused(
        lambda axes, v: engine.all_reduce(ring, v, axes), (2, 4)
    )
    assert "is no all-reduce. Build it with collective='all-reduce'" in refused(
        lambda axes, v: engine.all_reduce(gather, v, axes)
    )
    assert "is no reduce-scatter or all-reduce" in refused(lambda axes, v: engine.reduce_scatter(gather, v, axes))
    assert "9 elements do not divide into 4 shares. Pad the vector to 12" in refused(
        lambda axes, v: engine.reduce_scatter(ring, v, axes), length=9
    )
    assert "a vector of shape (2, 4) is not flat" in refused(
        lambda axes, v: engine.all_reduce(ring, v.reshape(2, 4), axes)
    )
    adasum = Schedule("all-reduce", "adasum", LINE, 1, even_bounds(1), [make_step(0, 1, 0, op=ADASUM)])
    assert "combines by Adasum" in refused(lambda axes, v: engine.all_reduce(adasum, v, axes))
    with pytest.raises(ScheduleError, match=r"2,147,483,648 elements has places beyond 2\^31 - 1"):
        build_rounds(ring, 2**31)


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=40))
@settings(max_examples=200, deadline=None)
def test_messages_are_coloured_with_as_few_colours_as_possible(pairs):
    found = colour_pairs(pairs)
    assert len({(src, colour) for (src, _), colour in zip(pairs, found, strict=True)}) == len(pairs)
    assert len({(dst, colour) for (_, dst), colour in zip(pairs, found, strict=True)}) == len(pairs)
    most = max(*Counter(src for src, _ in pairs).values(), *Counter(dst for _, dst in pairs).values(), 0)
    assert set(found) == set(range(most))


@pytest.mark.parametrize("name", ["halving-doubling", "double-tree"])
def test_rounds_hold_every_message_once(name):
    """What the tables say arrives, step by step, is what the schedule sends, in loops and outside of them."""
    schedule = build(name, MACHINES["mesh with a hole"][0])
    rounds = build_rounds(schedule, 100)
    found = []
    for phase in rounds.phases:
        table = phase.write_table(rounds.places)
        for trip, (step, shape) in itertools.product(range(phase.times), enumerate(phase.shapes)):
            first, arrived = sum(len(one.pairs) for one in phase.shapes[:step]), []
            for number, pairs in enumerate(shape.pairs):
                for src, dst in pairs:
                    (sent, *_), (_, begin, end, op) = table[trip, first + number, [src, dst]].tolist()
                    assert begin in (end, sent)
                    arrived += [(src, dst, begin, end, op)] * (begin < end)
            found.append(sorted(arrived))
    places = rounds.places
    sent = [collect_sends(schedule, step) for step in schedule.steps]
    assert found == [sorted(zip(s.src, s.dst, places[s.first], places[s.stop], s.op, strict=True)) for s in sent]
