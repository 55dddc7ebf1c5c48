"""Every builder on four gloo ranks and on four MPI ranks, against the NumPy engine bit for bit.

`ranks.py` holds the cases; the ranks of an engine are started once and run them all.
"""

from dataclasses import dataclass
from typing import Any

import engines
import pytest
import ranks

from multipod.collectives.build import ALGORITHMS

pytestmark = pytest.mark.processes


@dataclass(frozen=True)
class Reports:
    """What the ranks of one engine wrote."""

    ranks: list[dict[str, Any]]

    @property
    def cases(self) -> set[str]:
        return {case for rank in self.ranks for case in rank["cases"]}

    @property
    def failed(self) -> dict[str, list[str]]:
        return {f"rank {number}": rank["failed"] for number, rank in enumerate(self.ranks) if rank["failed"]}


@pytest.fixture(scope="module")
def gloo(tmp_path_factory) -> Reports:
    return Reports(engines.reports("torch", ranks.__file__, tmp_path_factory.mktemp("gloo"), killed=ranks.RANKS - 1))


@pytest.fixture(scope="module")
def mpi(tmp_path_factory) -> Reports:
    return Reports(engines.reports("mpi", ranks.__file__, tmp_path_factory.mktemp("mpi")))


@pytest.fixture(params=["gloo", "mpi"])
def reports(request) -> Reports:
    return request.getfixturevalue(request.param)


@pytest.mark.slow
def test_all_bits_are_those_of_the_reference(reports):
    assert reports.failed == {}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_every_algorithm_ran(reports, algorithm):
    assert sum(case.startswith(f"{algorithm} all-reduce on ") for case in reports.cases) >= 4


def test_all_ranks_ran_the_same_cases(reports):
    pairs_only = {"a group of two"}
    assert len({frozenset(rank["cases"]) - pairs_only for rank in reports.ranks}) == 1
    assert "a group of two" in reports.cases
    assert {"shared-memory: 70001", "not a number"} <= reports.cases


def test_ddp_learns_as_without_the_hook(gloo):
    trained = {case.split(":")[0].removeprefix("DDP with ") for case in gloo.cases if case.startswith("DDP with ")}
    assert trained >= {"shared-memory", "ring", "halving-doubling", "double-tree"}
    assert {f"bfloat16 by {way}" for way in ("gloo", "shared memory", "shared memory, in place")} <= gloo.cases


def test_what_does_not_fit_is_refused(reports):
    refused = reports.ranks[0]["refused"]
    assert refused["too few chips"] == (
        "ScheduleError: rank-order all-reduce on mesh:3 is for 3 ranks, and the group has 4. Build one for a machine "
        "of 4 live chips, or give the group that it was built for."
    )
    assert "(2, 2)" in refused["not flat"]
    assert "is not flat in memory" in refused["not flat"]
    assert refused["no all-reduce"] == (
        "ScheduleError: swaps broadcast on mesh:4 is no all-reduce. Call run, or build it with collective='all-reduce'."
    )
    assert refused["adasum"] == (
        "ScheduleError: by hand all-reduce on mesh:4: step 0 combines by Adasum, and this engine only adds and copies. "
        "Run it on NumPy."
    )


def test_ranks_that_do_not_give_the_same_are_all_told(reports):
    for number, rank in enumerate(reports.ranks):
        each = "; ".join(
            f"rank {k} {8 + k} x float64 by ring all-reduce on torus:4, 4 pieces, 6 steps" for k in range(ranks.RANKS)
        )
        assert rank["refused"]["lengths"] == (
            f"ScheduleError: all-reduce on rank {number} of 4: the ranks do not give the same: {each}. Give vectors of "
            "one length and dtype, and one schedule, on all ranks."
        )
        assert "rank 0 8 x float32 by ring" in rank["refused"]["dtypes"]
        assert "rank 0 8 x float64 by rank-order all-reduce" in rank["refused"]["schedules"]


def test_tensors_that_are_not_flat_or_not_alike_are_refused(gloo):
    for number, rank in enumerate(gloo.ranks):
        for case in ("slice", "slice in the window"):
            assert rank["refused"][case] == (
                "ScheduleError: a tensor of shape (4,) and strides (2,) is not flat in memory, and schedules cut a "
                "flat vector. Give tensor.view(-1), or a contiguous copy."
            )
        assert rank["refused"]["lengths in the window"] == (
            f"ScheduleError: shared-memory sum on rank {number} of 4: the ranks do not give the same: "
            "rank 0 8 x float32, rank 1 9 x float32, rank 2 10 x float32, rank 3 11 x float32. "
            "Give the same length and dtype on all ranks; this window is of no use any more."
        )


def test_a_killed_rank_ends_the_sums_of_the_others(gloo):
    for number, rank in enumerate(gloo.ranks[:-1]):
        told = rank["refused"]["a rank was killed"]
        assert told.startswith(f"PeerLostError: ring all-reduce on torus:4 on rank {number} of 4: the sum broke off: ")
        assert "Another rank ended, did not answer within the group's time-out, or sums another vector." in told
        told = rank["refused"]["a rank was killed, window"]
        assert told.startswith(f"PeerLostError: shared-memory sum on rank {number} of 4: rank ")
        assert "has ended. This rank is well" in told


def test_a_rank_that_does_not_come_ends_the_sums_of_the_others(mpi):
    told = [rank["refused"].get("a rank does not come", "") for rank in mpi.ranks]
    assert told[0].startswith("PeerLostError: ring all-reduce on torus:4 on rank 0 of 4: the sum broke off: rank ")
    assert "has not answered for 0.5 s. Another rank ended, does not answer, or sums another vector." in told[0]
    assert all(told[:-1])
    assert "rank 3 has not answered" in "".join(told)


def test_mpi_takes_the_memory_of_any_framework(mpi):
    assert {"DLPack", "buffer protocol"} <= mpi.cases
    refused = mpi.ranks[0]["refused"]
    assert refused["read-only"].startswith(
        "ScheduleError: a bytes of shape (8,), strides (1,) and dtype uint8 is not flat"
    )
    assert refused["no memory"].startswith("ScheduleError: a list does not give its memory to NumPy (memoryview: ")


def test_a_hook_that_cannot_be_is_refused(gloo):
    refused = gloo.ranks[0]["refused"]
    assert refused["hook without machine"] == (
        "ScheduleError: mesh:3 has 3 live chips, and the group has 4 ranks. Give a topology with 4 live chips, or none."
    )
    assert refused["hook without algorithm"].startswith("ScheduleError: There is no algorithm 'rnig'. Nearest: ring")
