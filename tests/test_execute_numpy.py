"""The reference executor against NumPy's own sums."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import ADASUM, ADD, COPY, Schedule, even_bounds, make_step
from multipod.errors import ScheduleError, TopologyError
from multipod.execute.engines import numpy as reference
from multipod.topology.topology import Topology

CASES = [(name, collective) for name, builder in ALGORITHMS.items() for collective in builder.collectives]
MACHINES = [
    Topology((1,)),
    Topology((2,)),
    Topology((3,), wrap=True),
    Topology((4, 4)),
    Topology((3, 5)),
    Topology((4, 4), failed_chips=[5, 6], failed_links=[(8, 9)]),
    Topology((2, 2, 2), switched=True),
]
LENGTHS = (0, 1, 2, 5, 15, 16, 17, 97)
LINE = Topology((3,))


def schedules(name, collective):
    for topology in MACHINES:
        try:
            yield build(name, topology, collective)
        except (ScheduleError, TopologyError):
            continue


def random(schedule: Schedule, count: int, dtype=np.int64, seed: int = 0) -> dict[int, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {chip: chance.integers(-1000, 1000, count).astype(dtype) for chip in schedule.topology.chips}


def parts(topology: Topology, count: int) -> dict[int, slice]:
    """The part of the vector that belongs to each chip after a reduce-scatter, and before an all-gather."""
    p = len(topology.chips)
    return {chip: slice(count * rank // p, count * (rank + 1) // p) for chip, rank in topology.rank.items()}


def expected(schedule: Schedule, vectors: dict[int, np.ndarray], count: int) -> np.ndarray:
    if schedule.collective == "broadcast":
        return vectors[schedule.topology.chips[0]]
    if schedule.collective == "all-gather":
        mine = parts(schedule.topology, count)
        return np.concatenate([vectors[chip][mine[chip]] for chip in schedule.topology.chips])
    return sum(vectors.values(), np.zeros(count, np.int64))


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_every_builder_gives_numpys_answer_for_vectors_of_any_length(name, collective):
    ran = 0
    for schedule in schedules(name, collective):
        for count in LENGTHS:
            vectors = random(schedule, count)
            before = {chip: vector.copy() for chip, vector in vectors.items()}
            results = reference.run(schedule, vectors)
            assert tuple(results) == schedule.topology.chips
            want, mine = expected(schedule, vectors, count), parts(schedule.topology, count)
            for chip, result in results.items():
                part = mine[chip] if collective == "reduce-scatter" else slice(None)
                np.testing.assert_array_equal(result[part], want[part])
                assert result.shape == (count,)
                assert not np.shares_memory(result, vectors[chip])
                np.testing.assert_array_equal(vectors[chip], before[chip])
        ran += 1
    assert ran >= 3


@pytest.mark.parametrize(
    "dtype",
    [np.int8, np.uint8, np.int32, np.uint64, np.float16, np.float32, np.float64, np.complex64, ml_dtypes.bfloat16],
)
def test_every_dtype_stays_what_it_is(dtype):
    schedule = build("torus-2d", Topology((2, 4)))
    vectors = {chip: (np.arange(33) % 4).astype(dtype) for chip in range(8)}
    for result in reference.run(schedule, vectors).values():
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, (np.arange(33) % 4 * 8).astype(dtype))


def test_whole_numbers_wrap_around():
    results = reference.run(build("ring", LINE), {chip: np.full(4, 127, np.int8) for chip in range(3)})
    assert all((result == np.full(4, 125, np.int8)).all() for result in results.values())


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16])
def test_nans_and_infinities_pass_through(dtype):
    vectors = {chip: np.ones(6, dtype) for chip in range(3)}
    vectors[1][2], vectors[0][4], vectors[2][5] = np.nan, np.inf, -np.inf
    vectors[0][5] = np.inf  # infinity less infinity
    vectors[0][0] = vectors[1][0] = ml_dtypes.finfo(dtype).max  # overflows
    for result in reference.run(build("ring", LINE), vectors).values():
        kinds = ["inf", "3", "nan", "3", "inf", "nan"]
        assert [f"{float(x):g}" for x in result] == kinds


def test_floats_are_summed_in_the_order_of_the_schedule():
    big, one = np.array([2.0**53]), np.array([1.0])
    vectors = {0: big, 1: one, 2: one}
    down = [make_step(0, 1, 0), make_step(1, 2, 0), make_step(2, [0, 1], 0, None, COPY)]
    up = [make_step(2, 1, 0), make_step(1, 0, 0), make_step(0, [1, 2], 0, None, COPY)]
    for steps, total in ((down, 2.0**53), (up, 2.0**53 + 2)):
        results = reference.run(Schedule("all-reduce", "hand", LINE, 1, even_bounds(1), steps), vectors)
        assert [result.item() for result in results.values()] == [total] * 3


def test_a_step_reads_what_was_there_before():
    chain = Schedule("broadcast", "hand", LINE, 1, even_bounds(1), [make_step([0, 1], [1, 2], 0, None, COPY)])
    results = reference.run(chain, {chip: np.array([chip]) for chip in range(3)})
    assert [result.item() for result in results.values()] == [0, 0, 1]
    swap = Schedule("all-reduce", "hand", Topology((2,)), 1, even_bounds(1), [make_step([0, 1], [1, 0], 0, None, ADD)])
    assert [v.item() for v in reference.run(swap, {0: np.array([1]), 1: np.array([10])}).values()] == [11, 11]


def test_a_message_of_several_pieces_is_their_interval():
    step = make_step(0, 1, 1, 3, COPY)
    schedule = Schedule("broadcast", "hand", Topology((2,)), 10, np.array([0, 1, 4, 9, 10]), [step])
    result = reference.run(schedule, {0: np.ones(20, int), 1: np.zeros(20, int)})[1]
    assert result.tolist() == [0] * 2 + [1] * 16 + [0] * 2


def test_vectors_of_a_tile_are_summed_over_their_peers():
    schedule = build("ring", Topology((4,)), tile=(2,))
    results = reference.run(schedule, {chip: np.full(5, 10**chip) for chip in range(4)})
    assert [result[0].item() for result in results.values()] == [101, 1010, 101, 1010]


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CASES), st.integers(1, 4), st.integers(1, 4), st.integers(0, 40), st.integers(0, 2**32))
def test_random_sizes(case, rows, columns, count, seed):
    name, collective = case
    try:
        schedule = build(name, Topology((rows, columns)), collective)
    except ScheduleError:
        return
    vectors = random(schedule, count, seed=seed)
    want, mine = expected(schedule, vectors, count), parts(schedule.topology, count)
    for chip, result in reference.run(schedule, vectors).items():
        part = mine[chip] if collective == "reduce-scatter" else slice(None)
        np.testing.assert_array_equal(result[part], want[part])


def test_lists_and_views_are_taken():
    schedule = build("ring", Topology((2,)))
    view = np.arange(20)[::2]
    view.flags.writeable = False
    results = reference.run(schedule, {0: view, 1: list(range(10))})
    assert results[0].tolist() == [3 * k for k in range(10)]


@pytest.mark.parametrize(
    ("vectors", "why"),
    [
        ({}, "the vectors are not those of the 3 live chips: chips 0, 1, 2 have none. Give one vector for each of"),
        ({0: [1], 1: [1], 2: [1], 3: [1]}, "the vectors are not those of the 3 live chips: chips 3 are not live."),
        ({0: [1], 2: [1], 7: [1]}, "chips 1 have none and chips 7 are not live."),
        ({0: [1], 1: [1, 2], 2: [1]}, "chip 1 has 2 elements of int64, and chip 0 has 1 of int64. Give all the same"),
        ({0: [1], 1: [1], 2: [1.5]}, "chip 2 has 1 elements of float64, and chip 0 has 1 of int64."),
        ({0: [[1]], 1: [[1]], 2: [[1]]}, "the vector of chip 0 has shape (1, 1). Flatten it to one dimension."),
        ({0: 1, 1: 1, 2: 1}, "the vector of chip 0 has shape (). Flatten it to one dimension."),
        (
            dict.fromkeys(range(3), np.zeros(1, "datetime64[s]")),
            "vectors of datetime64[s] cannot be added. Give numbers.",
        ),
    ],
)
def test_vectors_that_do_not_fit_are_refused(vectors, why):
    with pytest.raises(ScheduleError) as error:
        reference.run(build("ring", LINE), {chip: np.asarray(vector) for chip, vector in vectors.items()})
    assert str(error.value).startswith("ring all-reduce on mesh:3: ")
    assert why in str(error.value)


def test_the_vector_of_a_failed_chip_is_refused():
    broken = Topology((3,), wrap=True, failed_chips=[1])
    with pytest.raises(ScheduleError, match="chips 1 are not live"):
        reference.run(build("ring", broken), {chip: np.zeros(1) for chip in range(3)})


def test_adasum_is_refused():
    schedule = Schedule("all-reduce", "hand", Topology((2,)), 1, even_bounds(1), [make_step(0, 1, 0, None, ADASUM)])
    with pytest.raises(ScheduleError, match="step 0 combines by adasum, which needs to know the layers of the vector"):
        reference.run(schedule, {0: np.ones(1), 1: np.ones(1)})


def test_pieces_of_vectors_beyond_two_to_the_31_elements_lie_where_they_should():
    schedule = Schedule("broadcast", "hand", Topology((2,)), 3, even_bounds(3), [])
    assert schedule.elements(2**40).tolist() == [0, 2**40 // 3, 2**41 // 3, 2**40]
    fine = Schedule("broadcast", "hand", Topology((2,)), 2**61, np.array([0, 2**60, 2**61]), [])
    assert fine.elements(2**40).tolist() == [0, 2**39, 2**40]
