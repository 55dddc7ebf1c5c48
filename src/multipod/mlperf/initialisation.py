"""Which tensors a model begins with, by the names that MLPerf's rules have for them.

The closed division of v1.1 to v2.1 asks for a line `weights_initialization` for each tensor of the reference, by a list
in the rule file of each benchmark. A name there may stand for several parameters here (a layer's kernel and bias, all
tables of DLRM); a parameter for which the rules have no name keeps its own.

Source: `closed_*.yaml` of `training_1.1.0` to `training_2.1.0` in mlperf-logging 4.1.68.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from multipod.mlperf.benchmarks import Benchmark
from multipod.models.resnet import BLOCKS


@dataclass(frozen=True)
class InitialisedTensor:
    """A tensor as a log names it.

    Attributes:
      name: the rules' name, or the parameter's own where they have none.
      parameters: the model's parameters that it stands for.
      in_rules: whether the name is of the form that the rules have.
    """

    name: str
    parameters: tuple[str, ...]
    in_rules: bool


def initialised_tensors(benchmark: Benchmark, model: Any, parameters: Iterable[str]) -> list[InitialisedTensor]:
    """Returns the tensors of a log's lines, each once, in the order of the model's `parameters`.

    Args:
      benchmark: that the model is of.
      model: without what stands around it (`Normalized`).
      parameters: their names.
    """
    names = _NAMES[benchmark.name](model) if benchmark.name in _NAMES else {}
    kept: dict[str, list[str]] = {}
    known = set()
    for parameter in parameters:
        name = _rule_name(names, parameter)
        known |= {name} if name else set()
        kept.setdefault(name or parameter, []).append(parameter)
    return [InitialisedTensor(name, tuple(ours), name in known) for name, ours in kept.items()]


Names = Mapping[str, str]
"""Patterns of whole names of parameters, and the rules' name for them as `re.Match.expand` takes it."""


def _rule_name(names: Names, parameter: str) -> str:
    found = (match.expand(name) for pattern, name in names.items() if (match := re.fullmatch(pattern, parameter)))
    return next(found, "")


def _bert(model: Any) -> Names:
    layer, theirs = r"layers/(\d+)", r"bert/encoder/layer_\1"
    norms = {
        "embedding_norm": "bert/embeddings/LayerNorm",
        rf"{layer}/attention_residual/norm": f"{theirs}/attention/output/LayerNorm",
        rf"{layer}/mlp_residual/norm": f"{theirs}/output/LayerNorm",
        "transform_norm": "cls/predictions/transform/LayerNorm",
    }
    linear = {
        **{rf"{layer}/attention/{p}": f"{theirs}/attention/self/{p}" for p in ("query", "key", "value")},
        rf"{layer}/attention/out": f"{theirs}/attention/output/dense",
        rf"{layer}/mlp/inner": f"{theirs}/intermediate/dense",
        rf"{layer}/mlp/outer": f"{theirs}/output/dense",
        "pooler": "bert/pooler/dense",
        "transform": "cls/predictions/transform/dense",
    }
    return {
        "tokens/table": "bert/embeddings/word_embeddings",
        "positions/table": "bert/embeddings/position_embeddings",
        "types/table": "bert/embeddings/token_type_embeddings",
        "token_bias": "cls/predictions/output_bias",
        "next/kernel": "cls/seq_relationship/output_weights",
        "next/bias": "cls/seq_relationship/output_bias",
        **_parts(norms, {"scale": "/gamma", "bias": "/beta"}),
        **_parts(linear, {"kernel": "/kernel", "bias": "/bias"}),
    }


def _resnet(model: Any) -> Names:
    if not hasattr(model, "depth"):  # a smaller network, which the rules have no names for
        return {}
    convs, norms = {"stem/conv": "conv0"}, {"stem/norm": "bn0"}
    for number, (stage, unit) in enumerate(_places(model.depth)):
        ours, theirs = f"blocks/{number}", f"stage{stage}_unit{unit}"
        for k in range(_convolutions(model.depth)):
            convs[f"{ours}/body/{k}/conv"] = f"{theirs}_conv{k + 1}"
            norms[f"{ours}/body/{k}/norm"] = f"{theirs}_bn{k + 1}"
        convs[f"{ours}/shortcut/conv"] = f"{theirs}_conv1sc"
        norms[f"{ours}/shortcut/norm"] = f"{theirs}_bnsc"
    return {
        **_parts(convs, {"kernel": "_weight"}),
        **_parts(norms, {"scale": "_gamma", "bias": "_beta"}),
        **_parts({"head": "fc1"}, {"kernel": "_weight", "bias": "_bias"}),
    }


def _ssd(model: Any) -> Names:
    """Names of v1.1, whose reference counts a stage's convolutions and has a map's logits and offsets in one."""
    prefix = "ssd0_resnetmlperf0"
    convs, norms = {"stem/conv": f"{prefix}_conv0"}, {"stem/norm": f"{prefix}_batchnorm0"}
    counts: dict[int, int] = {}
    for number, (stage, unit) in enumerate(_places(model.depth)):
        body = [f"body/{k}" for k in range(_convolutions(model.depth))]
        for part in [*body, *(["shortcut"] if unit == 1 and stage > 1 else [])]:
            k = counts[stage] = counts.get(stage, -1) + 1
            convs[f"blocks/{number}/{part}/conv"] = f"{prefix}_stage{stage}_conv{k}"
            norms[f"blocks/{number}/{part}/norm"] = f"{prefix}_stage{stage}_batchnorm{k}"
    heads = {
        r"extra/(\d+)/squeeze/conv": r"ssd0_expand_trans_conv\1",
        r"extra/(\d+)/expand/conv": r"ssd0_expand_conv\1",
        r"heads/(\d+)/(?:logits|offsets)/conv": r"ssd0_convpredictor\1_conv0",
    }
    return {
        **_parts(convs, {"kernel": "_weight"}),
        **_parts(norms, {"scale": "_gamma", "bias": "_beta"}),
        **_parts(heads, {"kernel": "_weight", "bias": "_bias"}),
    }


def _mask_rcnn(model: Any) -> Names:
    """Names of the layers behind the backbone, which begins with a classifier's weights by the rules."""
    numbered = {
        f"{ours}/{k}/.*": f"{theirs}{k + 1}"
        for ours, theirs in (
            ("fpn/lateral", "FPN_inner_block"),
            ("fpn/output", "FPN_layer_block"),
            ("mask_head/convs", "ROI_MASK_FEATURE_EXTRACTOR_fcn"),
        )
        for k in range(4)
    }
    return numbered | {
        "rpn/conv/.*": "RPNHead_conv",
        "rpn/objectness/.*": "RPNHead_cls",
        "rpn/offsets/.*": "RPNHead_bbox",
        "box_head/first/.*": "ROI_BOX_FEATURE_EXTRACTOR_fc6",
        "box_head/second/.*": "ROI_BOX_FEATURE_EXTRACTOR_fc7",
        "box_head/logits/.*": "ROI_BOX_PREDICTOR_cls",
        "box_head/offsets/.*": "ROI_BOX_PREDICTOR_bbox",
        "mask_head/double(?:_bias)?": "ROI_MASK_PREDICTOR_fcn5",
        "mask_head/logits/.*": "ROI_MASK_PREDICTOR_fcn_logits",
    }


def _dlrm(model: Any) -> Names:
    mlps = {
        f"{part}/{k}/.*": f"{part}_mlp_dense{k + 1}"
        for part in ("bottom", "top")
        for k in range(len(getattr(model, part)) + 1)
    }
    return {"tables/.*": "embeddings", **mlps}


def _parts(layers: Names, parts: Names) -> dict[str, str]:
    """The names of the parameters of layers of one kind, from those of the layers."""
    return {f"{ours}/{p}": f"{theirs}{t}" for ours, theirs in layers.items() for p, t in parts.items()}


def _places(depth: int) -> Iterator[tuple[int, int]]:
    """Each block's stage, and its place in the stage, both from 1 on."""
    for stage, count in enumerate(BLOCKS[depth], 1):
        yield from ((stage, unit) for unit in range(1, count + 1))


def _convolutions(depth: int) -> int:
    return 3 if depth >= 50 else 2  # of a block's body: bottlenecks, or basic blocks


_NAMES: dict[str, Callable[[Any], Names]] = {
    "resnet": _resnet,
    "bert": _bert,
    "dlrm": _dlrm,
    "ssd": _ssd,
    "maskrcnn": _mask_rcnn,
}
