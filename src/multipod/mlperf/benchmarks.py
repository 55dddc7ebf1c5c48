"""MLPerf Training's benchmarks that the eleven papers ran: rounds, targets, when to evaluate, which model is which.

Source: the training rules of MLCommons (github.com/mlcommons/training_policies) at the dates of v0.7, v1.0 and v2.0,
and the rule files of its compliance checker (mlperf-logging on the package index).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multipod.errors import MlperfError, nearest

if TYPE_CHECKING:
    from multipod.recipe.recipe import Recipe  # which imports JAX, and `multipod mlperf` needs none

RULESETS = ("0.7.0", "1.0.0", "1.1.0", "2.0.0", "2.1.0", "3.0.0", "3.1.0", "4.0.0", "4.1.0", "5.0.0", "5.1.0", "6.0.0")
"""The rounds with a benchmark of ours, by rising version."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark.

    Attributes:
      name: as `submission_benchmark` has it.
      title: model and data.
      first: the first rule set with it, of `RULESETS`.
      last: the last one; later rounds that have the name mean another model.
      targets: what an evaluation must reach, by the name of the metric in the log ("" where the log has one number);
        of each, the target by the rule set from which on it holds.
      metrics: the name of each in a run's own evaluations, and what it is divided by there.
      runs: how many runs make a result.
      examples: training examples of the reference's data set; 0 where the rules do not count by it.
      schedule: when the rules have the model evaluated, in words.
      due: the same: from the batch and the examples of an epoch, the examples before the first evaluation (at most) and
        between two of them. None: whenever.
      counts: what `epoch_num` counts of evaluations: epochs, or examples.
      models: the classes of its models, by name.
      parts: what such a model has in some of its fields, a class by its name, where others of the class are not it.
      recipe: the name of the recipe at reference size; empty where there is none.
    """

    name: str
    title: str
    first: str
    last: str
    targets: Mapping[str, Mapping[str, float]]
    metrics: Mapping[str, tuple[str, float]]
    runs: int
    schedule: str
    due: Callable[[int, int], tuple[float, float]] | None
    models: tuple[str, ...]
    recipe: str
    counts: str = "epochs"
    examples: int = 0
    parts: Mapping[str, str] = field(default_factory=dict)

    @property
    def rulesets(self) -> tuple[str, ...]:
        """The rule sets that have it."""
        return RULESETS[RULESETS.index(self.first) : RULESETS.index(self.last) + 1]

    def target(self, name: str, ruleset: str) -> float:
        """Returns the target of the metric of that name in the log under a rule set."""
        since = max((known for known in self.targets[name] if _version(known) <= _version(ruleset)), key=_version)
        return self.targets[name][since]

    def quality(self, values: Mapping[str, float]) -> dict[str, float] | None:
        """Returns what an evaluation of a run comes to in the log's terms; None if it lacks a metric."""
        if any(own not in values for own, _ in self.metrics.values()):
            return None
        return {name: values[own] / unit for name, (own, unit) in self.metrics.items()}

    def is_of(self, model: Any) -> bool:
        """Returns whether it is a benchmark of this model."""
        parts = {name: type(getattr(model, name, None)).__name__ for name in self.parts}
        return type(model).__name__ in self.models and parts == self.parts

    def is_met(self, quality: Mapping[str, float], ruleset: str = "") -> bool:
        """Returns whether each metric is at its target, under the last rule set unless another is given."""
        return all(quality[name] >= self.target(name, ruleset or self.last) for name in self.targets)


def _version(ruleset: str) -> tuple[int, ...]:
    return tuple(map(int, ruleset.split(".")))


def _each_epoch(batch: int, examples: int) -> tuple[float, float]:
    return examples, examples


def _each_four_epochs(batch: int, examples: int) -> tuple[float, float]:
    return 4 * examples, 4 * examples  # any offset: the first one may come sooner


def _bert(batch: int, examples: int) -> tuple[float, float]:
    every = 0.05 * (230.23 * batch + 3_000_000) // 25_000 * 25_000
    return every, every


def _ssd(batch: int, examples: int) -> tuple[float, float]:
    return 40 * examples, 5 * examples  # and none at 45: ten epochs between the first two


def _one_number(metric: str, unit: float = 1.0) -> dict[str, tuple[str, float]]:
    return {"": (metric, unit)}


BENCHMARKS = {
    each.name: each
    for each in (
        Benchmark(
            "resnet",
            "ResNet-50 v1.5 on ImageNet",
            "0.7.0",
            "4.0.0",
            {"": {"0.7.0": 0.759}},
            _one_number("accuracy"),
            5,
            "every 4 epochs",
            _each_four_epochs,
            ("ResNet", "SmallResNet"),
            "resnet50",
            examples=1_281_167,
        ),
        Benchmark(
            "bert",
            "BERT-large on Wikipedia, from a checkpoint",
            "0.7.0",
            "5.0.0",
            {"": {"0.7.0": 0.712, "1.0.0": 0.720}},
            _one_number("accuracy"),
            10,
            "each floor(0.05 (230.23 batch + 3,000,000)) sequences, in steps of 25,000",
            _bert,
            ("Bert",),
            "bert-large",
            counts="examples",
        ),
        Benchmark(
            "transformer",
            "Transformer-big on WMT17, English to German",
            "0.7.0",
            "0.7.0",
            {"": {"0.7.0": 0.25}},
            _one_number("bleu", 100.0),
            10,
            "every epoch",
            _each_epoch,
            ("Transformer",),
            "transformer-big",
        ),
        Benchmark(
            "dlrm",
            "DLRM on Criteo's Terabyte logs",
            "0.7.0",
            "2.1.0",
            {"": {"0.7.0": 0.8025}},
            _one_number("auc"),
            5,
            "20 times in the one epoch",
            lambda batch, examples: (examples / 20, examples / 20),
            ("Dlrm",),
            "dlrm-mlperf",
            examples=4_195_197_692,
            parts={"interaction": "DotInteraction"},
        ),
        Benchmark(
            "dlrm_dcnv2",
            "DLRM-DCNv2 on multi-hot ids of Criteo's Terabyte logs",
            "3.0.0",
            "6.0.0",
            {"": {"3.0.0": 0.80275}},
            _one_number("auc"),
            10,
            "20 times in the one epoch",
            lambda batch, examples: (examples / 20, examples / 20),
            ("Dlrm",),
            "dlrm-v2",
            examples=4_195_197_692,
            parts={"interaction": "CrossInteraction"},
        ),
        Benchmark(
            "ssd",
            "SSD of ResNet-34 on COCO 2017, from a classifier's weights",
            "0.7.0",
            "1.1.0",
            {"": {"0.7.0": 0.23}},
            _one_number("box_AP"),
            5,
            "at epochs 40, 50, 55, 60, 65, 70, 75 and 80",
            _ssd,
            ("Ssd",),
            "ssd",
            examples=117_266,
        ),
        Benchmark(
            "maskrcnn",
            "Mask R-CNN of ResNet-50 on COCO 2017, from a classifier's weights",
            "0.7.0",
            "3.1.0",
            {"BBOX": {"0.7.0": 0.377}, "SEGM": {"0.7.0": 0.339}},
            {"BBOX": ("box_AP", 1.0), "SEGM": ("mask_AP", 1.0)},
            5,
            "every epoch",
            _each_epoch,
            ("MaskRcnn",),
            "mask-rcnn",
            examples=117_266,
        ),
        Benchmark(
            "gnmt",
            "GNMT on WMT16, English to German",
            "0.7.0",
            "0.7.0",
            {"": {"0.7.0": 0.24}},
            _one_number("bleu", 100.0),
            10,
            "every epoch",
            _each_epoch,
            ("Gnmt",),
            "gnmt",
        ),
    )
}
"""Every benchmark of ours, by its name in the log."""


def benchmark_of(recipe: "Recipe") -> Benchmark:
    """Returns the benchmark that a recipe is a run of, by its model.

    Raises:
      MlperfError: its model is none of a benchmark's.
    """
    model: Any = recipe.model
    while hasattr(model, "model"):  # `Normalized`, and what else stands around a model
        model = model.model
    for benchmark in BENCHMARKS.values():
        if benchmark.is_of(model):
            return benchmark
    known = ", ".join(
        f"{each.name} ({' with '.join([each.models[0], *each.parts.values()])})" for each in BENCHMARKS.values()
    )
    raise MlperfError(
        f"recipe {recipe.name}: its model, {type(model).__name__}, belongs to no MLPerf benchmark known here: {known}. "
        "Leave out --log mlperf, or train one of these."
    )


def find_benchmark(name: str) -> Benchmark:
    """Returns the benchmark of that name.

    Raises:
      MlperfError: there is none, with the nearest.
    """
    if name not in BENCHMARKS:
        raise MlperfError(f"no MLPerf benchmark {name!r} is known here. {nearest(name, BENCHMARKS)}")
    return BENCHMARKS[name]


def check_ruleset(benchmark: Benchmark, ruleset: str) -> str:
    """Returns the rule set, or the benchmark's last where it is empty.

    Raises:
      MlperfError: the benchmark is not in that rule set.
    """
    if ruleset and ruleset not in benchmark.rulesets:
        raise MlperfError(
            f"rule set {ruleset!r} has no {benchmark.name}. It was run under {', '.join(benchmark.rulesets)}."
        )
    return ruleset or benchmark.last
