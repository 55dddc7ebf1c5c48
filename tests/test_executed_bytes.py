"""What a schedule's program sends is what the schedule is proven, simulated and priced with, on many machines."""

import itertools

import numpy as np
import pytest
from click.testing import CliRunner

from multipod.cli.schedules.schedule import schedule as schedule_commands
from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.text import write
from multipod.errors import MultipodError, ScheduleError
from multipod.execute.engines import jax as engine
from multipod.execute.engines.rounds import build_rounds
from multipod.layout.hlo import Collective, Text, sum_link_bytes
from multipod.plan.network import cost, own_sum
from multipod.simulate.simulate import simulate
from multipod.topology.topology import Topology

ELEMENTS = 720_720
"""Divides by all numbers up to 16, so that most pieces are equally long."""
PIPELINES = {"tree-packing": {"rounds": 8}, "double-tree": {"segments": 8}}
EXACT = {"ring", "bidirectional-ring", "detour-ring", "row-pairs", "torus-2d", "multi-ring", "halving-doubling"}
"""Algorithms of which no step joins the loop of another one that sends more."""
TORUS = {"wrap": True}
MACHINES = [
    *(Topology((n,)) for n in (2, 3, 8)),
    *(Topology((n,), **TORUS) for n in (4, 5)),
    *(Topology(shape) for shape in ((1, 6), (2, 2), (2, 3), (2, 4), (3, 3), (4, 4), (2, 8), (3, 5), (2, 3, 2))),
    *(Topology(shape, **TORUS) for shape in ((3, 4), (4, 4), (2, 2, 2), (2, 3, 3))),
    Topology((4, 3), wrap=(True, False)),
    Topology((2, 4), failed_chips=frozenset({(0, 1)})),
    Topology((3, 3), failed_chips=frozenset({(1, 1)})),
    Topology((4, 4), failed_chips=frozenset({(1, 1), (1, 2)})),
    Topology((4, 4), failed_links=frozenset({(0, 1)}), **TORUS),
    Topology((4, 4), failed_chips=frozenset({(0, 0), (2, 3)}), **TORUS),
]


def built(machine):
    for name, builder in ALGORITHMS.items():
        try:
            yield name, build(name, machine, builder.collectives[0], **PIPELINES.get(name, {}))
        except MultipodError:
            continue


def test_every_algorithm_runs_on_many_machines():
    counts = dict.fromkeys(ALGORITHMS, 0)
    for machine in MACHINES:
        for name, _ in built(machine):
            counts[name] += 1
    assert len(MACHINES) >= 20
    assert min(counts.values()) >= 10, counts


def merged_steps(schedule):
    """The steps that are left when each joins the one before it, unless it reads or writes what that writes."""
    written, count = np.ones((schedule.topology.size, schedule.pieces), bool), 0
    for step in schedule.steps:
        cells = [(ends, slice(f, s)) for *ends, f, s in zip(*map(np.ndarray.tolist, step[:4]), strict=True)]
        if any(written[ends, pieces].any() for ends, pieces in cells):
            written[:], count = False, count + 1
        for (_, dst), pieces in cells:
            written[dst, pieces] = True
    return count


@pytest.mark.parametrize("machine", MACHINES, ids=lambda m: f"{m} {m.wrap}")
def test_executed_is_verified_is_simulated_is_priced(machine):
    for name, schedule in built(machine):
        rounds = build_rounds(schedule, ELEMENTS)
        verified = schedule.sent(ELEMENTS)
        simulated = simulate(schedule, machine, ELEMENTS)
        assert simulated.timeline().nbytes.sum() == pytest.approx(verified, rel=1e-4), name
        most = 1.0 + 1e-4 if name in EXACT else 1.05
        assert verified <= rounds.elements <= most * verified, name
        if machine.size <= 9:
            assert rounds.steps <= 2 * merged_steps(schedule), name
        # A packing of trees is cut by the vector's size, which changes how often and not how much is sent.
        priced = cost(machine, name, schedule.collective, nbytes=1)
        assert priced.sent * ELEMENTS <= rounds.elements * (1 + 1e-4), name
        assert rounds.elements <= 1.05 * priced.sent * ELEMENTS, name
        if name != "tree-packing":
            # The price is the time of this very schedule; no link can carry more than that time lasts.
            assert priced.vectors >= float(max(simulated.arc_bytes)) / ELEMENTS * (1 - 1e-9), name


@pytest.mark.parametrize("machine", [m for m in MACHINES if not m.failed_chips | m.failed_links], ids=str)
def test_the_engines_own_sum_is_priced_with_the_bytes_of_halves(machine):
    """A reduce-scatter and a gather, whatever the dims: as `torus-2d` sends; between peers of a tile, each its own."""
    assert own_sum(machine).cost.sent == pytest.approx(cost(machine, "torus-2d").sent)
    assert own_sum(machine).cost.sent == pytest.approx(2 * (machine.size - 1))
    if all(n % 2 == 0 for n in machine.shape[-1:]):
        tile = (*(1,) * (len(machine.shape) - 1), 2)
        assert own_sum(machine, tile).cost.sent == pytest.approx(2 * (machine.size / 2 - 1) * 2)


@pytest.mark.jax_version
@pytest.mark.parametrize(
    "machine", [Topology((2, 3), wrap=True), Topology((2, 4), failed_chips=frozenset({(0, 1)}))], ids=str
)
def test_the_program_sends_what_the_rounds_say(machine):
    """Counted in the lowered program, for devices that are not here."""
    for name, schedule in built(machine):
        if name == "double-tree" or (name == "tree-packing" and not machine.failed_chips):
            continue  # mostly written out: seconds to lower, and one pipeline is enough
        rounds = build_rounds(schedule, ELEMENTS)
        text = Text(engine.lower(schedule, ELEMENTS).as_text("hlo"))
        assert text.unknown_loops == 0
        assert {one.kind for one in text.collectives} == {"collective-permute"}
        by_link = sum_link_bytes(text.collectives, machine, "yx")
        assert sum(by_link.values()) == 4 * rounds.elements, name
        if not machine.failed_chips:
            hops = sum(int(link.split()[1]) * nbytes for (_, link), nbytes in by_link.items())
            simulated = float(sum(simulate(schedule, machine, 4 * ELEMENTS).arc_bytes))
            assert simulated * (1 - 1e-4) <= hops <= 1.05 * simulated, name


def test_classes_of_links():
    ring = Collective("collective-permute", 8, ("f32",), tuple((k, (k + 1) % 4) for k in range(4)), times=3)
    both = Collective("all-reduce", 8, ("f32",), ((0, 1, 2, 3),))
    rows = Topology((2, 2))
    assert sum_link_bytes([ring, both], rows, "yx") == {
        ("collective-permute", "x, 1 hop"): 48,
        ("collective-permute", "y+x, 2 hops"): 48,
        ("all-reduce", "y+x"): 32,
    }
    assert sum_link_bytes([ring], Topology((4,))) == {
        ("collective-permute", "0, 1 hop"): 72,
        ("collective-permute", "0, 3 hops"): 24,
    }
    assert sum_link_bytes([ring], Topology((4,), **TORUS)) == {("collective-permute", "0, 1 hop"): 96}


def test_programs_that_would_be_too_long_are_refused():
    with pytest.raises(ScheduleError, match=r"16,382 steps wait for each other, the most are 4,096\. Use xla"):
        build_rounds(build("ring", Topology((32, 256))), ELEMENTS)
    many = build("ring", Topology((1030,)), "broadcast", segments=2)
    with pytest.raises(ScheduleError, match=r"few steps repeat each other, and [\d,]+ rounds would be written out"):
        build_rounds(many, ELEMENTS)


@pytest.mark.parametrize("name", ["torus-2d", "multi-ring", "halving-doubling"])
def test_a_pod_sends_no_more(name):
    """1,024 chips; `python benchmarks/executed_bytes.py` counts 32x256 in compiled programs."""
    schedule = build(name, Topology((16, 64)))
    rounds = build_rounds(schedule, ELEMENTS)
    assert rounds.elements <= 1.02 * schedule.sent(ELEMENTS)
    assert rounds.written <= len(schedule.steps)
    assert rounds.steps == len(schedule.steps)
    assert list(itertools.chain(*(phase.shapes for phase in rounds.phases)))


def test_the_command_counts_what_is_executed(tmp_path):
    write(build("torus-2d", Topology((2, 3))), tmp_path / "s.json")
    result = CliRunner().invoke(
        schedule_commands, ["check", str(tmp_path / "s.json"), "--executed", "--bytes", "2880k"]
    )
    assert result.exit_code == 0, result.output
    proof, executed, *links = result.output.splitlines()
    assert "proven on 6 chips" in proof
    assert "executed on 6 JAX devices, 2.88 MB each: 6 steps that wait for each other, 6 permutes" in executed
    assert "sends 4.8 MB a device, 1.0000 times what the schedule sends" in links[0]
    amounts = [line.split(": ")[1].split() for line in links[1:]]
    total = sum(float(number) * {"kB": 1e-3, "MB": 1}[unit] for number, unit, *_ in amounts)
    assert total == pytest.approx(4.8, abs=0.01)
