"""CPU time and memory of the exact area under the ROC curve: ours, scikit-learn and a bare sort, in one run.

    python benchmarks/auc.py [--examples 10] [--rounds 5] [--large 90] [--json FILE]

Every round takes all ways in turn, in an order that turns from round to round; ratios are taken within a round. CPU
time is summed over threads. Memory is the growth of the resident set at its peak, of a process of its own for each way.
A way counts only if it differs from scikit-learn by 1e-15 at most.
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import machine
import memory
import numpy as np
from sklearn.metrics import roc_auc_score

from multipod.metrics import auc
from multipod.metrics.ranking import area, merge_scores, pack_scores

CPU_S, BYTES, SPEEDUP = 0.25, 12, 15
GOAL_MILLIONS = 10
RANKS = 8
PIECE = 1 << 16
COPY, SORT, OURS, MERGED, SKLEARN = (
    "copy of the scores",
    "np.sort alone",
    "ours",
    f"ours, {RANKS} ranks",
    "scikit-learn",
)
SAMPLES = {
    "probabilities": lambda logits: 1 / (1 + np.exp(-logits)),
    "logits": lambda logits: logits,
    "thousand values": lambda logits: np.round(1 / (1 + np.exp(-logits)), 3),
}

Way = Callable[[np.ndarray, np.ndarray], float | None]


def over_ranks(labels: np.ndarray, scores: np.ndarray) -> float:
    """Packed rank by rank, then merged, in one process: the work, without the network."""
    cuts = zip(np.array_split(labels, RANKS), np.array_split(scores, RANKS), strict=True)
    return area(merge_scores([pack_scores(*cut) for cut in cuts]))


def copy(labels: np.ndarray, scores: np.ndarray) -> None:
    scores.copy()


def sort(labels: np.ndarray, scores: np.ndarray) -> None:
    np.sort(scores)


WAYS: dict[str, Way] = {COPY: copy, SORT: sort, OURS: auc, MERGED: over_ranks, SKLEARN: roc_auc_score}


def sample(kind: str, examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels, a quarter of them true, and float32 scores; made in pieces, so that memory has no peak here."""
    labels, scores = np.empty(examples, bool), np.empty(examples, np.float32)
    for start in range(0, examples, PIECE):
        rng = np.random.default_rng([examples, start])
        label = rng.random(min(PIECE, examples - start)) < 0.25
        logits = rng.standard_normal(len(label), np.float32) + label
        labels[start : start + PIECE], scores[start : start + PIECE] = label, SAMPLES[kind](logits)
    return labels, scores


def extra_bytes(way: str, kind: str, examples: int) -> float:
    """By how much one call grows the resident set at its peak, a score. To be run in a fresh process."""
    labels, scores = sample(kind, examples)
    WAYS[way](labels[:PIECE], scores[:PIECE])  # imports, buffers of libraries
    before = memory.resident_mb()
    WAYS[way](labels, scores)
    return max(0, memory.peak_mb() - before) * 2**20 / examples


def alone(function: Callable[..., float], *arguments: object) -> float:
    """What a function returns in a fresh process."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)


def measure(kind: str, examples: int, rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each way in each round; one round more than asked for is run, and left out."""
    labels, scores = sample(kind, examples)
    right = roc_auc_score(labels, scores)
    names = list(WAYS)
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            if turn == 0 and name == SKLEARN:
                continue  # `right` has warmed it
            start = time.process_time()
            value = WAYS[name](labels, scores)
            spent = time.process_time() - start
            if value is not None and abs(value - right) > 1e-15:
                raise SystemExit(f"{name}: {value!r}, and scikit-learn says {right!r}.")
            if turn:
                taken[name].append(spent)
    return taken


def ratios(slow: list[float], fast: list[float]) -> list[float]:
    """Quartiles of the ratios within each round."""
    return statistics.quantiles([a / b for a, b in zip(slow, fast, strict=True)], n=4)


def rows(taken: dict[str, list[float]], growth: dict[str, float], examples: int) -> list[list[str]]:
    lines = []
    for name, spent in taken.items():
        low, middle, high = ratios(taken[SKLEARN], spent)
        of_sort = ratios(spent, taken[SORT])[1]
        median = statistics.median(spent)
        times = [f"{median:.3f}", f"{1e9 * median / examples:.1f}", f"{middle:.1f}", f"{low:.1f} to {high:.1f}"]
        lines.append([name, *times, f"{of_sort:.2f}", f"{growth[name]:.1f}"])
    return lines


def goals(taken: dict[str, list[float]], growth: dict[str, float], examples: int) -> tuple[str, bool]:
    """What came of the goals, which are those for ten million scores."""
    cpu_s = statistics.median(taken[OURS]) * GOAL_MILLIONS * 1e6 / examples
    speedup = ratios(taken[SKLEARN], taken[OURS])[1]
    good = [cpu_s <= CPU_S, growth[OURS] <= BYTES, speedup >= SPEEDUP]
    word = {True: "reached", False: "MISSED"}
    text = (
        f"Ours on {GOAL_MILLIONS} M: {cpu_s:.3f} CPU s (at most {CPU_S}: {word[good[0]]}), {growth[OURS]:.1f} bytes a "
        f"score (at most {BYTES}: {word[good[1]]}), {speedup:.1f} times as fast as scikit-learn (at least {SPEEDUP}: "
        f"{word[good[2]]})."
    )
    return text, all(good)


def large(examples: int) -> dict[str, float]:
    """One evaluation of as many scores as a large click log has."""
    labels, scores = sample("probabilities", examples)
    start = time.process_time()
    auc(labels, scores)
    return {"cpu_s": time.process_time() - start, "extra_bytes": alone(extra_bytes, OURS, "probabilities", examples)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=float, default=GOAL_MILLIONS, help="millions of scores")
    parser.add_argument("--rounds", type=int, default=5, help="at least 5 for a figure to quote")
    parser.add_argument("--samples", nargs="+", choices=list(SAMPLES), default=list(SAMPLES))
    parser.add_argument("--large", type=float, default=90, help="millions of scores for one run of ours; 0: none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times there")
    options = parser.parse_args()
    began = machine.facts()
    print(machine.headline(began), flush=True)
    examples, written, reached = round(1e6 * options.examples), [], True
    for kind in options.samples:
        taken = measure(kind, examples, options.rounds)
        growth = {name: alone(extra_bytes, name, kind, examples) for name in WAYS}
        head = [
            f"{options.examples:g} M, {kind}",
            "CPU s",
            "ns a score",
            "x scikit-learn",
            "quartiles",
            "of a bare sort",
        ]
        print(f"\n{machine.table([*head, 'extra bytes a score'], rows(taken, growth, examples))}\n")
        text, good = goals(taken, growth, examples)
        print(f"{text} Load average: {machine.facts()['load']}", flush=True)
        reached &= good
        written.append({"sample": kind, "examples": examples, "cpu_s": taken, "extra_bytes": growth})
    if options.large:
        result = large(round(1e6 * options.large))
        gib = result["extra_bytes"] * options.large * 1e6 / 2**30
        print(f"\n{options.large:g} M probabilities: {result['cpu_s']:.2f} CPU s, {gib:.2f} GiB beside the scores.")
        written.append({"large": options.large, **result})
    if options.json:
        options.json.write_text(json.dumps({"machine": began, "results": written}, indent=1))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
