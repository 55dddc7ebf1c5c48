"""Adasum at large batches: does it reach the small batch's loss in fewer epochs than the sum?

Digits and a masked language model (its smallest form); Momentum, Adam and LAMB; three seeds. Each optimizer's rate is
chosen for the small batch first. Large batches are then tried at that rate, which the paper says Adasum allows, and at
multiples of it, which is how the sum is helped in practice. The networks are perceptrons, not the paper's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import optax
from matplotlib.figure import Figure

from multipod.data.digits import Digits
from multipod.data.stdlib_text import StdlibText
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.experiments.perceptron import Cloze, Perceptron
from multipod.experiments.ranks import Settings, Study, curves, first_epochs, grid
from multipod.metrics.objective import Classification
from multipod.optim.adamw import AdamW
from multipod.optim.lamb import Lamb
from multipod.optim.optimizer import Optimizer
from multipod.optim.rates import Constant, WarmUp
from multipod.optim.sgd import Sgd

SOURCE = "arXiv:2006.02924"
SEEDS = (0, 1, 2)
OPTIMIZERS = {
    "momentum": (Sgd(WarmUp(Constant(1.0), 0.05), nesterov=False), (0.01, 0.03, 0.1)),
    "adam": (AdamW(WarmUp(Constant(1.0), 0.05)), (0.001, 0.002, 0.004)),
    "lamb": (Lamb(WarmUp(Constant(1.0), 0.05)), (0.0025, 0.005, 0.01)),
}
"""Of each its rates at the small batch. Their changes are proportional to the rate, so all rates are one program."""

MULTIPLES = {False: (1, 2, 4, 8, 16, 32), True: (1 / 4, 1 / 2, 1, 2, 4, 8)}
"""Of the small batch's rate that the large batch tries, with the sum and with Adasum. Changes that are nearly
orthogonal are added by Adasum and averaged by the sum, so its rates are lower."""

SMALL_EPOCHS = 8
LEAST_GAIN = 0.2


@dataclass(frozen=True)
class BatchTask:
    """What is learnt, at a small batch of one rank and at a large one of `ranks` of them.

    Attributes:
      name: for tables.
      study: of the small batch.
      ranks: ranks of the large batch.
      epochs: length of the large batch's runs.
      optimizers: names in `OPTIMIZERS`.
    """

    name: str
    study: Study
    ranks: int
    epochs: int
    optimizers: tuple[str, ...]


def tasks() -> list[BatchTask]:
    """What the experiment is tried on."""
    digits, text = Digits(shift=0).train().arrays, _text()
    plain = partial(Study, optimizer=lambda settings: optax.identity(), ranks=1, epochs=SMALL_EPOCHS)
    image = plain(Perceptron(), Classification(), train=digits, judged={"train": digits}, examples=32)
    language = plain(Cloze(VOCAB), Classification(), train=text, judged={"train": text}, examples=32)
    return [
        BatchTask("digits", image, 8, 60, ("momentum", "adam", "lamb")),
        BatchTask("digits", image, 16, 60, ("momentum", "adam", "lamb")),
        BatchTask("language model", language, 16, 40, ("adam", "lamb")),
    ]


@dataclass(frozen=True)
class BatchComparison:
    """What came out for one task and optimizer.

    Attributes:
      task: the task.
      optimizer: its name.
      target: the small batch's loss, a mean over seeds.
      rate: the small batch's best rate.
      losses: (whether by Adasum) to [multiples, seeds, epochs], the multiples as in `MULTIPLES`.
    """

    task: BatchTask
    optimizer: str
    target: float
    rate: float
    losses: dict[bool, np.ndarray]

    def epochs(self, adasum: bool) -> np.ndarray:
        """[multiples, seeds]: epochs to the target, infinite where it is not reached."""
        return first_epochs(self.losses[adasum], self.target)

    def place(self, adasum: bool, tuned: bool) -> int:
        """Which of the multiples: the one with the fewest epochs on average, or that of the small batch's own rate."""
        return int(np.argmin(self.epochs(adasum).mean(-1))) if tuned else MULTIPLES[adasum].index(1)

    def at_edge(self, adasum: bool) -> bool:
        """Whether the best multiple is the first or the last that was tried, so that a better one may lie beyond."""
        return self.place(adasum, True) in (0, len(MULTIPLES[adasum]) - 1)

    def fewer(self, tuned: bool) -> np.ndarray:
        """[seeds]: by what share Adasum needs fewer epochs, at least; NaN where neither arrives within the runs.

        Where the sum does not arrive it is taken to do so with the last epoch; where Adasum does not, it is -infinity.
        """
        ours, theirs = (self.epochs(way)[self.place(way, tuned)] for way in (True, False))
        share = 1 - ours / np.minimum(theirs, self.task.epochs)
        return np.where(np.isfinite(ours) | np.isfinite(theirs), share, np.nan)


def run(report: Callable[[str], None]) -> Outcome:
    """The experiment."""
    small: dict[tuple[str, str], tuple[float, float]] = {}
    comparisons = []
    for task in tasks():
        for name in task.optimizers:
            if (task.name, name) not in small:
                small[task.name, name] = small_batch(task.study, name)
            comparisons.append(measured(task, name, *small[task.name, name]))
            batch = task.study.examples * task.ranks
            share = _share(comparisons[-1].fewer(False))
            report(f"{task.name}, batch {batch}, {name}: {share} fewer epochs at the same rate")
    return Outcome(
        "Adasum at large batches, on perceptrons",
        tuple(claims_of(comparisons)),
        (
            Section("What was done", _method()),
            Section("Epochs to the small batch's loss", _READING, _HEAD, [_row(one) for one in comparisons]),
            Section("Where a claim does not hold", _LIMITS),
            Section(
                "The losses", "At the small batch's rate. Thin lines are seeds; the target is dotted.", figure="loss"
            ),
        ),
        {"loss": _figure(comparisons)},
        {"epochs": [_entry(one) for one in comparisons]},
    )


def small_batch(study: Study, name: str) -> tuple[float, float]:
    """The best rate of the small batch, and the loss it ends at."""
    optimizer, rates = OPTIMIZERS[name]
    last = _losses(_scaled(study, optimizer), rates)[:, :, -1].mean(-1)
    best = int(np.argmin(last))
    return rates[best], float(last[best])


def measured(task: BatchTask, name: str, rate: float, target: float) -> BatchComparison:
    """The large batch, both ways, each on its own multiples of the rate."""
    large = _scaled(replace(task.study, ranks=task.ranks, epochs=task.epochs), OPTIMIZERS[name][0])
    losses = {way: _losses(replace(large, adasum=way), [rate * k for k in MULTIPLES[way]]) for way in MULTIPLES}
    return BatchComparison(task, name, target, rate, losses)


def _scaled(study: Study, optimizer: Optimizer) -> Study:
    def build(settings: Settings) -> optax.GradientTransformation:
        return optax.chain(optimizer.build(study.updates * study.epochs), optax.scale(settings["rate"]))

    return replace(study, optimizer=build)


def _losses(study: Study, rates: Sequence[float]) -> np.ndarray:
    """[rates, seeds, epochs]; losses that are no numbers are infinite."""
    losses = curves(study, grid(rate=rates, seed=SEEDS))["train"]["loss"].reshape(len(rates), len(SEEDS), -1)
    return np.where(np.isfinite(losses), losses, np.inf)


VOCAB, TOKENS = 320, 2048
BEFORE = 4


@lru_cache(maxsize=1)
def _text() -> dict[str, np.ndarray]:
    """Tokens of the standard library's text, each the label of those around it: `around`, `label`."""
    length = 2 * BEFORE + 1
    rows = StdlibText(length=length, vocab=VOCAB, files="asyncio/*.py").train().rows
    whole = rows["token"][(rows["segment"] == rows["segment"][:, :1]).all(1)]
    chosen = whole[np.random.default_rng(0).permutation(len(whole))[:TOKENS]]
    return {"around": np.delete(chosen, BEFORE, 1), "label": chosen[:, BEFORE]}


# The page.

_READING = """Means over the seeds, smallest to largest; `never` is said where no seed arrives within the run. The tuned
rate is the best of the multiples, for each way by itself. In the claims a sum that does not arrive counts as if it did
with the last epoch, so the share is a lower bound."""
_LIMITS = """The paper's runs have batches at which a higher rate makes the sum diverge before it is fast enough.
Where the sum's best rate lies inside the multiples that were tried, and it still needs fewer epochs, a claim on tuned
rates has failed; where it lies at their edge, the claim says so. What Adasum saves at this size is the tuning."""
_HEAD = ("task", "batch", "optimizer", "target", "sum, same rate", "Adasum, same rate", "sum, tuned", "Adasum, tuned")


def claims_of(comparisons: Sequence[BatchComparison]) -> list[Claim]:
    """Two claims for each comparison: at the small batch's rate, and at the best rate of each way."""
    return [_claim(one, tuned) for one in comparisons for tuned in (False, True)]


def _claim(one: BatchComparison, tuned: bool) -> Claim:
    fewer = one.fewer(tuned)
    least = LEAST_GAIN if one.optimizer == "lamb" else 0.0
    mean = float(fewer.mean())
    where = f"{one.task.name}, batch {one.task.study.examples * one.task.ranks}, {one.optimizer}"
    edges = [name for way, name in ((False, "the sum's"), (True, "Adasum's")) if tuned and one.at_edge(way)]
    edge = f" ({' and '.join(edges)} best is at the edge of what was tried)" if edges else ""
    rate = f"the rate tuned for each{edge}" if tuned else "the small batch's rate for both"
    return Claim(
        f"{where}, {rate}: Adasum needs fewer epochs than the sum to the small batch's loss (share fewer)",
        SOURCE,
        mean if np.isfinite(mean) else ("not reached" if np.isnan(mean) else "only the sum arrives"),
        f"at least {least:g}" if least else "above 0",
        bool(mean >= least if least else mean > 0),
        SEEDS,
        float(np.ptp(fewer)) if np.isfinite(fewer).all() else None,
        fails_if="the sum arrives as soon"
        + (
            " at the best of its own multiples of the rate" if tuned else " at the rate that the small batch likes best"
        ),
    )


def _method() -> str:
    sums, ours = (", ".join(f"{k:g}" for k in MULTIPLES[way]) for way in (False, True))
    return (
        f"A run of one rank with a small batch sets the target: its training loss after {SMALL_EPOCHS} epochs at the "
        "best of three rates. Then so many ranks, each with a batch of that size, train at multiples of that rate: "
        f"with the sum (the mean of the gradients, one optimizer; {sums} times), and with Adasum of the changes that "
        f"each rank's own optimizer makes ({ours} times: changes that are nearly orthogonal are added, where the sum "
        "takes their mean). All ranks are rows of arrays in one program; a test holds it to training on a mesh. The "
        "warm-up is 5 % of the run, then the rate is constant.\n\n"
        "Not the paper's networks: digits are a perceptron 64-64-64-10 on 1,437 images; the masked language model is "
        f"one token of the standard library's `asyncio` from the {BEFORE} before and the {BEFORE} behind it, a "
        f"perceptron on their embeddings, {TOKENS:,} tokens of {VOCAB} kinds."
    )


def _row(one: BatchComparison) -> tuple[str, ...]:
    cells = []
    for tuned in (False, True):
        for way in (False, True):
            place = one.place(way, tuned)
            cells.append(_epochs(one.epochs(way)[place], MULTIPLES[way][place]))
    batch = str(one.task.study.examples * one.task.ranks)
    return one.task.name, batch, one.optimizer, f"{one.target:.3f}", *cells


def _epochs(epochs: np.ndarray, multiple: float) -> str:
    reached = epochs[np.isfinite(epochs)]
    if not len(reached):
        return "never"
    some = "" if len(reached) == len(epochs) else f", {len(reached)} of {len(epochs)} seeds"
    return f"{reached.mean():.1f} ({reached.min():.0f} to {reached.max():.0f}{some}) at {multiple:g}x"


def _share(fewer: np.ndarray) -> str:
    return f"{100 * fewer.mean():.0f} %" if np.isfinite(fewer).all() else "not all seeds arrive:"


def _entry(one: BatchComparison) -> dict[str, Any]:
    plain = {way: [[int(e) if np.isfinite(e) else None for e in row] for row in one.epochs(way)] for way in one.losses}
    return {
        "task": one.task.name,
        "batch": one.task.study.examples * one.task.ranks,
        "ranks": one.task.ranks,
        "optimizer": one.optimizer,
        "target": one.target,
        "small_batch_rate": one.rate,
        "multiples": {"sum": MULTIPLES[False], "adasum": MULTIPLES[True]},
        "sum": plain[False],
        "adasum": plain[True],
    }


def _figure(comparisons: list[BatchComparison]) -> Any:
    columns = 3
    figure = Figure(figsize=(10, 2.6 * -(-len(comparisons) // columns)), layout="constrained")
    axes = figure.subplots(-(-len(comparisons) // columns), columns, squeeze=False).ravel()
    for ax in axes[len(comparisons) :]:
        ax.axis("off")
    for ax, one in zip(axes, comparisons, strict=False):
        for way, name, colour in ((False, "sum", "tab:gray"), (True, "Adasum", "tab:blue")):
            losses = one.losses[way][one.place(way, tuned=False)]
            epochs = np.arange(1, losses.shape[-1] + 1)
            ax.plot(epochs, losses.mean(0), color=colour, label=name)
            for seed in losses:
                ax.plot(epochs, seed, color=colour, alpha=0.3, linewidth=0.7)
        ax.axhline(one.target, color="black", linestyle=":", linewidth=1)
        ax.set(yscale="log", title=f"{one.task.name}, {one.task.study.examples * one.task.ranks}, {one.optimizer}")
        ax.set(xlabel="epoch", ylabel="training loss")
    axes[0].legend()
    return figure
