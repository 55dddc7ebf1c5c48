"""Rank programs run by threads over a transport that moves data as early or as late as the rules of messages allow."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipod.collectives.schedule import ADD, COPY, Schedule, Step, even_bounds, make_step
from multipod.errors import ScheduleError
from multipod.execute.engines import numpy as reference
from multipod.execute.engines.rank_program import (
    IN_PLACE,
    SCRATCHES,
    Transfer,
    build_rank_program,
    get_rank_program,
    run_rank_program,
)
from multipod.topology.topology import Topology

LIMIT_S = 20


class Passage:
    """One message. Its bytes move once both ends are posted: at once, or when the first of them waits."""

    def __init__(self, eager: bool) -> None:
        self._eager, self._lock, self._both = eager, threading.Lock(), threading.Event()
        self._ends: dict[str, np.ndarray] = {}
        self._moved = False

    def post(self, end: str, buffer: np.ndarray) -> Callable[[], None]:
        with self._lock:
            assert end not in self._ends, "two messages with the same tag"
            self._ends[end] = buffer
            if len(self._ends) == 2:
                if self._eager:
                    self._move()
                self._both.set()
        return self.wait

    def wait(self) -> None:
        assert self._both.wait(LIMIT_S), "deadlock"
        with self._lock:
            self._move()

    def _move(self) -> None:
        if not self._moved:
            self._ends["to"][:] = self._ends["from"]
            self._moved = True


class Network:
    """A transport among threads."""

    def __init__(self, eager: bool) -> None:
        self._eager, self._lock = eager, threading.Lock()
        self.passages: dict[tuple[int, int, int], Passage] = {}

    def of(self, rank: int) -> Callable[[Sequence[Transfer], Sequence[Transfer]], list[Callable[[], None]]]:
        def post(incoming: Sequence[Transfer], outgoing: Sequence[Transfer]) -> list[Callable[[], None]]:
            ends = [((m.peer, rank, m.tag), "to", m.buffer) for m in incoming]
            ends += [((rank, m.peer, m.tag), "from", m.buffer) for m in outgoing]
            return [self._passage(key).post(end, buffer) for key, end, buffer in ends]

        return post

    def _passage(self, key: tuple[int, int, int]) -> Passage:
        with self._lock:
            return self.passages.setdefault(key, Passage(self._eager))


def followed(
    schedule: Schedule, vectors: dict[int, np.ndarray], segment: int, eager: bool, grouped: bool, late: int = 1
) -> Network:
    """Runs all ranks on `vectors` in place."""
    network = Network(eager)

    def run(rank: int) -> None:
        mine = vectors[schedule.topology.chips[rank]]
        program = build_rank_program(schedule, rank, len(mine), segment, late)
        scratch = np.full((SCRATCHES, program.scratch), -1, mine.dtype)
        run_rank_program(program, mine, scratch, network.of(rank), grouped=grouped)

    with ThreadPoolExecutor(len(schedule.topology.chips)) as pool:
        list(pool.map(run, range(len(schedule.topology.chips))))
    return network


PIECES, CHIPS = 5, (0, 1, 3)


@st.composite
def steps(draw) -> Step:
    """Sends between three chips, of which no two write to one cell."""
    sends, written = [], set()
    for _ in range(draw(st.integers(1, 5))):
        src, dst = draw(st.permutations(CHIPS))[:2]
        first = draw(st.integers(0, PIECES - 1))
        stop = draw(st.integers(first + 1, PIECES))
        cells = {(dst, piece) for piece in range(first, stop)}
        if not cells & written:
            written |= cells
            sends.append((src, dst, first, stop, draw(st.sampled_from([ADD, COPY]))))
    return make_step(*np.array(sends).T)


@given(
    steps=st.lists(steps(), max_size=6),
    length=st.integers(0, 23),
    segment=st.integers(1, 24),
    eager=st.booleans(),
    grouped=st.booleans(),
    late=st.integers(1, 8),
)
def test_any_steps_give_the_bits_of_the_reference(steps, length, segment, eager, grouped, late):
    topology = Topology((4,), failed_chips=frozenset({2}))
    schedule = Schedule("broadcast", "random", topology, PIECES, even_bounds(PIECES), steps)
    rng = np.random.default_rng(length)
    vectors = {chip: rng.standard_normal(length).astype(np.float32) for chip in CHIPS}
    expected = reference.run(schedule, vectors)
    followed(schedule, vectors, segment, eager, grouped, late)
    for chip in CHIPS:
        assert vectors[chip].tobytes() == expected[chip].tobytes()


def line(*sends: Step) -> Schedule:
    return Schedule("broadcast", "by hand", Topology((3,)), 4, even_bounds(4), sends)


def test_messages_are_cut_to_segments_and_empty_ones_are_not_sent():
    schedule = line(make_step([0, 1], [1, 2], [0, 2], [2, 4]))
    network = followed(schedule, {chip: np.zeros(10) for chip in range(3)}, 2, True, False)
    assert sorted(network.passages) == [(0, 1, 0), (0, 1, 1), (0, 1, 2), (1, 2, 0), (1, 2, 1), (1, 2, 2)]
    assert followed(schedule, {chip: np.zeros(0) for chip in range(3)}, 2, True, False).passages == {}


def test_a_rank_has_no_turn_where_it_has_nothing_to_do():
    schedule = line(make_step(0, 1, 0), make_step(1, 2, 0), make_step(0, 1, 1))
    assert [len(build_rank_program(schedule, rank, 8, 8).turns) for rank in range(3)] == [2, 3, 1]


def test_copies_land_in_place_where_nothing_else_is_under_way():
    free = build_rank_program(line(make_step(0, 1, 0, op=COPY)), 1, 8, 8)
    assert (free.turns[0].receives[0].scratch, free.scratch) == (IN_PLACE, 0)
    swapped = build_rank_program(line(make_step([0, 1], [1, 0], 0, op=COPY)), 1, 8, 8)
    assert (swapped.turns[0].receives[0].scratch, swapped.scratch) == (0, 2)
    assert swapped.turns[0].receives[0].after == (0,)


def test_long_copies_to_a_place_in_use_wait_for_it_and_short_ones_take_another():
    schedule = line(make_step(1, 0, 0), make_step(0, 1, 0, op=COPY))
    waits, scratch = (build_rank_program(schedule, 1, 8, 8, late).turns[1].receives[0] for late in (2, 3))
    assert (waits.late, waits.scratch) == (True, IN_PLACE)
    assert (scratch.late, scratch.scratch) == (False, 0)


def test_a_program_is_made_once():
    schedule = line(make_step(0, 1, 0))
    assert get_rank_program(schedule, 1, 3, 100, 4) is get_rank_program(schedule, 1, 3, 100, 4)


def test_another_number_of_ranks_is_refused():
    with pytest.raises(ScheduleError) as error:
        get_rank_program(line(), 0, 4, 10, 4)
    assert str(error.value) == (
        "by hand broadcast on mesh:3 is for 3 ranks, and the group has 4. Build one for a machine of 4 live chips, or "
        "give the group that it was built for."
    )
