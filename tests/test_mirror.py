"""Where copies lie: outside of the failure domain that they are to outlive."""

import itertools
from collections import Counter

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multipod.elastic.domains import choose_keepers, describe_exposure, failure_domains, into_rounds, place_of
from multipod.elastic.worker.mirror import MirrorPlan, plan_mirror
from multipod.elastic.worker.snapshots import Snapshot, SnapshotMemory, choose_copy, owners_of
from multipod.elastic.world import World, read_world


@given(st.lists(st.integers(0, 5), min_size=1, max_size=24), st.integers(1, 4))
def test_keepers_are_in_other_domains_and_rounds_are_permutations(domains, copies):
    keepers = choose_keepers(domains, copies)
    assert len(keepers) == min(copies, len({*domains}) - 1)
    for process, domain in enumerate(domains):
        theirs = [domains[chosen[process]] for chosen in keepers]
        assert len({domain, *theirs}) == 1 + len(keepers)  # none twice, and not its own
    for chosen in keepers:
        rounds = into_rounds(chosen)
        sent = [pair for number in rounds for pair in number.items()]
        assert sorted(sent) == list(enumerate(chosen))
        assert all(len({*number.values()}) == len(number) for number in rounds)
        largest = max(Counter(domains).values())
        if 2 * largest <= len(domains) and (len(keepers) + 1) * largest <= len(domains):
            assert len(rounds) == 1  # balanced: nobody keeps for two


def test_domains_are_racks_then_hosts_then_processes():
    assert failure_domains(["", "", ""]) == (0, 1, 2)
    assert failure_domains(["a", "a", "a"]) == (0, 1, 2)  # lost together, whatever is kept where
    assert failure_domains(["a", "a", "b"]) == (0, 0, 1)
    racked = [place_of(host, rack) for host, rack in (("a", "r"), ("b", "r"), ("c", "s"), ("d", ""))]
    assert failure_domains(racked) == (0, 0, 1, 2)
    assert failure_domains([place_of(host, "r") for host in "aab"]) == (0, 0, 1)  # one rack: by host
    assert choose_keepers((0, 1, 2), 1) == [[1, 2, 0]]  # the next one, where each is a domain
    assert choose_keepers((0, 0, 0, 1), 1) == [[3, 3, 3, 0]]
    assert [len(into_rounds(chosen)) for chosen in choose_keepers((0, 0, 0, 1), 1)] == [3]


# Layouts of a state on eight devices: whole, split as ZeRO-1 and FSDP split (over all), over rows alone, over columns
# alone (as experts and tensors are), and over both.
SPLITS = [
    PartitionSpec(),
    PartitionSpec(("y", "x")),
    PartitionSpec("y"),
    PartitionSpec(None, "x"),
    PartitionSpec("y", "x"),
]


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (8, 1)])
@pytest.mark.parametrize(
    ("places", "copies"),
    [
        ("aabb", 1),
        ("abab", 1),
        ("aaab", 1),
        ("aabc", 1),
        ("aabbccdd", 1),
        ("aabbccdd", 2),
        ("aaabbbcc", 2),
        ("abcd", 3),
    ],
)
def test_the_loss_of_any_hosts_that_were_asked_for_costs_no_update(shape, places, copies):
    """The copies are made by hand, from the plan alone; what the rest holds between them must be whole."""
    processes, each = len(places), 8 // len(places)
    devices = sorted(jax.devices(), key=lambda device: device.id)[:8]
    number = {device: index for index, device in enumerate(devices)}
    mesh = Mesh(np.array(devices).reshape(shape), ("y", "x"))
    shapes = [jax.ShapeDtypeStruct((16, 8), np.float32, sharding=NamedSharding(mesh, spec)) for spec in SPLITS]
    owners = owners_of(shapes, lambda device: number[device] // each)
    plan = plan_mirror(owners, places, copies)
    kept = [kept_by(plan, process, owners) for process in range(processes)]
    for lost in itertools.combinations(sorted({*places}), copies):
        living = [kept[process].manifest() for process in range(processes) if places[process] not in lost]
        choice = choose_copy(living, shapes)
        assert choice is not None, lost
        assert choice.stamp == (7, 0)
    everything = choose_copy([memory.manifest() for memory in kept], shapes)
    assert everything is not None
    assert not everything.mirrored


def kept_by(plan: MirrorPlan, process: int, owners: dict) -> SnapshotMemory:
    held = {key: shape for key, (shape, holding) in owners.items() if process in holding}
    copies: dict = {}
    for number in range(len(plan.rounds)):
        sender = plan.sender_to(process, number)
        copies |= plan.pieces[sender] if sender is not None else {}
    pieces = {key: np.zeros(shape, np.float32) for key, shape in (copies | held).items()}
    memory = SnapshotMemory()
    memory.add(Snapshot((7, 0), pieces, frozenset(copies.keys() - held.keys())))
    return memory


def test_the_next_process_on_the_same_host_would_not_do():
    """What was done before, two processes to a host: the reason for all this."""
    owners = {(0, (k,)): ((4,), {k}) for k in range(4)}
    beside = plan_mirror(owners, ["", "", "", ""])
    assert [dict(sent) for sent in beside.rounds] == [{0: 1, 1: 2, 2: 3, 3: 0}]
    apart = plan_mirror(owners, ["a", "a", "b", "b"])
    assert [dict(sent) for sent in apart.rounds] == [{0: 2, 1: 3, 2: 0, 3: 1}]
    twice = {(0, (0,)): ((4,), {0, 1}), (0, (4,)): ((4,), {1, 2})}  # on two processes, of one host and of two
    assert plan_mirror(twice, ["a", "a", "b", "b"]).pieces == {0: {(0, (0,)): (4,)}}
    assert not plan_mirror(twice, ["", "", "", ""]).rounds
    kinds = [np.dtype(np.float32)]
    assert apart.nbytes_sent(kinds) == apart.nbytes_kept(0, kinds) == 16
    crowded = plan_mirror(owners, ["a", "a", "a", "b"])
    assert (crowded.nbytes_kept(3, kinds), crowded.nbytes_kept(0, kinds), crowded.nbytes_kept(1, kinds)) == (48, 16, 0)


def test_what_is_not_outlived_is_said():
    assert describe_exposure(["", ""], 1) == ""
    assert describe_exposure(["a", "b"], 1) == ""
    assert "all processes are on one host: if it is lost" in describe_exposure(["a", "a"], 1)
    assert describe_exposure(["a", "b"], 2) == (
        "copies in memory are on 1 other hosts and not on 2: there are only 2 hosts"
    )
    world = World(0, (0, 1), (3, 4), 2, "h:1", mirror_copies=2, places=("r/a", "s/b"))
    assert read_world(world.to_line()) == world
