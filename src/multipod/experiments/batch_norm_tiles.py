"""Accuracy against the batch-norm tile at few examples a device, and against what evaluation normalises with.

The network is a perceptron on digits, not the paper's ResNet-50.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import optax
from matplotlib.figure import Figure

from multipod.data.digits import Digits
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.experiments.perceptron import Perceptron
from multipod.experiments.ranks import Settings, Study, curves, grid
from multipod.metrics.objective import Classification
from multipod.nn.images.batch_norm import Moving
from multipod.optim.rates import Cosine, WarmUp
from multipod.optim.sgd import Sgd

SOURCE = "arXiv:1811.06992"
SEEDS = (0, 1, 2)
DEVICES, EXAMPLES = 16, 2
TILES = (1, 2, 4, 8, 16)
"""Devices that share statistics."""

EPOCHS = 20
RATES = (0.01, 0.03, 0.1)
WHOLE = "pooled"
MOVING: tuple[Moving, ...] = ("pooled", "averaged", "kept")


@dataclass(frozen=True)
class TileResult:
    """Test accuracies at the end: [rates, seeds]."""

    tile: int
    moving: Moving
    accuracy: np.ndarray

    @property
    def best(self) -> np.ndarray:
        """[seeds] at the best rate."""
        return self.accuracy[self.accuracy.mean(-1).argmax()]


def run(report: Callable[[str], None]) -> Outcome:
    """The experiment."""
    found = []
    for tile in TILES:
        for moving in MOVING if tile < DEVICES else MOVING[:1]:
            found.append(measured(tile, moving))
            report(f"{tile} devices, {moving}: {100 * found[-1].best.mean():.1f} %")
    return Outcome(
        "Accuracy against the batch-norm tile, of a perceptron on digits",
        tuple(claims_of(found)),
        (
            Section("What was done", _METHOD),
            Section("Test accuracy", _READING, _HEAD, [_row(tile, found) for tile in TILES], figure="accuracy"),
        ),
        {"accuracy": _figure(found)},
        {"accuracy": [_entry(one) for one in found]},
    )


def measured(tile: int, moving: Moving) -> TileResult:
    """All rates and seeds at once. A tile is one rank here: its statistics are those of all its examples."""
    digits = Digits(shift=0)
    train, test = digits.train().arrays, digits.test().arrays
    tiles = DEVICES // tile
    model = Perceptron(norm=True, tile=(1, 1), moving=moving, tiles=tiles)
    optimizer = Sgd(WarmUp(Cosine(1.0), 0.1), nesterov=False)

    def build(settings: Settings) -> optax.GradientTransformation:
        return optax.chain(optimizer.build(study.updates * EPOCHS), optax.scale(settings["rate"]))

    study = Study(model, Classification(), build, train, {"test": test}, tiles, tile * EXAMPLES, EPOCHS)
    accuracy = curves(study, grid(rate=RATES, seed=SEEDS))["test"]["accuracy"][:, -1]
    return TileResult(tile, moving, accuracy.reshape(len(RATES), len(SEEDS)))


# The page.

_METHOD = f"""A perceptron 64-64-64-10 with batch norm before each ReLU, on 1,437 digits: {DEVICES} devices with
{EXAMPLES} examples each, {EPOCHS} epochs, momentum 0.9, warm-up and cosine decay; the best rate of {RATES} counts. A
tile of k devices normalises over {EXAMPLES} k examples. Gradients are averaged over all devices, so nothing differs but
the statistics. Evaluation normalises with moving moments (momentum 0.9), by three published treatments:
`pooled` takes the variance of the whole batch, `averaged` the mean of the tiles' variances, `kept` pools the tiles' own
moving moments (`multipod.nn.images.batch_norm.Moving`)."""
_READING = """Mean over seeds, and smallest to largest. One test image of 360 is 0.28 %. The treatments differ in the
variance between tiles, which matters where tiles are small; there the noise of two examples a tile hides it."""
_HEAD = ("devices in a tile", "examples", *MOVING)


def _at(found: list[TileResult], tile: int, moving: str = WHOLE) -> np.ndarray:
    return next(one.best for one in found if (one.tile, one.moving) == (tile, moving))


def claims_of(found: list[TileResult]) -> list[Claim]:
    """What the accuracies of all tiles and treatments say."""
    smallest, whole = _at(found, TILES[0]), _at(found, DEVICES)
    middle = max((tile for tile in TILES if tile < DEVICES), key=lambda tile: _at(found, tile).mean())
    small = [_at(found, TILES[0], moving) for moving in MOVING]

    def points(text: str, source: str, seeds: np.ndarray, holds: bool, threshold: str, fails_if: str) -> Claim:
        mean, spread = 100 * float(seeds.mean()), 100 * float(np.ptp(seeds))
        return Claim(text, source, mean, threshold, holds, SEEDS, spread, fails_if=fails_if)

    lost, restored = whole - smallest, _at(found, middle) - smallest
    gain = small[0] - small[1]
    return [
        points(
            f"a tile of one device with {EXAMPLES} examples costs accuracy against the whole batch (points)",
            SOURCE,
            lost,
            bool(lost.mean() > 0.01),
            "above 1",
            "statistics of two examples serve as well as those of all",
        ),
        points(
            f"a larger tile restores it: {middle} devices against one (points)",
            SOURCE,
            restored,
            bool(restored.mean() > 0.5 * lost.mean() > 0),
            "above half of what was lost",
            "no tile below the whole batch gives back half of what the smallest lost",
        ),
        points(
            "at the smallest tile, moments pooled over tiles judge better than averaged ones (points)",
            "MLPerf v0.7 ResNet in TensorFlow pools, in JAX averages",
            gain,
            bool(gain.mean() > 0),
            "above 0",
            "evaluation with averaged variances is as good",
        ),
    ]


def _row(tile: int, found: list[TileResult]) -> tuple[str, ...]:
    cells = [
        f"{100 * one.best.mean():.1f} % ({100 * one.best.min():.1f} to {100 * one.best.max():.1f})"
        for moving in MOVING
        for one in found
        if (one.tile, one.moving) == (tile, moving)
    ]
    return str(tile), str(tile * EXAMPLES), *cells, *["same"] * (len(MOVING) - len(cells))


def _entry(one: TileResult) -> dict[str, Any]:
    accuracy = np.round(one.accuracy, 4).tolist()
    return {"devices": one.tile, "moving": one.moving, "rates": RATES, "accuracy": accuracy}


def _figure(found: list[TileResult]) -> Any:
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    ax = figure.subplots()
    for moving in MOVING:
        line = [one for one in found if one.moving == moving or one.tile == DEVICES]
        ax.errorbar(
            [one.tile for one in line],
            [one.best.mean() for one in line],
            [
                [one.best.mean() - one.best.min() for one in line],
                [one.best.max() - one.best.mean() for one in line],
            ],
            label=moving,
            marker=".",
            capsize=2,
        )
    ax.set_xscale("log", base=2)
    ax.set(xlabel=f"devices in a tile, {EXAMPLES} examples each", ylabel="test accuracy")
    ax.legend()
    return figure
