"""LARS at a large batch: momentum with the rates it was made with, momentum scaled by the present rate, and no LARS.

The network is a perceptron on digits, not the paper's ResNet-50.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib.figure import Figure

from multipod.data.digits import Digits
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.experiments.perceptron import Perceptron
from multipod.experiments.ranks import Settings, Study, curves, grid
from multipod.metrics.objective import Classification
from multipod.optim.lars import lars
from multipod.optim.tensors import TensorRules

SOURCE = "arXiv:1909.09756, table 1"
"""72.8 epochs scaled, 70.6 unscaled, 64 unscaled with momentum 0.929: ResNet-50 at batch 32,768."""

SEEDS = (0, 1, 2)
BATCH = 718
"""Half of the digits: two updates an epoch."""

HORIZONS = (8, 12, 16, 20, 24, 28, 32, 40, 48)
"""Epochs of a run. Warm-up and decay stretch with it, so each is a run of its own."""

TARGETS = {False: 0.93, True: 0.95}
"""Test accuracy, without batch norm and with it."""

WARMUP, WEIGHT_DECAY = 0.1, 1e-4


@dataclass(frozen=True)
class Way:
    """A way of training: its rates, the best of which counts, and its momenta, likewise."""

    name: str
    rates: tuple[float, ...]
    momenta: tuple[float, ...] = (0.9,)
    scaled: bool | None = None

    def optimizer(self, settings: Settings) -> optax.GradientTransformation:
        """The transformation; all numbers may be traced."""
        rate, momentum = _rate(settings), settings["momentum"]
        if self.scaled is None:
            return optax.chain(optax.add_decayed_weights(WEIGHT_DECAY), optax.sgd(rate, momentum))
        return lars(
            rate,
            momentum=momentum,  # type: ignore[arg-type]
            weight_decay=WEIGHT_DECAY,
            trust_coefficient=0.001,
            eps=0.0,
            scaled=self.scaled,
            add_decay=True,
            rules=TensorRules((), ()),
        )


MOMENTA = (0.8, 0.9, 0.929)
MOMENTUM = Way("momentum", (0.1, 0.3, 1.0))
TUNED_MOMENTUM = Way("momentum, tuned", (0.1, 0.3, 1.0), MOMENTA)
SCALED = Way("LARS, scaled", (2.5, 5.0, 10.0), scaled=True)
UNSCALED = Way("LARS, unscaled", (2.5, 5.0, 10.0), scaled=False)
TUNED = Way("LARS, unscaled, momentum tuned", (2.5, 5.0, 10.0), MOMENTA, scaled=False)
PLAIN = {TUNED_MOMENTUM: MOMENTUM, TUNED: UNSCALED}
"""Of those whose momentum is tuned, the same at momentum 0.9."""


def _rate(settings: Settings) -> optax.Schedule:
    """Linear warm-up, then polynomial decay of power 2, stretched over the run."""

    def rate(count: Any) -> jax.Array:
        done = count / settings["updates"]
        falling = jnp.square(jnp.clip(1 - (done - WARMUP) / (1 - WARMUP), 0, 1))
        return settings["rate"] * jnp.where(done < WARMUP, done / WARMUP, falling)

    return rate


@dataclass(frozen=True)
class LarsResult:
    """Test accuracies at the end of runs: [horizons, momenta, rates, seeds]."""

    way: Way
    norm: bool
    accuracy: np.ndarray

    def best(self) -> np.ndarray:
        """[horizons, seeds] at the momentum and rate with the best mean, for each horizon."""
        flat = self.accuracy.reshape(len(HORIZONS), -1, len(SEEDS))
        return flat[np.arange(len(HORIZONS)), flat.mean(-1).argmax(-1)]

    def epochs(self) -> np.ndarray:
        """[seeds]: the shortest run that ends at the target or above, infinite if none does."""
        reached = self.best() >= TARGETS[self.norm]
        return np.where(reached.any(0), np.array(HORIZONS, float)[reached.argmax(0)], np.inf)

    def mean_epochs(self) -> float:
        """The shortest run whose mean accuracy over the seeds is at the target, between horizons by a straight line."""
        means, target = np.maximum.accumulate(self.best().mean(-1)), TARGETS[self.norm]
        if means[-1] < target:
            return float("inf")
        return float(np.interp(target, means, HORIZONS))


def run(report: Callable[[str], None]) -> Outcome:
    """The experiment."""
    found: dict[bool, list[LarsResult]] = {}
    for norm in TARGETS:
        for way in (TUNED_MOMENTUM, SCALED, TUNED):
            one = measured(way, norm)
            parts = [_plain(one), one] if way in PLAIN else [one]
            found[norm] = found.get(norm, []) + parts
            report(f"{'with' if norm else 'without'} batch norm, {way.name}: {one.mean_epochs():.1f} epochs")
    return Outcome(
        "LARS at a large batch of digits, a perceptron: which momentum, and against none",
        tuple(claim for norm, several in found.items() for claim in claims_of(norm, several)),
        (
            Section("What was done", _METHOD),
            Section("Epochs to the target", _READING, _HEAD, [_row(one) for both in found.values() for one in both]),
            Section("Where a claim does not hold", _LIMITS),
            Section(
                "Accuracy against length", "Means over seeds, at the best rate for each length.", figure="accuracy"
            ),
        ),
        {"accuracy": _figure(found)},
        {"epochs": [_entry(one) for both in found.values() for one in both]},
    )


def measured(way: Way, norm: bool) -> LarsResult:
    """All runs of a way at once."""
    digits = Digits(shift=0)
    train, test = digits.train().arrays, digits.test().arrays
    model = Perceptron(norm=norm)
    study = Study(model, Classification(), way.optimizer, train, {"test": test}, 1, BATCH, max(HORIZONS))
    settings = grid(
        updates=[float(study.updates * epochs) for epochs in HORIZONS],
        momentum=way.momenta,
        rate=way.rates,
        seed=SEEDS,
    )
    accuracy = curves(study, settings)["test"]["accuracy"]
    ends = np.round(settings["updates"] / study.updates).astype(int) - 1
    shape = len(HORIZONS), len(way.momenta), len(way.rates), len(SEEDS)
    return LarsResult(way, norm, accuracy[np.arange(len(ends)), ends].reshape(shape))


def _plain(found: LarsResult) -> LarsResult:
    """Keeps the runs at a momentum of 0.9, under the name of the way that tunes nothing."""
    place = MOMENTA.index(0.9)
    return LarsResult(PLAIN[found.way], found.norm, found.accuracy[:, place : place + 1])


# The page.

_METHOD = f"""A perceptron 64-64-64-10 on 1,437 digits, batch {BATCH} (two updates an epoch), once without and once with
batch norm. Every length is a run of its own: linear warm-up over {WARMUP:.0%} of it, then polynomial decay of power 2
to zero, weight decay {WEIGHT_DECAY:g}, trust coefficient 0.001; biases and batch norm have no layer-wise rate. For each
length and way the best rate counts (momentum: {MOMENTUM.rates}; LARS: {SCALED.rates}), and where it is
tuned the best momentum of {MOMENTA}; elsewhere it is 0.9. A run counts when it ends at the target, as in MLPerf."""
_READING = """Between two lengths the mean accuracy is taken to be a straight line. In parentheses: the shortest run
of each seed. One test image of 360 is 0.28 %."""
_LIMITS = """A perceptron's layers are alike: the ratio of a layer's weights to its gradient differs by little from
layer to layer, so one rate for all is near the best for each, and there is little for a layer-wise rate to do. Its cost
remains: steps have the length of the weights however small the gradient is. Six hidden layers of 48 with batch norm
were tried by hand, two seeds, runs of 12 epochs: momentum 92.8 %, LARS scaled 84.7 %, unscaled 78.2 %. The published
order was measured on ResNet-50 at a batch of 32,768, which is not to be had on two cores."""
_HEAD = ("batch norm", "way", "target", "epochs", "seeds", *(f"{h} epochs" for h in HORIZONS))


def claims_of(norm: bool, found: list[LarsResult]) -> list[Claim]:
    """Five comparisons of the epochs that two ways take to the target."""
    momentum, tuned_momentum, scaled, unscaled, tuned = found
    where = f"{'with' if norm else 'without'} batch norm"

    def fewer(one: LarsResult, other: LarsResult, text: str) -> Claim:
        share = 1 - one.mean_epochs() / other.mean_epochs()
        seeds = 1 - one.epochs() / other.epochs()
        return Claim(
            f"{where}: {text} (share fewer epochs)",
            SOURCE,
            share if np.isfinite(share) else "target not reached",
            "above 0",
            bool(share > 0),
            SEEDS,
            float(np.ptp(seeds)) if np.isfinite(seeds).all() else None,
            fails_if=f"{other.way.name} reaches the target in as few epochs as {one.way.name}, or neither does",
        )

    return [
        fewer(unscaled, scaled, "LARS unscaled reaches the target in fewer epochs than scaled"),
        fewer(tuned, unscaled, "a tuned momentum takes fewer epochs than 0.9"),
        fewer(scaled, momentum, "LARS scaled takes fewer epochs than plain momentum"),
        fewer(unscaled, momentum, "LARS unscaled takes fewer epochs than plain momentum"),
        fewer(tuned, tuned_momentum, "LARS unscaled, momentum tuned, takes fewer epochs than plain momentum, tuned"),
    ]


def _row(one: LarsResult) -> tuple[str, ...]:
    mean = one.mean_epochs()
    each = ", ".join(f"{e:.0f}" if np.isfinite(e) else "never" for e in one.epochs())
    accuracies = (f"{100 * a:.1f} %" for a in one.best().mean(-1))
    epochs = f"{mean:.1f}" if np.isfinite(mean) else "never"
    return "yes" if one.norm else "no", one.way.name, f"{TARGETS[one.norm]:.0%}", epochs, f"({each})", *accuracies


def _entry(one: LarsResult) -> dict[str, Any]:
    return {
        "batch_norm": one.norm,
        "way": one.way.name,
        "rates": one.way.rates,
        "momenta": one.way.momenta,
        "horizons": HORIZONS,
        "accuracy": np.round(one.accuracy, 4).tolist(),
    }


def _figure(found: dict[bool, list[LarsResult]]) -> Any:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for ax, (norm, several) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        for one in several:
            best = one.best()
            (line,) = ax.plot(HORIZONS, best.mean(-1), label=one.way.name, marker=".")
            ax.fill_between(HORIZONS, best.min(-1), best.max(-1), color=line.get_color(), alpha=0.15)
        ax.axhline(TARGETS[norm], color="black", linestyle=":", linewidth=1)
        ax.set(xlabel="epochs of the run", ylabel="test accuracy", ylim=(0.7, 1.0))
        ax.set_title(f"{'with' if norm else 'without'} batch norm")
        ax.legend(fontsize=8)
    return figure
