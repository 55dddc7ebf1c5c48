"""What a benchmark's log must say of hyper-parameters, read from the run's own recipe.

A key whose value the recipe does not have (the momentum of Adam) is left out: a log says nothing that is not so, and
the compliance checker names what is missing.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from multipod.mlperf.benchmarks import Benchmark
from multipod.optim.adamw import AdamW
from multipod.optim.lamb import Lamb
from multipod.optim.lars import Lars
from multipod.optim.optimizer import RegularizedOptimizer
from multipod.optim.rates import Decay, Drops, HeldPolynomial, Rate, WarmUp
from multipod.optim.sgd import Sgd
from multipod.recipe.recipe import Recipe

Setting = tuple[str, Any]
"""A key and its value."""


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

    def of_optimizer(self, name: str) -> float | None:
        """Returns a number of the optimizer; None if it has none of that name."""
        value: float | None = getattr(self.recipe.optimizer, name, None)
        return value


def settings_of(benchmark: Benchmark, run: LoggedRun) -> Iterator[Setting]:
    """Yields what a log of the benchmark says of a run's hyper-parameters, each key once."""
    for key, value in [*_common(run), *_SETTINGS[benchmark.name](run)]:
        if value is not None:
            yield key, value


def optimizer_name(recipe: Recipe) -> str:
    """Returns the optimizer's name in MLPerf's words; our own where those have none."""
    for kind, name in ((Lamb, "lamb"), (AdamW, "adam"), (Lars, "lars"), (Sgd, "sgd")):
        if isinstance(recipe.optimizer, kind):
            return name
    return type(recipe.optimizer).__name__.lower()


def _common(run: LoggedRun) -> Iterator[Setting]:
    recipe = run.recipe
    yield "seed", recipe.seed
    yield "global_batch_size", recipe.batch
    yield "gradient_accumulation_steps", recipe.accumulate
    yield "train_samples", run.train_examples
    yield "eval_samples", run.test_examples
    yield "opt_name", optimizer_name(recipe)
    yield "opt_base_learning_rate", run.of_fall("peak")


def _resnet(run: LoggedRun) -> Iterator[Setting]:
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


def _bert(run: LoggedRun) -> Iterator[Setting]:
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


def _transformer(run: LoggedRun) -> Iterator[Setting]:
    yield from (
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("opt_adam_beta_1", run.of_optimizer("beta1")),
        ("opt_adam_beta_2", run.of_optimizer("beta2")),
        ("opt_adam_epsilon", run.of_optimizer("eps")),
    )


def _dlrm(run: LoggedRun) -> Iterator[Setting]:
    fall = run.fall
    begin = round(fall.until * run.recipe.updates) if isinstance(fall, HeldPolynomial) else None
    yield from (
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("lr_decay_start_steps", begin),
        ("sgd_opt_base_learning_rate", run.of_fall("peak")),
        ("sgd_opt_learning_rate_decay_poly_power", run.of_fall("power")),
        ("sgd_opt_learning_rate_decay_steps", None if begin is None else run.recipe.updates - begin),
    )


def _ssd(run: LoggedRun) -> Iterator[Setting]:
    fall = run.fall
    drops = [run.epochs(share * run.recipe.updates) for share in fall.at] if isinstance(fall, Drops) else None
    yield from (
        ("model_bn_span", run.norm_examples),
        ("opt_learning_rate_warmup_factor", run.rate.start if isinstance(run.rate, WarmUp) else None),
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("opt_weight_decay", run.of_optimizer("weight_decay")),
        ("opt_learning_rate_decay_boundary_epochs", drops),
    )


def _maskrcnn(run: LoggedRun) -> Iterator[Setting]:
    fall = run.fall
    drops = [round(share * run.recipe.updates) for share in fall.at] if isinstance(fall, Drops) else None
    yield from (
        ("opt_learning_rate_warmup_factor", run.rate.start if isinstance(run.rate, WarmUp) else None),
        ("opt_learning_rate_warmup_steps", run.warmup),
        ("opt_learning_rate_decay_factor", run.of_fall("factor")),
        ("opt_learning_rate_decay_steps", drops),
    )


_SETTINGS: dict[str, Callable[[LoggedRun], Iterator[Setting]]] = {
    "resnet": _resnet,
    "bert": _bert,
    "transformer": _transformer,
    "dlrm": _dlrm,
    "ssd": _ssd,
    "maskrcnn": _maskrcnn,
}
