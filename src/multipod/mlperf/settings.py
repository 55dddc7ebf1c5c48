"""What a benchmark's log must say of hyper-parameters, read from the run's own recipe.

A key whose value the recipe does not have (the momentum of Adam) is left out: a log says nothing that is not so, and
the compliance checker names what is missing.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from multipod.mlperf.benchmarks import Benchmark
from multipod.optim.adamw import AdamW
from multipod.optim.lamb import Lamb
from multipod.optim.lars import Lars
from multipod.optim.optimizer import RegularizedOptimizer
from multipod.optim.rates import Constant, Decay, Drops, HeldPolynomial, Rate, WarmUp
from multipod.optim.sgd import Sgd
from multipod.recipe.recipe import Recipe


class LoggedSetting(NamedTuple):
    """A key, its value, and what else the line says."""

    key: str
    value: Any
    metadata: Mapping[str, str] = {}


@dataclass(frozen=True)
class LoggedRun:
    """A run as its log tells it.

    Attributes:
      recipe: what is run.
      train_examples: examples of an epoch.
      test_examples: examples of an evaluation.
      norm_examples: examples over which batch norm takes its statistics.
    """

    recipe: Recipe
    train_examples: int
    test_examples: int
    norm_examples: int

    @property
    def rate(self) -> Rate | None:
        """The optimizer's rate, if the optimizer is one of ours."""
        return self.recipe.optimizer.rate if isinstance(self.recipe.optimizer, RegularizedOptimizer) else None

    @property
    def fall(self) -> Decay | None:
        """The rate behind its warm-up."""
        rate = self.rate.then if isinstance(self.rate, WarmUp) else self.rate
        return rate if isinstance(rate, Decay) else None

    @property
    def warmup(self) -> int:
        """Updates of the warm-up."""
        return self.rate.length(self.recipe.updates) if isinstance(self.rate, WarmUp) else 0

    def epochs(self, updates: float) -> float:
        """Returns the epochs in so many updates."""
        return updates * self.recipe.batch / self.train_examples

    def of_fall(self, name: str) -> float | None:
        """Returns a number of the rate's fall; None if it has none of that name."""
        value: float | None = getattr(self.fall, name, None)
        return value

    def of_data(self, *names: str) -> Any:
        """Returns what the recipe's data have under these names, one inside the other; None if they lack one."""
        value: Any = self.recipe.data
        for name in names:
            value = getattr(value, name, None)
        return value

    @property
    def drops(self) -> list[float] | None:
        """Updates after which the rate falls by a factor; None if it falls otherwise."""
        return [share * self.recipe.updates for share in self.fall.at] if isinstance(self.fall, Drops) else None

    @property
    def warmup_start(self) -> float | None:
        """The rate that a warm-up begins with, as a part of its peak; None without a warm-up."""
        return self.rate.start if isinstance(self.rate, WarmUp) else None

    def of_optimizer(self, name: str) -> float | None:
        """Returns a number of the optimizer; None if it has none of that name."""
        value: float | None = getattr(self.recipe.optimizer, name, None)
        return value


def settings_of(benchmark: Benchmark, run: LoggedRun) -> Iterator[LoggedSetting]:
    """Yields what a log of the benchmark says of a run's hyper-parameters, each key once."""
    for each in [*_common(run), *_SETTINGS[benchmark.name](run)]:
        setting = LoggedSetting(*each)
        if setting.value is not None:
            yield setting


def optimizer_name(recipe: Recipe) -> str:
    """Returns the optimizer's name in MLPerf's words; our own where those have none."""
    for kind, name in ((Lamb, "lamb"), (AdamW, "adam"), (Lars, "lars"), (Sgd, "sgd")):
        if isinstance(recipe.optimizer, kind):
            return name
    return type(recipe.optimizer).__name__.lower()


Said = tuple[str, Any] | tuple[str, Any, Mapping[str, str]]
"""What becomes a setting; None as the value leaves the key out."""


def _common(run: LoggedRun) -> Iterator[Said]:
    recipe = run.recipe
    yield "seed", recipe.seed
    yield "global_batch_size", recipe.batch
    yield "gradient_accumulation_steps", recipe.accumulate
    yield "train_samples", run.train_examples
    yield "eval_samples", run.test_examples
    yield "opt_name", optimizer_name(recipe)
    yield "opt_base_learning_rate", run.of_fall("peak")


def _resnet(run: LoggedRun) -> Iterator[Said]:
    name = optimizer_name(run.recipe)
    warmup = "opt_learning_rate_warmup_epochs"
    yield from (
        (f"{name}_opt_base_learning_rate", run.of_fall("peak")),
        (f"{name}_opt_end_learning_rate", run.of_fall("end")),
        (f"{name}_opt_learning_rate_decay_poly_power", run.of_fall("power")),
        (f"{name}_opt_learning_rate_decay_steps", run.recipe.updates - run.warmup),
        (f"{name}_opt_momentum", run.of_optimizer("momentum")),
        (f"{name}_opt_weight_decay", run.of_optimizer("weight_decay")),
        (f"lars_{warmup}" if name == "lars" else warmup, run.epochs(run.warmup)),
        ("model_bn_span", run.norm_examples),
    )
    if name == "lars":
        yield "lars_epsilon", run.of_optimizer("eps")


def _bert(run: LoggedRun) -> Iterator[Said]:
    epsilon = run.of_optimizer("eps")
    yield from (
        ("opt_epsilon", epsilon),  # to v2.0
        ("opt_lamb_epsilon", epsilon),  # from v2.1
        ("opt_learning_rate_training_steps", run.recipe.updates),
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("num_warmup_steps", run.warmup),
        ("start_warmup_step", _start_of_warmup(run)),
        ("opt_lamb_beta_1", run.of_optimizer("beta1")),
        ("opt_lamb_beta_2", run.of_optimizer("beta2")),
        ("opt_lamb_weight_decay_rate", run.of_optimizer("weight_decay")),
    )


def _start_of_warmup(run: LoggedRun) -> int:
    """Returns the update, 0 or below, at which the warm-up's line would be at rate 0."""
    if not isinstance(run.rate, WarmUp) or run.rate.start in (0, 1):
        return 0
    return -round(run.warmup * run.rate.start / (1 - run.rate.start))


def _transformer(run: LoggedRun) -> Iterator[Said]:
    yield from (
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("opt_adam_beta_1", run.of_optimizer("beta1")),
        ("opt_adam_beta_2", run.of_optimizer("beta2")),
        ("opt_adam_epsilon", run.of_optimizer("eps")),
        _longest(run),
    )


def _gnmt(run: LoggedRun) -> Iterator[Said]:
    drops = run.drops or []
    yield from (
        _longest(run),
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("opt_learning_rate_alt_warmup_func", isinstance(run.rate, WarmUp) and run.rate.exponential),
        ("opt_learning_rate_alt_decay_func", bool(drops)),
        ("opt_learning_rate_decay_factor", run.of_fall("factor")),
        ("opt_learning_rate_decay_interval", round(drops[1] - drops[0]) if len(drops) > 1 else None),
        ("opt_learning_rate_decay_steps", len(drops) or None),
        ("opt_learning_rate_remain_steps", round(drops[0]) if drops else None),
        ("opt_adam_beta_1", run.of_optimizer("beta1")),
        ("opt_adam_beta_2", run.of_optimizer("beta2")),
        ("opt_adam_epsilon", run.of_optimizer("eps")),
    )


def _longest(run: LoggedRun) -> Said:
    """The most tokens of a side of a pair; pairs with more are left out of training."""
    return "max_sequence_length", run.of_data("length"), {"method": "discard"}


def _dlrm(run: LoggedRun) -> Iterator[Said]:
    fall = run.fall
    begin = round(fall.until * run.recipe.updates) if isinstance(fall, HeldPolynomial) else None
    yield from (
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("lr_decay_start_steps", begin),
        ("sgd_opt_base_learning_rate", run.of_fall("peak")),
        ("sgd_opt_learning_rate_decay_poly_power", run.of_fall("power")),
        ("sgd_opt_learning_rate_decay_steps", None if begin is None else run.recipe.updates - begin),
    )


def _dlrm_dcnv2(run: LoggedRun) -> Iterator[Said]:
    """DLRM-DCNv2's rules have neither warm-up nor decay and ask for a 0 of each; a falling rate leaves the keys out."""
    fall = 0 if isinstance(run.fall, Constant) else None
    yield from (
        ("opt_adagrad_epsilon", run.of_optimizer("eps")),
        ("opt_adagrad_initial_accumulator_value", run.of_optimizer("initial_sum")),
        ("opt_adagrad_learning_rate_decay", fall),
        ("opt_weight_decay", run.of_optimizer("weight_decay")),
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("opt_learning_rate_decay_start_step", fall),
        ("opt_learning_rate_decay_steps", fall),
    )


def _ssd(run: LoggedRun) -> Iterator[Said]:
    drops = None if run.drops is None else [_tenths(run.epochs(drop), run.epochs(1)) for drop in run.drops]
    yield from (
        ("model_bn_span", run.norm_examples),
        ("opt_learning_rate_warmup_factor", run.warmup_start),
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("opt_weight_decay", run.of_optimizer("weight_decay")),
        ("opt_learning_rate_decay_boundary_epochs", drops),
        ("max_samples", run.of_data("crop", "tries")),
    )


def _tenths(epochs: float, update: float) -> float:
    """Returns epochs in whole tenths where that is less than an update away: a boundary is at a whole update."""
    return round(epochs, 1) if abs(round(epochs, 1) - epochs) < update else round(epochs, 3)


def _maskrcnn(run: LoggedRun) -> Iterator[Said]:
    model: Any = run.recipe.model
    model = getattr(model, "model", model)  # inside `Normalized`
    yield from (
        ("opt_learning_rate_warmup_factor", run.warmup_start),
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("opt_learning_rate_decay_factor", run.of_fall("factor")),
        ("opt_learning_rate_decay_steps", None if run.drops is None else list(map(round, run.drops))),
        ("num_image_candidates", model.proposals[1]),
        ("min_image_size", run.of_data("shape", "shorter")),
        ("max_image_size", run.of_data("shape", "longer")),
    )


_SETTINGS: dict[str, Callable[[LoggedRun], Iterator[Said]]] = {
    "resnet": _resnet,
    "bert": _bert,
    "transformer": _transformer,
    "dlrm": _dlrm,
    "dlrm_dcnv2": _dlrm_dcnv2,
    "ssd": _ssd,
    "maskrcnn": _maskrcnn,
    "gnmt": _gnmt,
}
