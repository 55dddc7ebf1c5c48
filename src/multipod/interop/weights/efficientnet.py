"""EfficientNets of torchvision and timm: the same network under two sets of names."""

from multipod.interop.weights.places import CONV, LINEAR, NORM, SQUEEZE, Family, NamedLayer, Place, places_of
from multipod.interop.weights.resnet import COUNTERS, counters
from multipod.models.efficientnet import EfficientNet


def _numbers(model: EfficientNet) -> list[tuple[int, int, int]]:
    """Each block's number, its stage, and its place in the stage."""
    places = [(stage, place) for stage, count in enumerate(model.stage_blocks) for place in range(count)]
    return [(number, *place) for number, place in enumerate(places)]


def _of_torchvision(model: EfficientNet) -> dict[str, Place]:
    def pair(ours: str, theirs: str) -> list[NamedLayer]:
        return [NamedLayer(f"{ours}/conv", f"{theirs}.0", CONV), NamedLayer(f"{ours}/norm", f"{theirs}.1", NORM)]

    layers = [*pair("stem", "features.0"), *pair("last", "features.8"), NamedLayer("head", "classifier.1", LINEAR)]
    for number, stage, place in _numbers(model):
        ours, theirs = f"blocks/{number}", f"features.{stage + 1}.{place}.block"
        parts = [] if stage == 0 else ["expand"]  # the first stage's blocks are no wider inside
        parts += ["depthwise", "squeeze_excite", "project"]
        for k, part in enumerate(parts):
            if part == "squeeze_excite":
                layers.append(NamedLayer(f"{ours}/{part}/reduce", f"{theirs}.{k}.fc1", SQUEEZE))
                layers.append(NamedLayer(f"{ours}/{part}/expand", f"{theirs}.{k}.fc2", SQUEEZE))
            else:
                layers += pair(f"{ours}/{part}", f"{theirs}.{k}")
    return places_of(layers)


def _of_timm(model: EfficientNet) -> dict[str, Place]:
    layers = [
        NamedLayer("stem/conv", "conv_stem", CONV),
        NamedLayer("stem/norm", "bn1", NORM),
        NamedLayer("last/conv", "conv_head", CONV),
        NamedLayer("last/norm", "bn2", NORM),
        NamedLayer("head", "classifier", LINEAR),
    ]
    for number, stage, place in _numbers(model):
        ours, theirs = f"blocks/{number}", f"blocks.{stage}.{place}"
        parts = {"expand": "conv_pw", "depthwise": "conv_dw", "project": "conv_pwl"}
        if stage == 0:
            parts = {"depthwise": "conv_dw", "project": "conv_pw"}
        for k, (part, name) in enumerate(parts.items(), 1):
            layers.append(NamedLayer(f"{ours}/{part}/conv", f"{theirs}.{name}", CONV))
            layers.append(NamedLayer(f"{ours}/{part}/norm", f"{theirs}.bn{k}", NORM))
        layers.append(NamedLayer(f"{ours}/squeeze_excite/reduce", f"{theirs}.se.conv_reduce", SQUEEZE))
        layers.append(NamedLayer(f"{ours}/squeeze_excite/expand", f"{theirs}.se.conv_expand", SQUEEZE))
    return places_of(layers)


TORCHVISION = (Family("torchvision", (EfficientNet,), _of_torchvision, ignored=(COUNTERS,), aside=counters),)
TIMM = (Family("timm", (EfficientNet,), _of_timm, ignored=(COUNTERS,), aside=counters),)
