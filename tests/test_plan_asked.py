"""Layouts that a user writes, copies for a lost host, and the clock of pipelines: against what else knows them."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.errors import LayoutError, MultipodError, PlanError, ScheduleError
from multipod.layout.layout import Layout
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.layout.sync import Sync
from multipod.layout.text import layout_changes, spelled
from multipod.pipelines.build import build
from multipod.pipelines.timing import Costs, time_schedule, total
from multipod.plan.asked import asked_for, layout_of
from multipod.plan.machine import Machine, find
from multipod.plan.mirror import HOST_BYTES_PER_S, mirroring, with_copies
from multipod.plan.network import to_next_host_s
from multipod.plan.placing import on_machine
from multipod.plan.predict import predict_step
from multipod.plan.search import Every, Found, search
from multipod.plan.tables.models import MODELS
from multipod.plan.tables.published import SHARDED
from multipod.plan.trace import step_events
from multipod.topology.topology import Topology

BERT, POD = MODELS["bert"], find("tpu-v3-pod:4x4")


def words_of(step):
    """A priced layout as `multipod plan --explain` prints it."""
    return spelled(on_machine(step.layout, POD), always=("gradient_sum", "shard_update"))


@pytest.fixture(scope="module")
def found() -> Found:
    return search(BERT, POD, 512)


@pytest.mark.parametrize(
    "text",
    [
        "3", "model=4", "model=4,sum=ring,update", "data=4x2,model=4", "stage=4,schedule=gpipe",
        "sum=ring,update=false", "stage=2,model=2,schedule=interleaved", "stage=4,micro=16",
    ],
)  # fmt: skip
def test_a_layout_in_words_is_found_in_the_table(found, text):
    """The quickest that has all of it; its own words name it again, and mean the same to `train --layout`."""
    number, step = asked_for(text, found, BERT, POD, 512)
    assert found.predictions[number - 1] is step
    again = words_of(step)
    assert asked_for(again, found, BERT, POD, 512) == (number, step)
    layout = layout_of(again)
    assert (layout.split.model, layout.stages, layout.sync.gradient_sum) == (
        *(step.layout.split.model, step.layout.stages),
        step.layout.sync.gradient_sum,
    )
    assert layout.sync == step.layout.sync
    same = [one for one in found.predictions[: number - 1] if one.layout.replica_sizes == step.layout.replica_sizes]
    for earlier in [] if text.isdecimal() else same:  # none of the quicker ones has all of it
        assert not set(layout_changes(text)) <= set(layout_changes(words_of(earlier) + ",micro=16"))


def test_a_layout_that_was_not_searched_is_priced(found):
    """More devices a replica than a search tries; a pipeline that never drains; other micro-batches."""
    number, step = asked_for("model=32", found, BERT, POD, 512)
    assert (number, step.layout.split) == (0, ModelSplit(model=32))
    assert asked_for("stage=2,schedule=pipemare", found, BERT, POD, 512)[0] == 0
    other = asked_for("stage=4,micro=8,sum=torus-2d", found, BERT, POD, 512)[1]
    fewer = predict_step(BERT, Layout(pipeline=PipelineSplit(4, micro_batches=8), sync=Sync("torus-2d")), 512, POD)
    assert other == fewer
    often = asked_for("model=32", found, BERT, POD, 512, Every(mirror=5))[1]
    assert often.step_s == pytest.approx(step.step_s + mirroring(step, POD).seconds / 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("modle=4", "no 'modle' in a layout. Nearest: model"),
        ("sum=rign", "no sum is called 'rign'. Nearest: ring"),
        ("stage=2,schedule=gpip", "no pipeline is called 'gpip'. Nearest: gpipe"),
        ("0", "layouts, from 1 on"),
        ("999", "layouts, from 1 on"),
        ("model=3", "do not divide into such. Take a split over 2 or 4"),
        ("data=4x4,model=4", "data=4x4 is not how a plan lies there: data=4x2 on tpu-v3-pod:4x4"),
        ("model=4,tile=2x2", "tile=2x2 has no price: a plan's is 1x4"),
        ("stage=2,cut=13x13", "nobody has priced cut. Leave it out; what is priced: data, stage, spatial"),
        ("sum=adasum", "sum=adasum combines and does not sum, which has no price"),
        ("spatial=2", "spatial=2: bert is known split over model, stage"),
        ("stage=4,micro=5", "5 micro-batches do not divide the 64 rows"),
    ],
)
def test_a_layout_that_cannot_be(found, text, message):
    with pytest.raises(MultipodError) as refused:
        asked_for(text, found, BERT, POD, 512)
    assert isinstance(refused.value, PlanError | LayoutError)
    assert message in str(refused.value)


def ring_of(chips: int, per_host: int) -> Machine:
    chip = POD.topology.chip
    line = Topology((chips,), (True,), chip=chip, latency_s=(1e-6,), bytes_per_s=(80e9,))
    return replace(Machine(line, chips_per_host=per_host), calibration=POD.calibration)


@settings(max_examples=20, deadline=None)
@given(hosts=st.integers(2, 9), per_host=st.integers(1, 4), nbytes=st.floats(0, 1e10))
def test_the_message_to_the_next_host_has_its_closed_form(hosts, per_host, nbytes):
    """On a ring each first chip's message takes the `per_host` links to the next, which no other message uses."""
    machine = ring_of(hosts * per_host, per_host)
    constants = machine.calibration
    expected = constants.message_s + per_host * constants.hop_s + nbytes / (constants.link * 80e9)
    assert to_next_host_s(machine, nbytes) == pytest.approx(expected)
    assert to_next_host_s(ring_of(per_host, per_host), nbytes) == 0


@pytest.mark.parametrize("every", [1, 7])
def test_copies_are_part_of_the_step(every):
    """1 / every of: the state over PCIe, and what a host alone holds over two links to the next (rows of four)."""
    machine = replace(POD, chips_per_host=4)
    plain = predict_step(MODELS["resnet50"], SHARDED, 4096, machine)
    step = with_copies(plain, machine, every)
    weights = 4 * 25_557_032
    slots = weights / machine.hosts  # LARS has one slot, which all devices share; a host has a quarter of it
    copied_s = (plain.memory.parameters + slots) / HOST_BYTES_PER_S
    constants = machine.calibration
    sent_s = constants.message_s + constants.hop_s + slots / machine.link_bytes_per_s
    # Rows of four: the last row's message goes around, or up the column against the others' direction, three links.
    far_s = 0 if machine.topology.wrap[0] else 2 * constants.hop_s
    assert step.copies_s == pytest.approx((copied_s + sent_s + far_s) / every)
    assert step.step_s == pytest.approx(plain.step_s + step.copies_s)
    assert dict(step.parts)["copies for a lost host"] == step.copies_s
    assert sum(seconds for _, seconds in step.parts) == pytest.approx(step.step_s)
    assert step.data()["copies_s"] == step.copies_s
    last = max(event["ts"] + event["dur"] for event in step_events(step, MODELS["resnet50"], machine) if "ts" in event)
    assert last == pytest.approx(1e6 * step.step_s)
    assert with_copies(plain, machine, 0) == plain


@settings(max_examples=30, deadline=None)
@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved", "pipemare"]),
    stages=st.integers(1, 5),
    rounds=st.integers(1, 3),
    costs=st.lists(st.integers(1, 9), min_size=20, max_size=20),
    send=st.integers(0, 3),
)
def test_a_pipelines_total_is_that_of_its_longest_chain(name, stages, rounds, costs, send):
    """Against the longest way through the graph of what waits for what, found backwards by recursion."""
    made = build(name, stages, rounds * stages)
    forward, backward = costs[: made.parts], costs[10 : 10 + made.parts]
    price = {"forward": forward, "backward": backward, "update": [1] * made.parts}
    where = {
        (op.kind, op.micro, made.part(p, op.chunk)): (p, k)
        for p, ops in enumerate(made.ops)
        for k, op in enumerate(ops)
    }
    done: dict[tuple[int, int], int] = {}

    def end(p: int, k: int) -> int:
        if (p, k) not in done:
            op = made.ops[p][k]
            part = made.part(p, op.chunk)
            source = (op.kind, op.micro, part + (-1 if op.kind == "forward" else 1))
            before = [end(p, k - 1)] if k else [0]
            if op.kind != "update" and source in where:
                before.append(end(*where[source]) + (send if stages > 1 else 0))
            done[p, k] = max(before) + price[op.kind][part]
        return done[p, k]

    longest = max(end(p, k) for p, ops in enumerate(made.ops) for k in range(len(ops)))
    asked = Costs(forward, backward, 1, send)
    assert total(made, asked) == time_schedule(made, asked).total == longest


def test_devices_that_wait_for_each_other():
    made = build("1f1b", 2, 2)
    turned = replace(made, ops=(tuple(reversed(made.ops[0])), made.ops[1]))
    with pytest.raises(ScheduleError, match=r"devices wait for each other: device 0 at backward of 1"):
        total(turned, Costs())
