"""What batches of like lengths gain: measured steps of a small Transformer, and hosts that choose for themselves."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from multipod.data.batches import TrainBatches
from multipod.data.docstrings import Docstrings
from multipod.data.pairs import Pairs
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.pytrees import Batch
from multipod.recipe.recipe import Recipe
from multipod.recipes.stdlib_docs import stdlib_docs
from multipod.step.program import program_of
from multipod.step.state import State, Sums

BUCKETS = (32, 64, 128, 256)
BATCH, ROUNDS = 16, 7
HOSTS = (1, 2, 8, 64, 1024)
PAPER = "GNMT's global buckets, in Google's MLPerf v0.6 code (arXiv:1909.09756): up to 50 % faster"


def run(report: Callable[[str], None]) -> Outcome:
    """Times updates of every size, interleaved, and counts how often each size comes."""
    cases = {"one length": (BUCKETS[-1],), "packed rows": (), "buckets": BUCKETS}
    recipes = {name: _recipe(buckets) for name, buckets in cases.items()}
    times = _times_s(recipes, report)
    shares = _shares(recipes["buckets"])
    pairs = {"one length": BATCH, "buckets": BATCH, "packed rows": _pairs_of_a_packed_batch(recipes["packed rows"])}
    per_size = np.array([times["buckets", size] for size in range(len(BUCKETS))])
    update_s = {
        "one length": times["one length", 0],
        "packed rows": times["packed rows", 0],
        "buckets": float(shares @ per_size),
    }
    rate = {name: pairs[name] / update_s[name] for name in cases}
    slowest = {hosts: float(_slowest_of(shares, hosts) @ per_size) / update_s["buckets"] for hosts in HOSTS}
    claims = claims_of(rate["buckets"] / rate["one length"], slowest[HOSTS[-1]])
    return Outcome("Batches of like lengths", claims, _sections(update_s, rate, shares, per_size, slowest))


def claims_of(faster: float, slowest: float) -> tuple[Claim, ...]:
    """What the speed with buckets, and the update of many hosts over a global bucket's, say."""
    return (
        Claim(
            "pairs a second with buckets over batches of one length", PAPER, faster, "> 1.5", faster > 1.5,
            fails_if="short batches take as long as long ones, or few batches are short",
        ),
        Claim(
            f"an update of {HOSTS[-1]:,} hosts that choose their buckets themselves, over one with a global bucket",
            PAPER, slowest, ">= 1.5", slowest >= 1.5,
            fails_if="the longest bucket costs little more than the mean one: nobody waits for the slowest host",
        ),
    )  # fmt: skip


def _recipe(buckets: tuple[int, ...]) -> Recipe:
    base = stdlib_docs()
    data = Docstrings(source_length=BUCKETS[-1], buckets=buckets)
    return replace(base, data=data, batch=BATCH, layout=Layout((1, 1)), seed=0)


@dataclass
class _Timed:
    """A compiled update, the state it has come to, and a batch of each size."""

    update: Callable[[State, Batch, Any], tuple[State, Sums]]
    state: State
    go: Any
    batches: list[Batch]

    def seconds(self, size: int) -> float:
        """What one update takes."""
        start = time.perf_counter()
        self.state, sums = self.update(self.state, self.batches[size], self.go)
        jax.block_until_ready((self.state, sums))
        return time.perf_counter() - start


def _times_s(recipes: Mapping[str, Recipe], report: Callable[[str], None]) -> dict[tuple[str, int], float]:
    """The median time of an update of each size of each recipe, after one that is not counted."""
    runs = {}
    for name, recipe in recipes.items():
        report(f"{name}: compiling")
        program = program_of(recipe, make_mesh(recipe.layout))
        source = recipe.data.train()
        sizes = source.sizes() if isinstance(source, Pairs) else [source]
        rows = np.arange(BATCH)
        examples = [_that_fit(size) if isinstance(size, Pairs) else rows for size in sizes]
        batches = [
            program.place_batch(one.read(numbers), rows, BATCH) for one, numbers in zip(sizes, examples, strict=True)
        ]
        runs[name] = _Timed(program.compile_update(), program.init(), program.controls(), batches)
    taken: dict[tuple[str, int], list[float]] = {}
    for number in range(ROUNDS + 1):
        report(f"round {number} of {ROUNDS}")
        for name, timed in runs.items():
            for size in range(len(timed.batches)):
                taken.setdefault((name, size), []).append(timed.seconds(size))
    return {case: float(np.median(own[1:])) for case, own in taken.items()}


def _that_fit(source: Pairs) -> np.ndarray:
    """The first pairs that fit the source's size, a batch of them."""
    return np.flatnonzero(source.source.lengths <= source.chosen[0])[:BATCH]


def _shares(recipe: Recipe) -> np.ndarray:
    """How often a batch is of each size, over two epochs."""
    source = recipe.data.train()
    assert isinstance(source, Pairs)
    batches = TrainBatches(source, BATCH, recipe.seed, np.arange(BATCH))
    chosen = [source.sized_for(batches.numbers(k)).chosen for k in range(2 * len(source) // BATCH)]
    return np.array([chosen.count(bound) for bound in source.bounds]) / len(chosen)


def _pairs_of_a_packed_batch(recipe: Recipe) -> float:
    """How many pairs an update of packed rows has on average."""
    rows = recipe.data.train()
    segments = rows.read(np.arange(len(rows)))["target_segment"]
    return float(segments.max(1).mean()) * BATCH


def _slowest_of(shares: np.ndarray, hosts: int) -> np.ndarray:
    """How often the largest of the sizes that so many hosts draw is each."""
    up_to = np.cumsum(shares) ** hosts
    return np.diff(up_to, prepend=0)


def _sections(
    update_s: Mapping[str, float],
    rate: Mapping[str, float],
    shares: np.ndarray,
    per_size: np.ndarray,
    slowest: Mapping[int, float],
) -> tuple[Section, ...]:
    sizes = [
        (f"{length}", f"{share:.0%}", f"{seconds * 1e3:.0f}")
        for length, share, seconds in zip(BUCKETS, shares, per_size, strict=True)
    ]
    ways = [
        (name, f"{1e3 * update_s[name]:.0f}", f"{rate[name]:.0f}", f"{rate[name] / rate['one length']:.2f}")
        for name in rate
    ]
    hosts = [(f"{count:,}", f"{times:.2f}") for count, times in slowest.items()]
    return (
        Section(
            "What a batch costs",
            f"The recipe `stdlib-docs` (code to the first line of its docstring) with sources of up to {BUCKETS[-1]} "
            f"tokens, {BATCH} pairs or rows an update on one device; medians of {ROUNDS} updates of each kind, "
            "interleaved. Packed rows hold several pairs each, and are the better way where a model takes segments; "
            "recurrent models like GNMT do not.",
            ("way", "ms/update", "pairs/s", "of one length"),
            ways,
        ),
        Section(
            "The buckets",
            "How often a batch is of each length of its sources, and what it costs.",
            ("length", "batches", "ms/update"),
            sizes,
        ),
        Section(
            "Hosts that choose for themselves",
            "An update takes as long as the largest of the hosts' buckets, each drawn as often as above; over the mean "
            "of one bucket for all. The times are the measured ones, the hosts are not there.",
            ("hosts", "update, of a global bucket's"),
            hosts,
        ),
    )
