"""Published models as tables of layers: FLOPs, bytes and parameters by arithmetic from their papers' shapes.

Models of the house are read from their own programs (`multipod.plan.traced.program`); a test holds the tables of
ResNet-50, BERT and Transformer against those.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

from multipod.layout.split import ModelSplit
from multipod.layout.stages import Layer, balanced
from multipod.plan.tables.layers import (
    HALF,
    WHOLE,
    AttentionCost,
    Conv,
    Image,
    dense,
    elementwise,
    looked_up,
    sort,
    told_of,
    vocabulary,
)
from multipod.plan.work import Operation, Work, merged, together
from multipod.plan.workload import Cut, Evaluation, Part, Workload

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
"""Of each stage, by depth."""


def resnet_layers(depth: int = 50, height: int = 224, width: int = 224, first_frozen: bool = False) -> Iterator[Conv]:
    """The convolutions of ResNet-18, 34 or 50, without the head (arXiv:1512.03385); the first as 4x4 on 2x2 blocks of
    pixels.

    `first_frozen`: stem and first stage are not trained (Mask R-CNN).
    """
    stem = Conv("stem", height // 2, width // 2, 12, 64, 4, first=True, frozen=first_frozen)
    yield stem
    h, w, inputs = height // 4, width // 4, 64
    for stage, (blocks, features) in enumerate(zip(BLOCKS[depth], (64, 128, 256, 512), strict=True)):
        name, frozen = f"stage{stage + 1}", first_frozen and stage == 0
        out = features * (4 if depth == 50 else 1)
        stride = 1 if stage == 0 else 2
        for block in range(blocks):
            s = stride if block == 0 else 1
            small = (-(-h // s), -(-w // s))
            if depth == 50:
                yield Conv(name, h, w, inputs, features, 1, frozen=frozen)
                yield Conv(name, h, w, features, features, 3, s, frozen=frozen)
                yield Conv(name, *small, features, out, 1, frozen=frozen)
            else:
                yield Conv(name, h, w, inputs, features, 3, s, frozen=frozen)
                yield Conv(name, *small, features, out, 3, frozen=frozen)
            if inputs != out or s > 1:
                yield Conv(name, h, w, inputs, out, 1, s, frozen=frozen)
            h, w, inputs = *small, out


@dataclass(frozen=True)
class _Layer:
    """A layer of a table, for pipelines: its work (examples, whether to train, lanes, devices that split it), what it
    holds and sends.

    Layers of one `kind` have arrays of the same shapes. `tied` parameters are of the one table of the vocabulary.
    """

    kind: str
    work: Callable[[float, bool, int, int], Work]
    parameters: float
    sent_bytes: float
    tied: float = 0.0


def _cut(layers: Sequence[_Layer]) -> Cut:
    """The layers in consecutive parts, by their FLOPs and bytes on a common scale, as `layout.stages` cuts them.

    Equal layers in a row are worked out once, and parts of the same layers are one object.
    """
    listed = tuple(Layer(str(n), work_of_layer(layer, 1, True, 1, 1).flops + 1) for n, layer in enumerate(layers))

    def cut(examples: float, parts: int, lanes: int, model: int) -> tuple[Part, ...]:
        made: dict[tuple[tuple[_Layer, int], ...], Part] = {}
        found = []
        for start, stop in pairwise(starts_of(listed, parts)):
            runs = tuple((layer, len(list(alike))) for layer, alike in groupby(layers[start:stop]))
            if runs not in made:
                made[runs] = _part(runs, examples, lanes, model)
            found.append(made[runs])
        return tuple(found)

    return cut


def _part(runs: tuple[tuple[_Layer, int], ...], examples: float, lanes: int, model: int) -> Part:
    """The part that holds these layers, each so many times in a row."""
    forward, whole = (
        [(work_of_layer(layer, examples, train, lanes, model), n) for layer, n in runs] for train in (False, True)
    )
    tied = max(layer.tied for layer, _ in runs)
    return Part(
        together(work.times(n) for work, n in forward),
        together(work.times(n) for work, n in whole),
        tuple((layer.kind, float(n), layer.parameters / model) for layer, n in runs),
        tuple((layer.kind, float(n), work.activation_bytes) for (layer, n), (work, _) in zip(runs, whole, strict=True)),
        examples * runs[-1][0].sent_bytes,
        (("table", tied / model),) if tied else (),
    )


@lru_cache(maxsize=4096)
def work_of_layer(layer: _Layer, examples: float, train: bool, lanes: int, model: int) -> Work:
    """The work of one layer, merged, and remembered: pipelines of all depths ask for the same."""
    return merged(layer.work(examples, train, lanes, model))


@lru_cache(maxsize=256)
def starts_of(layers: tuple[Layer, ...], parts: int) -> tuple[int, ...]:
    """Where the balanced parts of a table begin, and its end; remembered."""
    return balanced(layers, parts).starts


def _image(examples: float, split: ModelSplit, lanes: int) -> Image:
    """Where the convolutions of a replica work that is split so, by height or by height and width."""
    rows, columns = (*split.spatial, 1, 1)[:2]
    return Image(examples, rows, lanes, columns)


def _convs(layers: list[Conv], at: Image) -> Work:
    return together(layer.work(at) for layer in layers)


def resnet50() -> Workload:
    """ResNet-50 on 224 x 224 pixels."""
    layers = list(resnet_layers())

    def build(examples: float, split: ModelSplit, lanes: int) -> Work:
        at = _image(examples, split, lanes)
        sums = elementwise("sum", at.elements(28, 28, 512) * 16 / 2, 4, HALF, count=32)  # of the 16 blocks
        head = dense("head", examples, 2048, 1000, lanes=lanes)
        pool = elementwise("pool", at.elements(112, 112, 64), 4, HALF, count=3)
        return _convs(layers, at) + sums + head + pool

    return Workload(
        "resnet50",
        parameters=sum(layer.parameters for layer in layers) + 2049 * 1000 - 64 * (192 - 147),
        build=build,
        optimizer="lars",
        axes=("spatial",),
        wire_bytes=WHOLE,
        norm_group_messages=2 * 53,
        norm_bytes=2 * 4 * 26_560 / 53,
        batch_bytes=224 * 224 * 3 * HALF,
        evaluation=Evaluation(examples=50_000),
        source="arXiv:1512.03385, table 1; float32 gradients and LARS: Google's v0.6 and v0.7 code",
    )


def bert_large(length: int = 512, predictions: int = 76) -> Workload:
    """BERT-large with the heads of its pre-training, rows of 512 tokens, 76 of them predicted."""
    d, hidden, heads, layers, vocab = 1024, 4096, 16, 24, 30_522

    def build(examples: float, split: ModelSplit, lanes: int) -> Work:
        layer = AttentionCost(d, hidden, heads, split.model).work(examples, length, [length], lanes=lanes)
        tokens = examples * length
        told = vocabulary(examples * predictions, tokens, d, vocab, split.model, lanes)
        head = dense("transform", examples * predictions, d, d, lanes=lanes) + dense(
            "pool", examples, d, d, lanes=lanes
        )
        return layer.times(layers) + told + head + elementwise("embedding", tokens * d, 12, HALF, count=6)

    def first(examples: float, train: bool, lanes: int, model: int) -> Work:
        passes = 12 if train else 4
        return looked_up(examples * length, d, vocab / model, train) + elementwise(
            "embedding", examples * length * d, passes, HALF, count=passes / 2
        )

    def middle(examples: float, train: bool, lanes: int, model: int) -> Work:
        return AttentionCost(d, hidden, heads, model).work(examples, length, [length], train, lanes)

    def last(examples: float, train: bool, lanes: int, model: int) -> Work:
        head = dense("transform", examples * predictions, d, d, train=train, lanes=lanes)
        pool = dense("pool", examples, d, d, train=train, lanes=lanes)
        return head + pool + told_of(examples * predictions, d, vocab, model, lanes, train=train)

    table, sent = vocab * d, HALF * length * d
    enter = _Layer("embedding", first, table + (length + 4) * d, sent, table)
    tell = _Layer("heads", last, 2 * d * d + table + vocab, 0.0, table)
    return Workload(
        "bert",
        parameters=336_226_108,
        build=build,
        cut=_cut([enter, *[_Layer("layer", middle, 12 * d * d + 13 * d, sent)] * layers, tell]),
        layers=layers + 2,
        optimizer="lamb",
        axes=("model",),
        wire_bytes=HALF,
        batch_bytes=4 * (4 * length + 3 * predictions),
        evaluation=Evaluation(examples=10_000),
        source="arXiv:1810.04805; MLPerf v0.7: 512 tokens, 76 predictions, bfloat16 gradients, LAMB",
    )


def transformer_big(source: int = 256, target: int = 256, vocab: int = 32_768) -> Workload:
    """Transformer "big": packed rows of 256 source and 256 target tokens."""
    d, hidden, heads, layers = 1024, 4096, 16, 6

    def build(examples: float, split: ModelSplit, lanes: int) -> Work:
        layer = AttentionCost(d, hidden, heads, split.model, kept_hidden=1)
        encoder = layer.work(examples, source, [source], lanes=lanes).times(layers)
        decoder = layer.work(examples, target, [target, source], lanes=lanes).times(layers)
        tokens = examples * (source + target)
        told = vocabulary(examples * target, tokens, d, vocab, split.model, lanes)
        return encoder + decoder + told + elementwise("embedding", tokens * d, 12, HALF, count=6)

    def decode(examples: float, split: ModelSplit, lanes: int) -> Work:
        return _beam_search(examples, split, d, hidden, layers, vocab, lanes)

    def embedded(tokens: int) -> Callable[[float, bool, int, int], Work]:
        def work(examples: float, train: bool, lanes: int, model: int) -> Work:
            passes = 12 if train else 4
            arithmetic = elementwise("embedding", examples * tokens * d, passes, HALF, count=passes / 2)
            return looked_up(examples * tokens, d, vocab / model, train) + arithmetic

        return work

    def block(length: int, context: list[int]) -> Callable[[float, bool, int, int], Work]:
        def work(examples: float, train: bool, lanes: int, model: int) -> Work:
            return AttentionCost(d, hidden, heads, model, 1).work(examples, length, context, train, lanes)

        return work

    def logits(examples: float, train: bool, lanes: int, model: int) -> Work:
        return told_of(examples * target, d, vocab, model, lanes, train=train)

    table, one = vocab * d, HALF * d
    both = one * (source + target)  # from the encoder's end on, its output travels beside the decoder's
    parts = [_Layer("table", embedded(source), table, one * source, table)]
    parts += [_Layer("encoder", block(source, [source]), 12 * d * d, one * source)] * layers
    parts += [_Layer("table", embedded(target), table, both, table)]
    parts += [_Layer("decoder", block(target, [target, source]), 16 * d * d, both)] * layers
    return Workload(
        "transformer",
        parameters=209_842_176,
        build=build,
        cut=_cut([*parts, _Layer("table", logits, table, 0.0, table)]),
        layers=2 * layers + 3,
        optimizer="adam",
        axes=("model",),
        wire_bytes=HALF,
        batch_bytes=4 * 6 * (source + target),
        evaluation=Evaluation(examples=3003, work=decode),
        source="arXiv:1706.03762, table 3; rows of 256 + 256 tokens, bfloat16 gradients: Google's v0.6 and v0.7 code; "
        "newstest2014 has 3,003 sentences, beam 4, at most 147 tokens",
    )


def _beam_search(
    examples: float,
    split: ModelSplit,
    d: int,
    hidden: int,
    layers: int,
    vocab: int,
    lanes: int,
    beam: int = 4,
    length: int = 147,
) -> Work:
    """All steps of a decoder that reads its weights and its caches once for each token."""
    rows, m = max(1.0, examples * beam), split.model
    one = dense("decode", rows, d, 4 * d / m, train=False, lanes=lanes)
    other = dense("decode", rows, d, 2 * d / m, train=False, lanes=lanes)
    mlp = dense("decode", rows, d, 2 * hidden / m, train=False, lanes=lanes)
    cache = Operation("cache", "memory", 0.0, HALF * rows * length * d * 4 / m, count=8)
    step = (one + other + mlp + Work((cache,))).times(layers)
    step = step + dense("decode", rows, d, vocab / m, train=False, lanes=lanes)
    step = step + elementwise("beam", rows * vocab / m, 3, WHOLE, count=10)
    return step.times(length)


SSD_MAPS = (38, 19, 10, 5, 3, 1)
SSD_BOXES = (4, 6, 6, 6, 4, 4)
SSD_FEATURES = (256, 512, 512, 256, 256, 256)


def ssd_layers() -> Iterator[Conv]:
    """SSD300 on ResNet-34 as in MLPerf: its third stage has stride 1 and ends the backbone; six maps of boxes, 81
    classes."""
    kept = {"stem", "stage1", "stage2", "stage3"}
    for layer in resnet_layers(34, 300, 300):
        if layer.name not in kept:
            continue
        if layer.name == "stage3":
            yield Conv("stage3", 38, 38, layer.inputs, layer.outputs, layer.window)
        else:
            yield layer
    shapes = ((38, 256, 256, 512, 2), (19, 512, 256, 512, 2), (10, 512, 128, 256, 2), (5, 256, 128, 256, 2))
    for size, inputs, middle, outputs, stride in (*shapes, (3, 256, 128, 256, 3)):
        yield Conv(f"map{size}", size, size, inputs, middle, 1, norm=False)
        yield Conv(f"map{size}", size, size, middle, outputs, 3, stride, norm=False)
    for size, boxes, features in zip(SSD_MAPS, SSD_BOXES, SSD_FEATURES, strict=True):
        yield Conv(f"head{size}", size, size, features, boxes * (81 + 4), 3, norm=False)


def ssd() -> Workload:
    """SSD300 with a ResNet-34 backbone."""
    layers = list(ssd_layers())
    boxes = sum(n * size * size for size, n in zip(SSD_MAPS, SSD_BOXES, strict=True))

    def build(examples: float, split: ModelSplit, lanes: int) -> Work:
        at = _image(examples, split, lanes)
        mine = examples * sum(n * at.rows(size) * at.columns(size) for size, n in zip(SSD_MAPS, SSD_BOXES, strict=True))
        sums = elementwise("sum", at.elements(38, 38, 256) * 13, 4, HALF, count=26)
        pool = elementwise("pool", at.elements(150, 150, 64), 4, HALF, count=3)
        loss = elementwise("loss", mine * 85, 8, WHOLE, count=30)
        # Hard negatives: the losses of an image's boxes are sorted, and their places once more, to know each one's
        # rank.
        return _convs(layers, at) + sums + pool + loss + sort("sort", mine / examples, examples, times=2)

    return Workload(
        "ssd",
        parameters=sum(layer.parameters for layer in layers),
        build=build,
        optimizer="momentum",
        axes=("spatial",),
        wire_bytes=WHOLE,
        splits_weights=False,
        norm_group_messages=2 * sum(layer.count for layer in layers if layer.norm),
        norm_bytes=2 * 4 * 160,
        batch_bytes=300 * 300 * 3 * HALF + boxes * 5 * 4,
        evaluation=Evaluation(examples=5000, host_s=11.0),
        source="arXiv:1512.02325 with the backbone of MLPerf's reference (ResNet-34, third stage without stride); COCO "
        "val2017 has 5,000 images; 10 to 13 s from the start of an evaluation to its metric (v0.7 logs)",
    )


def mask_rcnn(height: int = 832, width: int = 1344) -> Workload:
    """Mask R-CNN with ResNet-50 and a feature pyramid, 512 regions a training image, 128 of them with masks."""
    backbone = list(resnet_layers(50, height, width, first_frozen=True))
    levels = [(height // 2**k, width // 2**k) for k in range(2, 7)]
    pyramid = [Conv("pyramid", *levels[k], 256 << k, 256, 1, norm=False) for k in range(4)]
    pyramid += [Conv("pyramid", *levels[k], 256, 256, 3, norm=False) for k in range(4)]
    proposals = [Conv("proposals", *size, 256, 256, 3, norm=False) for size in levels]
    proposals += [Conv("proposals", *size, 256, 15, 1, norm=False) for size in levels]
    trained = sum(layer.parameters for layer in [*backbone, *pyramid]) + 256 * 256 * 9 + 256 * 16
    heads = 7 * 7 * 256 * 1024 + 1024 * 1024 + 1024 * 91 * 5 + 4 * 9 * 256 * 256 + 4 * 256 * 256 + 256 * 91

    def build(examples: float, split: ModelSplit, lanes: int) -> Work:
        at = _image(examples, split, lanes)
        regions, masks = 512 * examples / split.spatial_devices, 128 * examples / split.spatial_devices
        box = dense("box", regions, 7 * 7 * 256, 1024, lanes=lanes) + dense("box", regions, 1024, 1024, lanes=lanes)
        mask = Conv("mask", 14, 14, 256, 256, 3, norm=False, count=4).work(Image(masks, 1, lanes))
        mask = mask + Conv("mask", 28, 28, 256, 256, 2, norm=False).work(Image(masks, 1, lanes))
        mask = mask + Conv("mask", 28, 28, 256, 91, 1, norm=False).work(Image(masks, 1, lanes))
        return _convs([*backbone, *pyramid, *proposals], at) + box + mask + _regions(at, levels, regions, masks)

    return Workload(
        "maskrcnn",
        parameters=trained + heads,
        build=build,
        optimizer="momentum",
        axes=("spatial",),
        wire_bytes=WHOLE,
        splits_weights=False,
        batch_bytes=height * width * 3 * HALF,
        evaluation=Evaluation(examples=5000, host_s=60.0),
        source="arXiv:1703.06870 and 1612.03144, sizes of Google's v0.6 and v0.7 code (832 x 1344, frozen norms and "
        "first stage); 512 regions and 128 masks a training image: the paper's defaults",
    )


def _regions(at: Image, levels: list[tuple[int, int]], regions: float, masks: float) -> Work:
    """Features of regions from the pyramid as one-hot products over y and x (v0.7's form), and the choice of boxes."""
    height, width = levels[0]
    rows = at.rows(height)
    aligned = together(
        dense("align", count * side, rows, at.columns(width) * 256, weights=False, lanes=at.lanes)
        for count, side in ((regions / 16, 7), (masks / 16, 14))
    )
    chosen = together(sort("sort", 3 * at.rows(h) * at.columns(w), at.examples) for h, w in levels)
    # Overlaps of 1,000 boxes with each other, once a level and once for all.
    overlaps = elementwise("overlap", 6 * 1000 * 1000 * at.examples, 3, WHOLE, count=60)
    return aligned + chosen + overlaps


MODELS = {model.name: model for model in (resnet50(), bert_large(), transformer_big(), ssd(), mask_rcnn())}
"""Every table by name."""
