"""For each kind of claim of each experiment: made-up results by which it holds, and one by which it does not.

The claims are made by the experiments' own functions, from numbers in the place of measured ones. A kind is known by
words of its text; every claim of a recorded page must be of one of these kinds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import optax

from multipod.experiments import (
    adasum,
    batch_epochs,
    batch_norm_tiles,
    lars,
    layouts,
    length_buckets,
    mlperf,
    planner,
    planner_families,
    planner_host,
    shuffle_buffer,
    stragglers,
)
from multipod.experiments.availability import campaign, goodput, holes
from multipod.experiments.outcome import Claim
from multipod.experiments.perceptron import Perceptron
from multipod.experiments.pipemare import run as pipemare
from multipod.experiments.pipemare import theory
from multipod.experiments.ranks import Study
from multipod.experiments.st_moe import digit_patches, exact, trained
from multipod.experiments.tt_rec import checks, places
from multipod.experiments.tt_rec import run as tt_rec
from multipod.layout.layout import Layout
from multipod.metrics.objective import Classification
from multipod.plan.families.held_out import HeldOut
from multipod.plan.families.rows import FamilyRow
from multipod.plan.goodput import Failing


@dataclass(frozen=True)
class ClaimCase:
    """A kind of claim.

    Attributes:
      experiment: its name.
      words: in the text of each claim of this kind, and of no other of the experiment.
      made: claims of a result, which is its argument.
      good: a result by which claims of this kind hold.
      bad: a result by which they do not.
    """

    experiment: str
    words: str
    made: Callable[[Any], Claim | Sequence[Claim]]
    good: Any
    bad: Any

    def claims(self, result: Any) -> list[Claim]:
        """Returns the claims of this kind that the experiment makes of a result."""
        found = self.made(result)
        return [one for one in ([found] if isinstance(found, Claim) else found) if self.words in one.claim]


def unpacked(function: Callable[..., Any]) -> Callable[[tuple], Any]:
    """The function of one tuple of its arguments."""
    return lambda arguments: function(*arguments)


# Layouts: losses and bytes.

ALONE = layouts.MeasuredRun([2.0, 1.0], {"weights": 800, "optimizer": 800}, 0, 0, 0.1)
SPLIT = replace(ALONE, bytes={"weights": 800, "optimizer": 100})
_LAYOUTS = [
    ("layouts", "the loss curve of the unsplit model", lambda one: layouts.same("m", Layout((2, 4)), one, ALONE),
     SPLIT, replace(SPLIT, losses=[2.0, 1.01])),
    ("layouts", "optimizer state on a device falls", lambda one: layouts.shrinks("m", Layout((2, 4)), one, ALONE),
     SPLIT, replace(SPLIT, bytes={"weights": 800, "optimizer": 320})),
    ("layouts", "splitting the update over 8 devices", unpacked(layouts.smaller_share),
     ("lamb", 0.2, 0.1), ("lamb", 0.2, 0.3)),
]  # fmt: skip

# Planner: relative errors by row.

EVIDENCE = planner.Evidence(
    fitted={"resnet50 16": 0.01, "ssd 16": -0.02},
    scores={"resnet50 16": 0.03},
    held_out={
        **{name: {"row": 0.05} for name in planner.MODELS_OF_V06},
        **{name: {"row": -0.05} for name in ("1,024 chips", "512 and 1,024 chips", "sums")},
    },
    shares={"LARS": 0.06, "Adam": 0.44, "LAMB": 0.19},
    effects={"split": 1.7, "split, same chips": 1.2, "resnet": 1.1, "one ring": 2.0, "Y first": 2.0},
    run_s=29.0,
)


def _off(left_out: str) -> planner.Evidence:
    return replace(EVIDENCE, held_out={**EVIDENCE.held_out, left_out: {"row": 0.9}})


def _effect(name: str, value: float) -> planner.Evidence:
    return replace(EVIDENCE, effects={**EVIDENCE.effects, name: value})


def _update_share(name: str, value: float) -> planner.Evidence:
    return replace(EVIDENCE, shares={**EVIDENCE.shares, name: value})


_PLANNER = [
    ("planner", words, planner.claims_of, EVIDENCE, bad)
    for words, bad in (
        ("Fit: ResNet-50's step", replace(EVIDENCE, fitted={"resnet50 16": 0.2, "ssd 16": 0})),
        ("Fit: ResNet-50's score", replace(EVIDENCE, scores={"resnet50 16": -0.3})),
        ("Fit: SSD's and Transformer's step", replace(EVIDENCE, fitted={"resnet50 16": 0, "ssd 16": -0.2})),
        ("each model by a fit that lacks that model", _off("ssd")),
        ("Held out: 1,024 chips", _off("1,024 chips")),
        ("Held out: 512 and 1,024 chips", _off("512 and 1,024 chips")),
        ("Held out: EfficientNet's gradient sums", _off("sums")),
        ("Held out: ResNet-50 on 4,096 chips", replace(EVIDENCE, run_s=20.0)),
        ("Share of LARS", _update_share("LARS", 0.03)),
        ("Share of Adam", _update_share("Adam", 0.33)),
        ("Share of LAMB", _update_share("LAMB", 0.3)),
        ("SSD's speed-up on 4 devices", _effect("split", 1.2)),
        ("SSD on 1,024 chips", _effect("split, same chips", 0.96)),
        ("ResNet-50 on 1,024 chips, batch", _effect("resnet", 0.9)),
        ("Y first", _effect("Y first", 1.0)),
    )
]


def _families(error: float, power: float = 0.3, outside: int = 2) -> planner_families.Families:
    """Twenty families with such an error, `outside` of which are ten standard deviations off."""
    rows = [FamilyRow(f"family {number}", "resnet", "GPU", 16, 8, 256) for number in range(20)]
    found = {
        known: [
            HeldOut(row, known, name, 1.0, error / (10 if number < outside else 1), error)
            for name in planner_families.MOST
            for number, row in enumerate(rows)
        ]
        for known in (1, 2)
    }
    return planner_families.Families(found, {known: {row.family: power for row in rows} for known in (1, 2)})


_FAMILIES = [
    ("planner", words, planner_families.claims_of, _families(0.05), bad)
    for words, bad in (
        ("Families: throughput", _families(0.2)),
        ("Families: run time with samples given", _families(0.2)),
        ("Families: run time from", _families(0.2)),
        ("Families: share whose throughput", _families(0.05, power=0.01)),
        ("Families: rows within", _families(0.05, outside=0)),
    )
]


def _curves(last_s: float, share: float) -> mlperf.Curves:
    points = (mlperf.Point(16, 1, 1.0, 0.02, 100.0, 100.0, 1), mlperf.Point(4096, 1, 1.0, share, last_s, 10.0, 1))
    return {"resnet50": points, "bert": points}


_MLPERF = [
    ("mlperf", "speed-up from", mlperf.claims_of, _curves(10.5, 0.2), _curves(15.0, 0.2)),
    ("mlperf", "share of sums", mlperf.claims_of, _curves(10.5, 0.2), _curves(10.5, 0.03)),
]

_SMALL = [
    ("planner-host", "median error", unpacked(planner_host.claims_of), ([0.1, 0.1], [0]), ([0.2, 0.2], [0])),
    ("planner-host", "steps on this host: largest", unpacked(planner_host.claims_of), ([0.1], [0]), ([0, -0.4], [0])),
    ("planner-host", "Memory from the program", unpacked(planner_host.claims_of), ([0], [0.01]), ([0], [0.01, 0.2])),
    ("length-buckets", "pairs a second", unpacked(length_buckets.claims_of), (2.0, 2.0), (1.2, 2.0)),
    ("length-buckets", "hosts that choose", unpacked(length_buckets.claims_of), (2.0, 2.0), (2.0, 1.1)),
]

# Host input.

READERS = [stragglers.ReaderCheck("slow", 2, 0.05, 0.051, 0.03), stragglers.ReaderCheck("even", 2, 0.03, 0.03, 0.03)]
_STRAGGLERS = [
    ("stragglers", "largest error of the predicted", stragglers.claims_of, READERS,
     [replace(READERS[0], predicted_s=0.03)]),
    ("stragglers", "over the device's own time", stragglers.claims_of, READERS, READERS[1:]),
]  # fmt: skip

BUFFERS = {buffer: 0.2 / buffer for buffer in shuffle_buffer.BUFFERS}
UPDATES = {16: np.array([400, 900]), 2048: np.array([80, 84])}
_SHUFFLE = [
    ("shuffle-buffer", words, unpacked(shuffle_buffer.claims_of), (BUFFERS, UPDATES), bad)
    for words, bad in (
        ("correlation within batches", ({**BUFFERS, 256: 0.9}, UPDATES)),
        ("standard deviation", (BUFFERS, {**UPDATES, 2048: np.array([80, 1480])})),
        ("in proportion to the mean", (BUFFERS, {**UPDATES, 16: np.array([800, 804])})),
        ("mean updates", (BUFFERS, {**UPDATES, 2048: np.array([900, 990])})),
    )
]

# Adasum and LARS: epochs to a target.

STUDY = Study(Perceptron(), Classification(), lambda settings: optax.identity(), {}, {}, 1, 32, 8)
TASK = adasum.BatchTask("digits", STUDY, 8, 60, tuple(adasum.OPTIMIZERS))


def compared(optimizer: str, epochs: dict[bool, Sequence[float]]) -> list[Claim]:
    """Claims of runs that reach the target after so many epochs, by way and multiple of the rate, with every seed."""
    losses = {}
    for way, several in epochs.items():
        losses[way] = np.ones((len(several), len(adasum.SEEDS), TASK.epochs))
        for place, epoch in enumerate(several):
            losses[way][place, :, int(epoch) - 1 :] = 0.0
    return adasum.claims_of([adasum.BatchComparison(TASK, optimizer, 0.5, 0.1, losses)])


SUM = [40, 30, 25, 20, 30, 60]
FASTER, SLOWER = [50, 20, 12, 10, 12, 50], [60, 50, 45, 40, 45, 50]
_ADASUM = [
    ("adasum", f", {name}, {words}", unpacked(compared), (name, {False: SUM, True: FASTER}),
     (name, {False: SUM, True: SLOWER}))
    for name in adasum.OPTIMIZERS
    for words in ("the small batch's rate", "the rate tuned")
]  # fmt: skip


def _lars(epochs: Sequence[int]) -> list[Claim]:
    """Claims of the five ways, from the shortest horizon at which each reaches its target."""
    ways = (lars.MOMENTUM, lars.TUNED_MOMENTUM, lars.SCALED, lars.UNSCALED, lars.TUNED)
    results = []
    for way, epoch in zip(ways, epochs, strict=True):
        accuracy = np.where(np.array(lars.HORIZONS) >= epoch, 0.99, 0.5)
        shape = (len(lars.HORIZONS), len(way.momenta), len(way.rates), len(lars.SEEDS))
        results.append(lars.LarsResult(way, True, np.broadcast_to(accuracy[:, None, None, None], shape)))
    return lars.claims_of(True, results)


_LARS = [
    ("lars", words, _lars, (32, 28, 24, 20, 16), bad)
    for words, bad in (
        ("LARS unscaled reaches the target", (32, 28, 20, 24, 16)),
        ("a tuned momentum", (32, 28, 24, 16, 20)),
        ("LARS scaled takes fewer", (20, 16, 24, 20, 16)),
        ("LARS unscaled takes fewer", (16, 12, 24, 20, 16)),
        ("LARS unscaled, momentum tuned, takes", (32, 12, 24, 20, 16)),
    )
]


def _tiles(accuracies: dict[tuple[int, str], float]) -> list[Claim]:
    shape = len(batch_norm_tiles.RATES), len(batch_norm_tiles.SEEDS)
    found = [
        batch_norm_tiles.TileResult(tile, moving, np.full(shape, accuracies.get((tile, moving), 0.9)))
        for tile in batch_norm_tiles.TILES
        for moving in batch_norm_tiles.MOVING
    ]
    return batch_norm_tiles.claims_of(found)


TILED = {(1, "pooled"): 0.7, (1, "averaged"): 0.6, (16, "pooled"): 0.95}
_TILES = [
    ("batch-norm-tiles", words, _tiles, TILED, {**TILED, **bad})
    for words, bad in (
        ("costs accuracy against the whole batch", {(1, "pooled"): 0.95}),
        ("a larger tile restores it", {(tile, "pooled"): 0.7 for tile in (2, 4, 8)}),
        ("pooled over tiles judge better", {(1, "averaged"): 0.8}),
    )
]


def _epochs(name: str, *epochs: float) -> batch_epochs.BatchCurve:
    return batch_epochs.BatchCurve(name, (16, 64, 256, 1024), epochs)


ON_SHAPE, OFF_SHAPE = _epochs("digits", 2.1, 2.4, 3.6, 8.4), _epochs("digits", 2, 9, 2, 9)
NEARLY = _epochs("resnet50", 2.2, 2.4, 3.5, 8.4)
_BATCH_EPOCHS = [
    ("batch-epochs", words, unpacked(batch_epochs.claims_of), good, bad)
    for words, good, bad in (
        ("of the two-number shape over its batches", (ON_SHAPE, [NEARLY]), (OFF_SHAPE, [OFF_SHAPE])),
        ("no larger than the worst", (ON_SHAPE, [NEARLY]), (NEARLY, [ON_SHAPE])),
        ("as the other batches foretell", (ON_SHAPE, [NEARLY]), (_epochs("digits", 2, 2, 2, 9), [NEARLY])),
        ("slope of log epochs", (ON_SHAPE, [NEARLY]), (_epochs("digits", 2, 2, 2, 9), [NEARLY])),
    )
]

# Availability.


def piece(survives: bool, **changes: Any) -> dict[str, Any]:
    """What a run of the campaign left, as far as claims read it."""
    calm = {"faults": [{"recovered_s": 1.0}], "difference": 0.0, "losses": 0.0, "left_behind": []}
    return {"survives": survives, "examples": {"same": True, "uneven": 0}, **calm, **changes}


def _campaign(changes: dict[str, Any]) -> list[Claim]:
    given = dict(changes)
    lost = given.pop("lost", 0)
    return campaign.claims({0: piece(True, **given), 1: piece(False, **given)}, 20, lost)


def _goodput(share: float) -> Claim:
    failing = Failing(2.0, 0.02, 0.1, 0.1)
    return goodput.predicted_claim([goodput.Cell(2.0, 16, 6, share, 0.02, failing)] * 6)


def _holes(broken_s: float) -> list[Claim]:
    return holes.simulated_claims([holes.Hole(512, "ResNet-50", "tree-packing", 0.74e-3, broken_s)])


_AVAILABILITY = [
    ("availability", "parameters, over the largest parameter", _campaign, {}, {"difference": 1e-2}),
    ("availability", "difference of the losses of an update", _campaign, {}, {"losses": 1e-2}),
    ("availability", "runs that did not reach their end, those", _campaign, {}, {"lost": 1}),
    ("availability", "examples used more than once", _campaign, {}, {"examples": {"same": True, "uneven": 3}}),
    ("availability", "processes, ports and shared memory", _campaign, {}, {"left_behind": ["port 4"]}),
    ("availability", "faults that a run did not get over", _campaign, {}, {"faults": [{"recovered_s": None}]}),
    ("availability", "goodput lies outside", _goodput, 0.72, 0.2),
    ("availability", "updates wait for asynchronous", unpacked(goodput.saving_claims), (0, 0, 50), (0.2, 0, 50)),
    ("availability", "updates take longer with", unpacked(goodput.saving_claims), (0, 0, 50), (0, 0.2, 50)),
    ("availability", "of 16 virtual chips failed", holes.learns_the_same, {0: [1.0], 4: [1.0]}, {0: [1.0], 4: [1.1]}),
    ("availability", "makes the gradient sum longer", _holes, 0.75e-3, 0.9e-3),
    ("availability", "step grows by the sum's way", _holes, 0.75e-3, 2e-3),
]

# PipeMare.

GOOD, LOST = np.full(5, 0.975), np.zeros(5)
RESCUED = {("sync", 0.3): GOOD, ("async", 0.3): LOST, ("T1+T2", 0.3): GOOD}
SMALL = {(method, pipemare.SMALL_RATE): GOOD for method in pipemare.METHODS}
BY_DECAY = {decay: GOOD if 0.05 <= decay <= 0.3 else LOST for decay in pipemare.DECAYS}
MOMENTUM = {
    (method, rate): seeds for rate in pipemare.MOMENTUM_RATES for method, seeds in (("async", LOST), ("T1", GOOD))
}
NATS = {("sync", 8): np.array([2.0, 2.1]), ("async", 8): np.array([2.5, 2.6]), ("T1+T2+T3", 8): np.array([2.0, 2.1])}
COUNTED = (0, Fraction(4, 3), Fraction(5, 4), 14.3)
_PIPEMARE = [
    ("pipemare", words, made, good, bad)
    for words, made, good, bad in (
        ("A1: step-size limit", unpacked(theory.limit_claims), (0, 0), (1e-3, 0)),
        ("A1: the same by running", unpacked(theory.limit_claims), (0, 0), (0, 0.1)),
        ("A2: without T2", unpacked(theory.discrepancy_claims), (True, 5, 0), (False, 5, 0)),
        ("A2: T2 raises the limit", unpacked(theory.discrepancy_claims), (True, 5, 0), (True, 2, 0)),
        ("A2: gamma from D", unpacked(theory.discrepancy_claims), (True, 5, 0), (True, 5, 0.1)),
        ("A3: ", theory.delay_claim, 0, 3),
        ("A4: ", unpacked(theory.cost_claims), COUNTED, (1, *COUNTED[1:])),
        ("A10: ", unpacked(theory.cost_claims), COUNTED, (0, Fraction(5, 3), *COUNTED[2:])),
        ("utilisation over GPipe's", unpacked(theory.cost_claims), COUNTED, (*COUNTED[:3], 12.0)),
        ("PipeDream's weight and optimizer memory", theory.memory_claim, 2.7, 3.0),
        ("A5: ", lambda found: pipemare.rescue("A5: ", found, (0.3,)), RESCUED, {**RESCUED, ("async", 0.3): GOOD}),
        ("A6: ", lambda found: pipemare.rescue("A6: ", found, (0.3,)), RESCUED, {**RESCUED, ("T1+T2", 0.3): LOST}),
        ("A7: ", pipemare.momentum_claim, MOMENTUM, dict.fromkeys(MOMENTUM, LOST)),
        ("A8: ", pipemare.small_rate, SMALL, {**SMALL, ("async", pipemare.SMALL_RATE): LOST}),
        ("A9: the best D", unpacked(pipemare.decay_claims), (BY_DECAY, LOST), ({**BY_DECAY, 0.01: GOOD}, LOST)),
        ("A9: every D", unpacked(pipemare.decay_claims), (BY_DECAY, LOST), (BY_DECAY, GOOD)),
        ("asynchronous training loses", unpacked(pipemare.text_claims), (8, NATS),
         (8, {**NATS, ("async", 8): NATS["sync", 8]})),
        ("T1 + T2 + T3 loses", unpacked(pipemare.text_claims), (8, NATS),
         (8, {**NATS, ("T1+T2+T3", 8): NATS["async", 8]})),
    )
]  # fmt: skip

# ST-MoE.

SHARES = {name: [0.0] * 3 if "tokens" in name or name in ("top-1, choices", "top-2, dropless") else [0.2] * 3
          for name in exact.ROUTINGS}  # fmt: skip
KEPT = {0.25: [1.4] * 3, 0.5: [1.1] * 3, 1.25: [1.0] * 3}
WORK = {(c, n): c * (100 + n / 10) for c in exact.CAPACITIES for n in (1, 2)}
ONCE = {(c, n): c for c in exact.CAPACITIES for n in (1, 2)}


def _values(nats: float, **others: float) -> list[dict[str, float]]:
    return [{"nats": nats + seed / 1000, **others} for seed in range(3)]


Z = {0.0: _values(2.0, z=30, spread=4), 1e-3: _values(2.0, z=1, spread=2)}
BALANCE = (_values(2.1, dropped_in_training=0.6), _values(2.0, dropped_in_training=0.1))
FALLING = {factor: _values(2.1 - 0.05 * factor) for factor in trained.FACTORS}
OWN = {factor: _values(2.3 - 0.05 * factor) for factor in trained.FACTORS}
TOP_ONE = {factor: _values(2.2) for factor in trained.FACTORS}
TUNED = {factor: _values(2.0, lost=0.5 - factor / 5, training=2.0) for factor in trained.FACTORS}
PARTS = {
    "all": _values(2.0, training=1.9),
    "sparse": _values(2.1, training=2.1),
    "non-sparse": _values(2.0, training=2),
}
STEPS = {
    (model, n): [300.0 if model == "dense" else 200.0] for model in ("dense", "sparse") for n in digit_patches.COUNTS
}
TOLD = {("dense", 250): [0.9], ("sparse", 250): [0.85], ("dense", 1437): [0.95], ("sparse", 1437): [0.96]}
RATIOS = {"space": [0.4], "letters": [0.5], "digits": [0.9], "brackets": [0.9]}
_ST_MOE = [
    ("st-moe", words, made, good, bad)
    for words, made, good, bad in (
        ("M1: with bfloat16", unpacked(exact.round_off_claims), (-0.358, [2.0], 65536), (-0.2, [2.0], 65536)),
        ("M1: growth", unpacked(exact.round_off_claims), (-0.358, [2.0], 65536), (-0.358, [1.0], 65536)),
        ("M1: error", unpacked(exact.round_off_claims), (-0.358, [2.0], 65536), (-0.358, [2.0], 2)),
        ("that top-1 changes", exact.future_claims, SHARES, {**SHARES, "top-1, choices": [0.1]}),
        ("batch-prioritised routing", exact.future_claims, SHARES, {**SHARES, "top-1, confident, capacity 0.5": [0]}),
        ("top-2 by choices", exact.future_claims, SHARES, {**SHARES, "top-2, choices": [0]}),
        ("in the order of tokens", exact.future_claims, SHARES, {**SHARES, "top-2, tokens": [0.1]}),
        ("M7: ", exact.confident_claim, KEPT, {**KEPT, 0.25: [1.0]}),
        ("M11: ", unpacked(exact.size_claim), ("L", 41, 41, 1), ("L", 50, 41, 1)),
        ("n = 2 over n = 1", unpacked(exact.work_claims), (WORK, ONCE), ({k: v * k[1] for k, v in WORK.items()}, ONCE)),
        ("capacity 4 over capacity 1", unpacked(exact.work_claims), (WORK, ONCE), (dict.fromkeys(WORK, 1.0), ONCE)),
        ("that n = 2 adds", unpacked(exact.work_claims), (WORK, ONCE), (WORK, {k: v * k[1] for k, v in ONCE.items()})),
        ("M14: ", unpacked(exact.equality_claim), (1e-6, True), (1e-6, False)),
        ("M2: mean squared", unpacked(trained.z_claims), (Z, Z), ({**Z, 1e-3: Z[0.0]}, Z)),
        ("M2: held-out nats", unpacked(trained.z_claims), (Z, Z), ({**Z, 1e-3: _values(2.5, z=1)}, Z)),
        ("M2: spread of the logits", unpacked(trained.z_claims), (Z, Z), (Z, {**Z, 1e-3: Z[0.0]})),
        ("M3: share of tokens", unpacked(trained.balance_claims), BALANCE, BALANCE[1:] * 2),
        ("M3: held-out nats", unpacked(trained.balance_claims), BALANCE, BALANCE[::-1]),
        ("M4: held-out nats fall", unpacked(trained.capacity_claims), (OWN, FALLING, TOP_ONE), (OWN, TOP_ONE, TOP_ONE)),
        ("M4: least gain", unpacked(trained.capacity_claims), (OWN, FALLING, TOP_ONE), (FALLING, FALLING, TOP_ONE)),
        ("M5: ", unpacked(trained.capacity_claims), (OWN, FALLING, TOP_ONE), (OWN, TOP_ONE, FALLING)),
        ("M8: ", trained.fine_tuning_claims, TUNED, {**TUNED, 0.75: _values(2.5, lost=0.35, training=2.0)}),
        ("M9: training nats", trained.part_claims, PARTS, {**PARTS, "sparse": _values(2.0, training=1.0)}),
        ("M9: held-out nats", trained.part_claims, PARTS, {**PARTS, "non-sparse": _values(2.5, training=2)}),
        ("M10: steps", unpacked(digit_patches.digit_claims), (STEPS, TOLD),
         ({**STEPS, ("sparse", 250): [400.0]}, TOLD)),
        ("M10: held-out", unpacked(digit_patches.digit_claims), (STEPS, TOLD),
         (STEPS, {**TOLD, ("sparse", 1437): [0.8]})),
        ("M13: ", trained.specialisation_claim, RATIOS, {**RATIOS, "letters": [1.0]}),
        ("some seeds diverge", trained.divergence_claim, "rate 0.03", ""),
    )
]  # fmt: skip

# TT-Rec.

AUCS = {"dense": np.full(3, 0.76)}
for _place, _rank in enumerate(tt_rec.RANKS):
    AUCS |= {f"rank {_rank}": np.full(3, 0.76 + _place / 1000), f"hashed, as rank {_rank}": np.full(3, 0.75)}
TIMES = {rank: 100 / rank for rank in tt_rec.RANKS}
RELEASED, EXACT, _, RECIPROCAL = tt_rec.ARMS
FROZEN = np.full(3, 0.70)
ARMS = {(arm, rate): np.full(3, 0.70 + (rate > tt_rec.CORE_RATES[0]) * 0.01 * (len(tt_rec.ARMS) - k) + 0.01 * (3 - k))
        for k, arm in enumerate(tt_rec.ARMS) for rate in tt_rec.CORE_RATES}  # fmt: skip
RISING, BEST = np.array([[0.7, 0.75, 0.8]] * 3), np.full(3, 0.82)
LEARNT, STILL = np.linspace(1.6, 0.55, 300), np.linspace(1.6, 0.6, 300)
LOSSES = {"replicated": [1.0], "by row": [1.0]}
SENT = {"replicated": 1000, places.TRAINS: 10}


def _quality(changes: dict[str, Any]) -> list[Claim]:
    return tt_rec.quality_claims("structured", {**AUCS, **changes}, TIMES)


def _arms(changes: dict[Any, Any]) -> list[Claim]:
    given = {**ARMS, **changes}
    return tt_rec.initialisation_claims(given, given.pop("frozen", FROZEN))


_TT_REC = [
    ("tt-rec", words, made, good, bad)
    for words, made, good, bad in (
        ("equal those of the table, float32", checks.equality_claims, {"float32": 1e-7}, {"float32": 1e-3}),
        ("equal those of the table, float64", checks.equality_claims, {"float64": 1e-16}, {"float64": 1e-7}),
        ("R2 ", unpacked(checks.compression_claim), ("K", 7, 8, 222.0, 221.9), ("K", 7, 8, 222.0, 200.0)),
        ("R3 kurtosis", unpacked(checks.entries_claims), (True, 0), (False, 0)),
        ("R3 Kolmogorov", unpacked(checks.entries_claims), (True, 0), (True, 0.1)),
        ("rank 8, ", _quality, {}, {"dense": np.full(3, 0.8)}),
        ("rank 22, ", _quality, {}, {"dense": np.full(3, 0.8)}),
        ("AUC rises with the rank", _quality, {}, {"rank 22": np.full(3, 0.75)}),
        ("better than hashing", _quality, {}, {"hashed, as rank 2": np.full(3, 0.77)}),
        ("R4 under SGD the released", _arms, {}, {(RELEASED, 0.5): FROZEN}),
        ("R4 under SGD the exact", _arms, {}, {(EXACT, 0.1): FROZEN}),
        ("R4 cores from N(0, 1/n)", _arms, {}, {(RECIPROCAL, 0.1): FROZEN + 0.01}),
        ("R4 learning cores", _arms, {}, {(RELEASED, 5.0): FROZEN}),
        ("R7 hit rates", unpacked(tt_rec.hit_claims), (0.01, 0.7), (0.1, 0.7)),
        ("R7 a cache", unpacked(tt_rec.hit_claims), (0.01, 0.7), (0.01, 0.3)),
        ("R8 ", tt_rec.cache_cost, np.full(3, 0.001), np.full(3, 0.01)),
        ("R9 cached lookups", unpacked(tt_rec.cache_claims), (0, 0), (1, 0)),
        ("R9 rows that stay", unpacked(tt_rec.cache_claims), (0, 0), (0, 1)),
        ("R10 ", unpacked(checks.timing_claims), ([4, 9], {8: 1, 16: 2}), ([2, 9], {8: 1, 16: 2})),
        ("R11 ", unpacked(checks.timing_claims), ([4, 9], {8: 1, 16: 2}), ([4, 9], {8: 1, 16: 5})),
        ("R12 ", unpacked(checks.pieces_claim), (7, 7), (6, 7)),
        ("R13 ", unpacked(tt_rec.best_claim), (RISING, BEST, 0.004), (RISING, BEST - 0.1, 0.004)),
        ("Tables in every place", unpacked(places.claims_of), (LOSSES, SENT), ({**LOSSES, "by row": [1.1]}, SENT)),
        ("send fewer bytes", unpacked(places.claims_of), (LOSSES, SENT), (LOSSES, {**SENT, places.TRAINS: 900})),
        ("MiB of tables", unpacked(tt_rec.mlperf_claims), (19, LEARNT, STILL), (900, LEARNT, STILL)),
        ("they train", unpacked(tt_rec.mlperf_claims), (19, LEARNT, STILL), (19, LEARNT, LEARNT)),
    )
]

CASES = [
    ClaimCase(*case)
    for several in (_LAYOUTS, _PLANNER, _FAMILIES, _MLPERF, _SMALL,
                    _STRAGGLERS, _SHUFFLE, _ADASUM, _LARS, _TILES, _AVAILABILITY,
                    _BATCH_EPOCHS, _PIPEMARE, _ST_MOE, _TT_REC)
    for case in several
]  # fmt: skip
