"""Epochs to the target against the batch: a small ResNet beside MLPerf's reference convergence points.

Both are held against one shape of two numbers, epochs(B) = E (1 + B / B0): below B0 a larger batch costs nothing, above
it every doubling doubles the epochs (arXiv:1812.06162, equation 2.11).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure
from scipy.optimize import minimize_scalar

from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.experiments.ranks import Carry, Study, means, start, step
from multipod.metrics.objective import Classification
from multipod.optim.rates import Constant, WarmUp
from multipod.optim.sgd import Sgd
from multipod.plan.tables.convergence import COUNTED, REFERENCE
from multipod.recipes.digits import digits

SHAPE = "arXiv:1812.06162, equation 2.11"
POINTS = "MLPerf's reference convergence points"

BATCHES = (16, 32, 64, 128, 256, 512, 1024)
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
CHOSEN_BY, SEEDS = (0, 1), (2, 3, 4, 5)
"""Seeds that the rate of each batch is chosen by, and others by which its epochs are told."""

TARGET = 0.97
MOST = 40
"""Epochs after which a run is given up."""

LOOKS = 10
"""Evaluations in an epoch, where it has as many updates."""

WARMUP = 10
"""Updates."""

MODELS = ("resnet50", "ssd", "bert")
"""Of the reference points: those with four batches or more, spread over a factor of four or more."""

NEAR = 0.25
"""Relative error of the shape at a batch that passes."""


class Shape(NamedTuple):
    """epochs(B) = least * (1 + B / knee).

    Attributes:
      least: epochs of small batches.
      knee: the batch that takes twice as many.
      error: the largest relative error over the points that it was fitted to.
    """

    least: float
    knee: float
    error: float

    def epochs(self, batch: float | np.ndarray) -> Any:
        """The epochs of a batch."""
        return self.least * (1 + batch / self.knee)


@dataclass(frozen=True)
class BatchCurve:
    """Epochs to the target by batch.

    Attributes:
      name: of the model.
      batch: [points].
      epochs: [points]; BERT's are of as many examples as its smallest batch took.
    """

    name: str
    batch: tuple[float, ...]
    epochs: tuple[float, ...]

    def shape(self) -> Shape:
        """The shape with the least sum of squared relative errors."""
        batch, epochs = np.array(self.batch), np.array(self.epochs)

        def fitted(log_knee: float) -> tuple[float, np.ndarray]:
            ratio = (1 + batch / np.exp(log_knee)) / epochs
            least = ratio.sum() / (ratio**2).sum()
            return least, least * ratio - 1

        limits = np.log(batch[0]) - 3, np.log(batch[-1]) + 3
        best = minimize_scalar(lambda knee: float((fitted(knee)[1] ** 2).sum()), bounds=limits, method="bounded")
        least, errors = fitted(best.x)
        return Shape(float(least), float(np.exp(best.x)), float(np.abs(errors).max()))

    def slope(self) -> float:
        """d log epochs / d log batch between the largest batch and the next that is at most half of it."""
        half = max(k for k, batch in enumerate(self.batch) if 2 * batch <= self.batch[-1])
        return float(np.log(self.epochs[-1] / self.epochs[half]) / np.log(self.batch[-1] / self.batch[half]))

    def left_out(self) -> float:
        """The relative error at the largest batch of the shape that is fitted to all others."""
        others = replace(self, batch=self.batch[:-1], epochs=self.epochs[:-1])
        return others.shape().epochs(self.batch[-1]) / self.epochs[-1] - 1


def reference(name: str) -> BatchCurve:
    """The published points of a model."""
    points = REFERENCE[name]
    unit = points[0].epochs if COUNTED[name] == 1 else 1.0
    return BatchCurve(name, tuple(one.batch for one in points), tuple(one.epochs / unit for one in points))


def run(report: Callable[[str], None]) -> Outcome:
    """The experiment."""
    rows, epochs = [], []
    for batch in BATCHES:
        one = measured(batch)
        rows.append(one)
        epochs.append(one.mean)
        report(f"batch {batch:,}: {one.mean:.2f} epochs at rate {one.rate:g}")
    ours = BatchCurve("digits", BATCHES, tuple(epochs))
    published = [reference(name) for name in MODELS]
    return Outcome(
        "Epochs to the target against the batch, a small ResNet beside MLPerf's models",
        tuple(claims_of(ours, published)),
        (
            Section("What was done", _METHOD, figure="shape"),
            Section("Digits", _READING, _HEAD, [_row(one) for one in rows]),
            Section("The shapes", "", _SHAPE_HEAD, [_shape_row(one) for one in (ours, *published)]),
        ),
        {"shape": _figure([ours, *published])},
        {"digits": [_entry(one) for one in rows]},
    )


class Measured(NamedTuple):
    """Runs of one batch, at the rate that did best by other seeds.

    Attributes:
      batch: examples.
      rate: that was chosen.
      epochs: of each of `SEEDS`; infinite where the target was not reached.
      tried: mean epochs of `CHOSEN_BY`, by rate.
    """

    batch: int
    rate: float
    epochs: tuple[float, ...]
    tried: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return float(np.mean(self.epochs))


def measured(batch: int) -> Measured:
    """Runs of one batch."""
    runner = _Runner(batch)
    tried = tuple(float(np.mean([runner.epochs(rate, seed) for seed in CHOSEN_BY])) for rate in RATES)
    rate = RATES[int(np.argmin(tried))]
    return Measured(batch, rate, tuple(runner.epochs(rate, seed) for seed in SEEDS), tried)


class _Runner:
    """Trains the recipe's network with momentum, a few updates a call, and looks at the test images after each."""

    def __init__(self, batch: int) -> None:
        recipe = digits()
        train, test = recipe.data.train().arrays, recipe.data.test().arrays  # type: ignore[attr-defined]
        self._examples = len(train["label"])
        self._study = Study(recipe.model, Classification(), self._optimizer, train, {"test": test}, 1, batch, MOST)
        self._few = max(1, self._study.updates // LOOKS)
        self._arrays = jax.tree.map(jnp.asarray, (dict(train), dict(test)))
        self._start = jax.jit(lambda rate, key: start(self._study, self._optimizer({"rate": rate}), key))
        self._train = jax.jit(self._some_updates)

    def epochs(self, rate: float, seed: int) -> float:
        """Epochs of one run to the target, in steps of the evaluations; infinite beyond `MOST`."""
        carry = self._start(rate, jax.random.key(seed))
        for done, rows in enumerate(self._rows(seed), 1):
            carry, accuracy = self._train(rate, carry, rows)
            if accuracy >= TARGET:
                return done * rows.size / self._examples
        return float("inf")

    def _rows(self, seed: int) -> Any:
        """The examples of a few updates at a time, [updates, 1, batch]; every epoch in an order of its own."""
        order, size = np.random.default_rng(seed), self._few * self._study.batch
        waiting = np.zeros(0, np.int64)
        for number in count(1):
            while len(waiting) < size:
                waiting = np.concatenate([waiting, order.permutation(self._examples)])
            if number * size > MOST * self._examples:
                return
            yield waiting[:size].reshape(self._few, 1, self._study.batch)
            waiting = waiting[size:]

    def _some_updates(self, rate: jax.Array, carry: Carry, rows: jax.Array) -> tuple[Carry, jax.Array]:
        train, test = self._arrays
        optimizer = self._optimizer({"rate": rate})
        one = partial(step, self._study, optimizer)
        carry, _ = jax.lax.scan(
            lambda carry, row: (one(carry, {name: array[row] for name, array in train.items()}), None), carry, rows
        )
        return carry, means(self._study, carry, test)["accuracy"]

    @staticmethod
    def _optimizer(settings: Any) -> optax.GradientTransformation:
        unit = Sgd(WarmUp(Constant(1.0), updates=WARMUP), momentum=0.9, nesterov=True).build(10**6)
        return optax.chain(unit, optax.scale(settings["rate"]))


def claims_of(ours: BatchCurve, published: Sequence[BatchCurve]) -> list[Claim]:
    """What our curve and the published ones say."""
    reached = bool(np.isfinite(ours.epochs).all())
    shape = ours.shape() if reached else Shape(float("nan"), float("nan"), float("inf"))
    worst = max(one.shape().error for one in published)
    slopes = [one.slope() for one in published]
    return [
        Claim(
            "digits: the largest relative error of the two-number shape over its batches",
            SHAPE,
            shape.error,
            f"below {NEAR:g}",
            shape.error < NEAR,
            SEEDS,
            fails_if="epochs do not lie on E (1 + B / B0), or a batch never reaches the target",
        ),
        *(
            Claim(
                f"{one.name}: the largest relative error of the two-number shape over its batches",
                POINTS,
                one.shape().error,
                f"below {NEAR:g}",
                one.shape().error < NEAR,
                fails_if="the published epochs do not lie on E (1 + B / B0)",
            )
            for one in published
        ),
        Claim(
            "digits: its error is no larger than the worst of the published curves'",
            POINTS,
            shape.error,
            f"at most {worst:.2g}",
            shape.error <= worst,
            SEEDS,
            fails_if="the shape suits our curve worse than it suits any of theirs",
        ),
        Claim(
            "digits: relative error of the largest batch's epochs as the other batches foretell them",
            SHAPE,
            ours.left_out() if reached else "target not reached",
            f"within {NEAR:g}",
            reached and abs(ours.left_out()) <= NEAR,
            SEEDS,
            fails_if="small batches do not tell where large ones begin to cost epochs",
        ),
        Claim(
            "digits: slope of log epochs over log batch at the largest batch",
            POINTS,
            ours.slope() if reached else "target not reached",
            f"between 0 and 1, as the published {min(slopes):.2f} to {max(slopes):.2f}",
            reached and 0 < ours.slope() < 1,
            SEEDS,
            fails_if="a doubled batch costs no epochs at the end of the range, or more than twice as many",
        ),
    ]


# The page.

_METHOD = f"""The network of the recipe `digits` on its 1,437 images, SGD with Nesterov momentum 0.9, a constant rate
after {WARMUP} updates of warm-up. A run ends when {TARGET:.0%} of the 360 test images are right, looked at {LOOKS}
times an epoch where it has as many updates, and is given up after {MOST} epochs. For each batch the rate is chosen
out of {RATES} by seeds {CHOSEN_BY}; epochs are told by seeds {SEEDS}, which had no part in that. The published curves
are the reference convergence points of the last round with each benchmark (`plan/tables/convergence.py`): every point
is the mean of runs that were tuned for it. Fits are of relative errors. BERT's points are examples, here in units of
its smallest batch's."""
_READING = "Epochs of each seed, and the mean epochs of the seeds that chose the rate, by rate."
_HEAD = ("batch", "rate", "epochs", "seeds", *(f"rate {rate:g}" for rate in RATES))
_SHAPE_HEAD = ("model", "batches", "E", "B0", "largest error", "largest batch, foretold by the others", "last slope")


def _row(one: Measured) -> tuple[str, ...]:
    told = lambda value: f"{value:.2f}" if np.isfinite(value) else "never"  # noqa: E731
    seeds = ", ".join(map(told, one.epochs))
    return f"{one.batch:,}", f"{one.rate:g}", told(one.mean), f"({seeds})", *map(told, one.tried)


def _shape_row(one: BatchCurve) -> tuple[str, ...]:
    if not np.isfinite(one.epochs).all():
        return one.name, "target not reached", "", "", "", "", ""
    shape = one.shape()
    range_ = f"{one.batch[0]:,.0f} to {one.batch[-1]:,.0f}"
    left = f"{one.left_out():+.0%}"
    return (
        one.name,
        range_,
        f"{shape.least:.3g}",
        f"{shape.knee:,.0f}",
        f"{shape.error:.0%}",
        left,
        f"{one.slope():.2f}",
    )


def _entry(one: Measured) -> dict[str, Any]:
    plain = lambda epochs: [value if np.isfinite(value) else None for value in epochs]  # noqa: E731
    return {
        "batch": one.batch,
        "rate": one.rate,
        "epochs": plain(one.epochs),
        "rates": RATES,
        "tried": plain(one.tried),
    }


def _figure(curves: Sequence[BatchCurve]) -> Figure:
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for number, one in enumerate(curves):
        if not np.isfinite(one.epochs).all():
            continue
        shape = one.shape()
        scaled = np.array(one.batch) / shape.knee, np.array(one.epochs) / shape.least
        axes.plot(*scaled, "o-", color=f"C{number}", label=one.name, markersize=4, linewidth=0.8)
    line = np.geomspace(0.01, 10, 200)
    axes.plot(line, 1 + line, color="black", linestyle=":", label="1 + B / B0")
    axes.set(xlabel="batch over B0", ylabel="epochs over E", xscale="log", yscale="log")
    axes.legend()
    return figure
