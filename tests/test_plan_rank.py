"""The engine's own sum among the schedules, ties, and rankings against layouts that were published."""

from dataclasses import replace

import pytest

from multipod.errors import ScheduleError
from multipod.experiments import planner_dlrm
from multipod.layout.layout import Layout
from multipod.layout.sync import Sync
from multipod.plan import network
from multipod.plan import search as search_module
from multipod.plan.machine import find
from multipod.plan.predict import predict_step
from multipod.plan.rank import ranked, tied
from multipod.plan.search import norm_group, search, sums
from multipod.plan.tables.choices import choices
from multipod.plan.tables.layers import Conv, Image
from multipod.plan.tables.models import MODELS
from multipod.plan.tables.published import SHARDED, split_by
from multipod.topology.topology import Topology


@pytest.mark.parametrize("machine", ["tpu-v3-pod:8x8", "tpu-v3-pod:32x8", "tpu-v4-cube"])
def test_the_engines_sum_carries_what_its_schedule_does(machine):
    """The closed form against the simulated schedule of the same algorithm, and the least against the two halves."""
    topology = find(machine).topology
    own = network.own_sum(topology)
    if len(topology.shape) == 2:
        assert own.cost.vectors == pytest.approx(network.cost(topology, "torus-2d").vectors)
        assert own.least.vectors <= network.cost(topology, "row-column").vectors
    assert own.cost.hops == 2 * sum(n - 1 for n in topology.shape)
    assert own.least.vectors <= own.cost.vectors
    assert own.cost.rounds == 1


def test_the_engines_sum_on_the_multipod_has_its_closed_form():
    """1.03 vectors and 316 hops (arXiv:2011.03641); on a torus of 32 x 32 at best half a vector, in two halves."""
    multipod, pod = (network.own_sum(find(name).topology) for name in ("tpu-v3-multipod", "tpu-v3-pod"))
    assert (round(multipod.cost.vectors, 2), multipod.cost.hops) == (1.03, 316)
    assert pod.least.vectors == pytest.approx((1 - 1 / 32**2) / 2)


def test_the_engines_sum_past_the_peers_of_a_tile():
    topology = find("tpu-v3-pod:8x8").topology
    assert network.own_sum(topology, (1, 2)).cost.vectors == pytest.approx(
        network.cost(topology, "torus-2d", "all-reduce", (1, 2)).vectors, rel=0.05
    )
    with pytest.raises(ScheduleError, match="tiles of"):
        network.own_sum(topology, (3, 1))


def test_nccl_sends_by_every_network_card():
    """2 (n - 1) / n of the vector by NVLink in one box; of several boxes an eighth by each card, all at once."""
    box, boxes = (find(name).calibrated(link=1.0, hop_s=0.0, message_s=0.0) for name in ("dgx-a100:1", "dgx-a100:4"))
    assert network.all_reduce_s(box, "xla", 8e9) == pytest.approx(2 * 7 / 8 * 8e9 / 300e9)
    assert network.all_reduce_s(boxes, "xla", 8e9) == pytest.approx(2 * 3 / 4 * 1e9 / 25e9)


def test_each_step_of_a_schedule_is_started():
    """A ring of 64 takes 126 messages one after the other; the engine's sum is one."""
    machine = find("tpu-v3-pod:8x8").calibrated(hop_s=0.0, message_s=1e-3)
    assert network.all_reduce_s(machine, "ring", 0.0) == pytest.approx(0.126)
    assert network.all_reduce_s(machine, "xla", 0.0) == pytest.approx(0.001)


def test_a_schedule_replaces_the_engines_sum_only_for_more_than_is_not_known():
    machine, batch = find("tpu-v3-pod:8x8"), 8192
    own, tree, halves = (
        predict_step(MODELS["resnet50"], Layout(sync=Sync(name, "zero1")), batch, machine)
        for name in ("xla", "double-tree", "row-column")
    )
    assert halves.step_s < own.step_s
    assert tied(halves, own, machine)  # the engine may cut the vector in halves as well
    assert not tied(own, tree, machine)
    assert ranked([tree, halves, own], machine)[0] == own
    assert ranked([replace(own, sum_doubt_s=0.0), halves], machine)[0] == halves


def test_the_engine_is_tried_on_every_whole_machine():
    assert sums(find("dgx-h100:1").topology)[0] == sums(find("tpu-v3-pod:4x4").topology)[0] == "xla"
    assert "xla" not in sums(find("tpu-v3-pod:4x4", ["0-1,0-1"]).topology)
    assert "xla" in sums(find("dgx-h100:2", ["0,0"]).topology)
    best = search(MODELS["resnet50"], find("dgx-h100:1"), 2048).best
    assert best.layout.sync.gradient_sum == "xla"


@pytest.mark.parametrize("examples", [1, 2, 3, 4])
def test_few_images_cost_as_much_as_a_tile_holds(examples):
    """XLA's programs for TPU v3 move as many bytes with 1 to 4 images, and half of those with 8 (`LANES_A_ROW`)."""
    layer, tile = Conv("c", 76, 76, 64, 64), Image(4)
    few, eight = Image(examples), Image(8)
    assert few.elements(76, 76, 64) == tile.elements(76, 76, 64) == eight.elements(76, 76, 64) / 2
    taken = [op.flops / op.fill for op in layer.work(few).ops if op.kind == "convolution"]
    assert taken == pytest.approx([op.flops / op.fill for op in layer.work(tile).ops if op.kind == "convolution"])
    assert Image(examples, lanes=8).elements(76, 76, 64) == examples * 76 * 76 * 64  # a GPU has no such tiles


def test_a_split_image_is_joined_with_its_halo():
    """Five tensors are moved for each convolution that reaches over the edge; none without a split, none by 1 x 1."""
    at, layer = Image(4, spatial=4), Conv("c", 40, 40, 128, 128)
    joined = sum(op.nbytes for op in layer.work(at).ops if op.name == "join halo")
    assert joined == 2 * 5 * 2 * 4 * 10 * 40 * 128
    assert not [op for op in layer.work(Image(4)).ops if op.name == "join halo"]
    assert not [op for op in Conv("c", 40, 40, 128, 128, 1).work(at).ops if op.name == "join halo"]


@pytest.mark.parametrize(("rows", "columns", "sent"), [(4, 1, 163_840), (1, 4, 163_840), (2, 2, 217_088)])
def test_halos_are_those_of_xlas_program(rows, columns, sent):
    """Bytes of a device's permutes, forward and backward, of XLA's program for TPU v3 (libtpu 0.0.52, 4 images)."""
    work = Conv("c", 40, 40, 128, 128).work(Image(4, rows, across=columns))
    assert sum(message.count * message.nbytes for message in work.messages) == sent
    assert [op.flops for op in work.ops if op.kind == "convolution"] == [2 * 40 * 40 * 128 * 128 * 9] * 3


@pytest.mark.parametrize("collective", ["ring", "bidirectional-ring"])
def test_what_the_engine_refuses_has_no_price(collective, tmp_path):
    """By the same function; the reason is remembered as costs are."""
    network.remember(tmp_path / "costs.json")
    try:
        for _ in range(2):
            with pytest.raises(ScheduleError, match=r"16,382 steps wait for each other, the most are 4,096"):
                network.cost(Topology((32, 256)), collective)
        assert "16,382 steps" in (tmp_path / "costs.json").read_text()
    finally:
        network.remember(None)


@pytest.mark.parametrize(
    ("model", "machine", "batch", "better", "worse"),
    [
        ("ssd", "tpu-v3-pod:32x32", 2048, 4, 1),  # run split in v0.6
        ("ssd", "tpu-v3-multipod", 4096, 8, 4),  # and 8 ways in v0.7
        ("resnet50", "tpu-v3-pod:4x4", 1024, 1, 4),  # never run split
        ("resnet50", "tpu-v3-pod:32x32", 32768, 1, 4),
    ],
)
def test_splits_rank_as_they_were_run(model, machine, batch, better, worse):
    on, table = find(machine), MODELS[model]
    steps = [
        predict_step(table, split_by(spatial=(n,)) if n > 1 else SHARDED, batch, on, norm_group(table, on, batch, n))
        for n in (better, worse)
    ]
    assert steps[0].step_s < steps[1].step_s


def test_published_layouts_are_chosen_or_ties():
    """Layouts that were run are the quickest of their axis, or ties: all but one, which `planner.md` names."""
    found = list(choices(find("tpu-v3-pod")))
    assert {one.published.workload for one in found if not one.agrees} <= {"maskrcnn"}
    assert len(found) == 12


def test_products_of_axes_are_searched(monkeypatch):
    """All products that a workload's axes make, in at most 16 devices; stages with what splits them; FSDP beside."""
    monkeypatch.setattr(search_module, "schedules", lambda topology: ("torus-2d",))
    both = replace(MODELS["resnet50"], axes=("spatial", "model"))
    found = search(both, find("dgx-h100:4"), 512)
    sizes = [step.layout.split.sizes for step in found.predictions]
    assert {"spatial": 2, "model": 8} in sizes
    assert {"spatial": 4, "model": 4} in sizes
    assert {"spatial": 2, "width": 2, "model": 4} in sizes
    assert max(step.layout.replica_devices for step in found.predictions) == 16
    assert {step.layout.sync.sharding for step in found.predictions} == {"none", "zero1", "fsdp"}
    assert {step.layout.sync.bucket_bytes for step in found.predictions} == {0, 4 << 20, 25 << 20}
    assert not any("in one replica" in words for words in found.left_out)
    staged = search(MODELS["bert"], find("tpu-v3-pod:4x4"), 512)
    assert any(step.layout.replica_sizes == {"stage": 4, "model": 4} for step in staged.predictions)
    images = replace(MODELS["bert"], axes=("model", "spatial"))
    refused = list(search_module._unsearched(images, ("",), 16))
    assert "spatial x stage, which exclude each other in a run" in refused
    assert len({(step.layout, step.dtype) for step in staged.predictions}) == len(staged.predictions)


def test_what_rounds_what_is_learnt_is_named_and_not_taken():
    found = search(MODELS["resnet50"], find("tpu-v3-pod:4x4"), 4096)
    assert [words for words in found.left_out if words.startswith(("wire=bfloat16: -", "gather=bfloat16: -"))]
    assert all(not step.layout.sync.sum_dtype + step.layout.sync.gather_dtype for step in found.predictions)


def test_a_schedule_hides_in_buckets_only():
    """One vector is there when the whole backward pass is done; of buckets only the last is left over."""
    machine = find("dgx-h100:4")
    whole, cut = (
        predict_step(MODELS["resnet50"], Layout(sync=Sync("ring", "zero1", bucket_bytes=n)), 4096, machine)
        for n in (0, 25 << 20)
    )
    assert dict(whole.parts)["gradient sum"] == pytest.approx(whole.gradient_sum_s)
    assert dict(cut.parts)["gradient sum"] == pytest.approx(cut.gradient_sum_s / cut.buckets)
    assert cut.buckets == -(-4 * 25_557_032 // (25 << 20))


@pytest.mark.parametrize(("model", "layout", "width"), [("resnet50", SHARDED, 4 + 4), ("bert", SHARDED, 2 + 4)])
def test_the_bytes_of_a_sum_are_those_of_its_price(model, layout, width):
    """A reduce-scatter of gradients and a gather of weights, each of its type: (chips - 1) / chips of the vector."""
    step = predict_step(MODELS[model], layout, 512, find("tpu-v3-pod:4x4"))
    assert step.sum_sent == pytest.approx(15 / 16 * width * MODELS[model].parameters, rel=1e-3)


@pytest.mark.slow
def test_the_published_place_of_dlrms_tables_is_priced_below_fewer_devices():
    """96 GB of tables over 512 devices; by fewer, gradients of whole tables are summed between replicas."""
    machine = find("tpu-v3-pod:16x16")
    published, fewer = (planner_dlrm.priced(*one, machine) for one in (planner_dlrm.PUBLISHED, ("auto", 64)))
    assert published.step_s < fewer.step_s
    tables = 4 * 24.03e9 / 512
    assert published.memory.parameters == pytest.approx(tables + 4 * 4.9e6, rel=0.05)
    assert published.fits
