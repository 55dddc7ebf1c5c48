"""Adasum: adds gradients that are orthogonal, averages those that are parallel. The operator, two plain forms of the
whole combination, and the parts from which the NumPy, PyTorch and MPI engines run its schedules.

For two vectors a and b, each the combination of m_a and m_b ranks' vectors, tensor by tensor:

    adasum(a, b) = (1 - w_a d / |a|^2) a + (1 - w_b d / |b|^2) b,   d = a.b,  w_a = m_a / (m_a + m_b),  w_b = 1 - w_a

With m_a = m_b this is Maleki et al. 2021, arXiv:2006.02924. The weights are ours: with them p parallel vectors give
their mean and p orthogonal ones their sum for every p, not for powers of two alone. It commutes, it scales with its
arguments, and it is not associative: the tree is part of the result (`multipod.collectives.adasum.halving`).

Rules for what is special, the same in all engines:

- A vector of no length has the coefficient 1: adasum(a, 0) = a. So has one whose squared length is below `LEAST`.
- A tensor that is not finite on some rank is combined nowhere: every rank raises `PoisonedError`, which names the
  tensor and the rank. A compiled JAX program cannot raise; there the tensor becomes NaN on every device, and the report
  says which it was.
- Dots and squared lengths are summed in float64; JAX does without (`multipod.execute.adasum_jax`).
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple, Protocol

import numpy as np

from multipod.collectives.adasum import combinations, dot_sums, group_sum, split
from multipod.collectives.schedule import Schedule
from multipod.errors import PoisonedError, ScheduleError
from multipod.execute.adasum_native import Functions, functions

LEAST = float(np.finfo(np.float64).tiny ** 0.5)
"""Squared lengths below it (1.5e-154) count as none: products with them may leave the range of float64. The square of
float32's smallest denormal is 2e-90, so this is about float64 vectors alone."""

LARGEST = 1e150
"""Float64 elements beyond it may count as infinite: their squares may be."""

CANCELLED = 2.0**-48
"""In the Gram form, squared lengths of this share of what went in are rounding errors, and count as none."""

CHUNK = 1 << 15
"""Elements that are made float64 at a time: 256 KiB, so that they stay in a core's cache."""


@dataclass(frozen=True)
class Layers:
    """Where the tensors ("layers") lie in a flat vector: one after the other, in this order.

    Attributes:
      sizes: elements of each.
      names: of each, for messages; `tensor 0`, `tensor 1`, ... if empty.

    Raises:
      ScheduleError: not one name for each, or a size below zero.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = self.names or tuple(f"tensor {k}" for k in range(len(self.sizes)))
        object.__setattr__(self, "names", names)
        if len(names) != len(self.sizes) or any(size < 0 for size in self.sizes):
            raise ScheduleError(
                f"adasum: {len(names)} names for {len(self.sizes)} tensors of {self.sizes[:8]} elements. "
                "Give one size of 0 or more, and one name, for each tensor."
            )

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """Where each begins, and the last ends."""
        return (0, *itertools.accumulate(self.sizes))

    def cut(self, begin: int, end: int) -> list[tuple[int, int, int]]:
        """(layer, from, to) of each layer's part of the elements `begin` to `end` - 1; empty parts are left out."""
        first = int(np.searchsorted(self.ends, begin, side="right")) - 1
        parts = []
        while begin < end and first < len(self.sizes):
            stop = min(end, self.ends[first + 1])
            if begin < stop:
                parts.append((first, begin, stop))
            begin, first = stop, first + 1
        return parts

    def check(self, elements: int) -> None:
        """Refuses layers that do not make up a vector of so many elements.

        Raises:
          ScheduleError: they do not.
        """
        if self.ends[-1] != elements:
            raise ScheduleError(
                f"adasum: {len(self.sizes)} tensors have {self.ends[-1]} elements together, and the vector has "
                f"{elements}. Give the sizes of all tensors in the order in which they lie in it."
            )

    @property
    def listing(self) -> list[str]:
        """The tensors one by one, as `head [37]`."""
        return [f"{name} [{size}]" for name, size in zip(self.names, self.sizes, strict=True)]

    @cached_property
    def text(self) -> str:
        """What ranks compare."""
        digest = zlib.crc32(repr((self.sizes, self.names)).encode())
        return f"{len(self.sizes)} tensors {digest:08x}"


# The operator.


def coefficients(dots: Any, left: int, right: int, xp: Any = np) -> tuple[Any, Any]:
    """The factors of both vectors, [layers] each.

    Args:
      dots: float64 [layers, 3]: a.b, |a|^2 and |b|^2.
      left: m_a, the leaves under a.
      right: m_b.
      xp: NumPy, or the module of arrays that works like it (`torch`).
    """
    d = dots[:, 0]
    found = []
    for squared, leaves in ((dots[:, 1], left), (dots[:, 2], right)):
        none = squared < LEAST
        found.append(xp.where(none, 1.0, 1.0 - leaves / (left + right) * d / xp.where(none, 1.0, squared)))
    return found[0], found[1]


def adasum(a: np.ndarray, b: np.ndarray, left: int = 1, right: int = 1) -> np.ndarray:
    """The operator on two tensors in float64, as the formula says it."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    d, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    c_a, c_b = coefficients(np.array([[d, aa, bb]]), left, right)
    return c_a[0] * a + c_b[0] * b


# Two plain forms of the whole combination: what the engines are compared with, and what JAX computes.


def tree(vectors: Mapping[int, np.ndarray]) -> np.ndarray:
    """Adasum of single tensors in float64, over the binary tree of their numbers; numbers that are missing are left
    out of it. All engines agree with it.
    """
    nodes = {number: (np.asarray(vector, np.float64), 1) for number, vector in sorted(vectors.items())}
    while len(nodes) > 1:
        above: dict[int, tuple[np.ndarray, int]] = {}
        for number, (vector, leaves) in nodes.items():
            if number // 2 in above:
                other, others = above[number // 2]
                vector, leaves = adasum(other, vector, others, leaves), others + leaves
            above[number // 2] = vector, leaves
        nodes = above
    return next(iter(nodes.values()))[0]


def gram_weights(gram: np.ndarray, numbers: Sequence[int]) -> np.ndarray:
    """float64 [layers, p]: Adasum of g_1 ... g_p is sum_i w_i g_i, with weights that depend on their dots alone.

    So one sum of p x p dots a layer replaces log2 p exchanges that wait for each other. Dots of combined vectors
    follow from those of their parts; where parts cancel, digits are lost (`CANCELLED`).

    Args:
      gram: float64 [layers, p, p], the dots of all pairs.
      numbers: of the leaves, rising.
    """
    layers = len(gram)
    nodes = [(number, np.eye(len(numbers))[k][None].repeat(layers, 0), 1) for k, number in enumerate(numbers)]
    largest = np.sqrt(np.maximum(np.einsum("lii->li", gram), 0))
    while len(nodes) > 1:
        above: list[tuple[int, np.ndarray, int]] = []
        for number, weights, leaves in nodes:
            if above and above[-1][0] == number // 2:
                _, other, others = above.pop()
                dots = np.stack(
                    [
                        np.einsum("li,lij,lj->l", x, gram, y)
                        for x, y in ((other, weights), (other, other), (weights, weights))
                    ],
                    axis=1,
                )
                for column, one in ((1, other), (2, weights)):
                    went_in = np.square((np.abs(one) * largest).sum(1))
                    dots[:, column] = np.where(dots[:, column] <= CANCELLED * went_in, 0, dots[:, column])
                c_a, c_b = coefficients(dots, others, leaves)
                weights, leaves = c_a[:, None] * other + c_b[:, None] * weights, others + leaves
            above.append((number // 2, weights, leaves))
        nodes = above
    return nodes[0][1]


def orthogonality(combined: np.ndarray, vectors: Iterable[np.ndarray], layers: Layers) -> np.ndarray:
    """|Adasum(g_1 .. g_p)|^2 / sum |g_i|^2 of each layer: 1 if all are orthogonal, 1/p if all are equal; 1 for zeros.

    Source: Maleki et al. 2021, arXiv:2006.02924, section 3.
    """
    together = sum(_squares(vector, layers) for vector in vectors)
    return np.where(together > 0, _squares(combined, layers) / np.where(together > 0, together, 1), 1.0)


def _squares(vector: np.ndarray, layers: Layers) -> np.ndarray:
    parts = (np.asarray(vector[begin:end], np.float64) for begin, end in itertools.pairwise(layers.ends))
    return np.array([part @ part for part in parts])


# What engines that pass messages are made of.


class Engine(Protocol):
    """What a transport brings to `follow`."""

    def exchange(self, vector: Any, sends: Sequence["Span"], receives: Sequence["Span"]) -> list[Any]:
        """Sends spans of the vector, and returns what arrived for `receives`, when all is done."""
        ...

    def run(self, vector: Any, schedule: Schedule) -> None:
        """Does this rank's part of a schedule of sums and copies, in place."""
        ...


def follow(engine: Engine, math: "Arithmetic", vector: Any, schedule: Schedule, rank: int, layers: Layers) -> None:
    """One rank's part of a schedule that combines, in place.

    Raises:
      PoisonedError: on all ranks, if a tensor of any is not finite; the vector is then of no use.
    """
    layers.check(len(vector))
    # The first combination tells whether this rank's tensors are finite, if its vector is its own until then.
    flags = None if begins_alone(schedule, rank) else broken(math, vector, layers)
    good = True
    for number, steps in split(schedule):
        if steps is not None:
            engine.run(vector, steps)
            continue
        part = meeting(schedule, number, rank, len(vector))
        arrived = engine.exchange(vector, part.sends, part.receives) if part else []
        dots = local_dots(math, vector, part, arrived, layers)
        adder = dot_sums(schedule)[number]
        if adder is not None:
            engine.run(dots, adder)
        if flags is None and part is not None:
            flags = ~np.isfinite(math.numbers(dots).reshape(-1, 3)[:, 1 if part.left else 2])
        # What is not finite on one rank makes the dots of all combinations that it is part of infinite or NaN.
        good = apply(math, vector, part, arrived, layers, dots)
    assert flags is not None
    if len(schedule.topology.chips) == 1:
        refuse_poisoned(str(schedule), flags[None], layers.names)
    elif not good:
        ranks = len(schedule.topology.chips)
        told = math.zeros(vector, ranks * len(flags))
        for layer in np.flatnonzero(flags).tolist():
            told[rank * len(flags) + layer] = 1
        engine.run(told, flag_sum(schedule))
        refuse_poisoned(f"{schedule} on rank {rank}", math.numbers(told).reshape(ranks, -1), layers.names)


@lru_cache(maxsize=256)
def begins_alone(schedule: Schedule, rank: int) -> bool:
    """Whether the first combination of `rank` has its own vector alone on one side."""
    for step in combinations(schedule):
        for one in step:
            if rank in one.members:
                return one.left == (rank,) or one.right == (rank,)
    return False


@lru_cache(maxsize=64)
def flag_sum(schedule: Schedule) -> Schedule:
    """A sum over all ranks of a vector that is short."""
    return Schedule("all-reduce", "flags", schedule.topology, 1, np.arange(2), group_sum(schedule.topology.chips))


class Span(NamedTuple):
    """Elements `begin` to `end` - 1, that travel from or to rank `peer`."""

    peer: int
    begin: int
    end: int


class Meeting(NamedTuple):
    """What one rank does in a step that combines. `left`: its own vector is the left one."""

    sends: tuple[Span, ...]
    receives: tuple[Span, ...]
    left: bool
    own: int
    others: int


@lru_cache(maxsize=256)
def meeting(schedule: Schedule, number: int, rank: int, count: int) -> Meeting | None:
    """The part of `rank` in step `number` on a vector of `count` elements; None if it has none."""
    mine = next((one for one in combinations(schedule)[number] if rank in one.left or rank in one.right), None)
    if mine is None:
        return None
    step, places, ranks = schedule.steps[number], schedule.elements(count), schedule.topology.rank
    chip = schedule.topology.chips[rank]

    def spans(ours: np.ndarray, theirs: np.ndarray) -> tuple[Span, ...]:
        joined: list[Span] = []
        for k in np.flatnonzero(ours == chip).tolist():
            span = Span(ranks[int(theirs[k])], int(places[step.first[k]]), int(places[step.stop[k]]))
            if span.begin < span.end:
                joined.append(span)
        return tuple(sorted(joined))

    left = rank in mine.left
    sizes = len(mine.left), len(mine.right)
    return Meeting(spans(step.src, step.dst), spans(step.dst, step.src), left, *(sizes if left else sizes[::-1]))


class Arithmetic:
    """What the combination asks of arrays: here those of NumPy; `execute.torch` has that of tensors.

    Args:
      native: take the functions in C (`adasum_native`) where they are to be had.
    """

    xp: Any = np

    def __init__(self, native: bool = True) -> None:
        self._native = native

    def zeros(self, like: Any, length: int) -> Any:
        """Float64 zeros, where `like` is."""
        return np.zeros(length)

    def products(self, a: Any, b: Any) -> Any:
        """float64 [3]: a.b, a.a, b.b."""
        fast = self._fast(a, b)
        if fast is not None:
            return fast.products(a, b)
        total = np.zeros(3)
        for begin in range(0, len(a), CHUNK):
            x, y = (one[begin : begin + CHUNK].astype(np.float64) for one in (a, b))
            total += x @ y, x @ x, y @ y
        return total

    def blend(self, mine: Any, theirs: Any, own: Any, other: Any) -> None:
        """mine = own * mine + other * theirs in place, in float64, rounded once: the two may nearly cancel."""
        fast = self._fast(mine, theirs)
        if fast is not None:
            fast.blend(mine, theirs, own, other)
            return
        for begin in range(0, len(mine), CHUNK):
            part = slice(begin, begin + CHUNK)
            mine[part] = own * mine[part].astype(np.float64) + other * theirs[part].astype(np.float64)

    def finite(self, vector: Any) -> bool:
        """Whether all elements are finite, and can be squared."""
        fast = self._fast(vector)
        if fast is not None:
            return fast.within(vector, LARGEST if vector.dtype.itemsize == 8 else float(np.finfo(vector.dtype).max))
        total = float(np.add.reduce(vector, dtype=np.result_type(vector.dtype, np.float32)))
        if vector.dtype.itemsize < 8 and np.isfinite(total):
            return True
        return bool((np.abs(vector.astype(np.float64)) <= LARGEST).all())

    def numbers(self, values: Any) -> np.ndarray:
        """As a NumPy array."""
        return np.asarray(values)

    def _fast(self, *arrays: np.ndarray) -> Functions | None:
        """The functions in C, if they take these arrays."""
        if not self._native or any(a.dtype != arrays[0].dtype or not a.flags.c_contiguous for a in arrays):
            return None
        return functions(arrays[0].dtype)


def local_dots(math: Arithmetic, vector: Any, part: Meeting | None, arrived: Sequence[Any], layers: Layers) -> Any:
    """float64 [3 layers]: this rank's part of the dots of a step, to be added over the members of its combination.

    Args:
      math: of the arrays.
      vector: of this rank.
      part: of this rank; without one all are zero.
      arrived: one array for each of `part.receives`.
      layers: of the vector.
    """
    dots = math.zeros(vector, 3 * len(layers.sizes))
    for span, theirs in zip(part.receives if part else (), arrived, strict=True):
        for layer, begin, end in layers.cut(span.begin, span.end):
            mine, other = vector[begin:end], theirs[begin - span.begin : end - span.begin]
            pair = (mine, other) if part and part.left else (other, mine)
            dots[3 * layer : 3 * layer + 3] += math.products(*pair)
    return dots


def apply(
    math: Arithmetic, vector: Any, part: Meeting | None, arrived: Sequence[Any], layers: Layers, dots: Any
) -> bool:
    """Combines what arrived into `vector`, given the sums of dots; whether all of these are finite."""
    if part is None:
        return True
    dots = dots.reshape(-1, 3)
    leaves = (part.own, part.others) if part.left else (part.others, part.own)
    c_own, c_other = coefficients(dots, *leaves, math.xp)[:: 1 if part.left else -1]
    for span, theirs in zip(part.receives, arrived, strict=True):
        for layer, begin, end in layers.cut(span.begin, span.end):
            other = theirs[begin - span.begin : end - span.begin]
            math.blend(vector[begin:end], other, c_own[layer], c_other[layer])
    return bool(np.isfinite(math.numbers(dots)).all())


def broken(math: Arithmetic, vector: Any, layers: Layers) -> np.ndarray:
    """float64 [layers]: 1 where the tensor is not finite on this rank."""
    return np.array([0.0 if math.finite(vector[begin:end]) else 1.0 for begin, end in itertools.pairwise(layers.ends)])


SKIP = "There is no result, and every rank knows: skip this update on all of them, or lower the rate or the loss scale."


def refuse_poisoned(who: str, flags: np.ndarray, names: Sequence[str], move: str = SKIP) -> None:
    """Raises what every rank must hear.

    Args:
      who: for the message.
      flags: [ranks, layers]: not zero where the tensor is not finite.
      names: of the layers.
      move: what to do next.

    Raises:
      PoisonedError: if there are any.
    """
    bad = np.flatnonzero(np.asarray(flags).any(axis=0)).tolist()
    if not bad:
        return
    where = []
    for layer in bad[:8]:
        ranks = np.flatnonzero(flags[:, layer]).tolist()
        where.append(f"{names[layer]} on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}")
    more = f" and {len(bad) - 8} more tensors" if len(bad) > 8 else ""
    raise PoisonedError(f"{who}: not finite: {'; '.join(where)}{more}. {move}")


def lockstep(
    schedule: Schedule,
    number: int,
    held: dict[int, np.ndarray],
    layers: Layers,
    run: Callable[[Schedule, dict[int, np.ndarray]], dict[int, np.ndarray]],
) -> None:
    """Step `number`, which combines, for all chips at once, in place on `held`; `run` adds the dots by a schedule."""
    math, chips = Arithmetic(), schedule.topology.chips
    count = len(held[chips[0]])
    parts = {chip: meeting(schedule, number, rank, count) for rank, chip in enumerate(chips)}
    arrived = {
        chip: [held[chips[span.peer]][span.begin : span.end].copy() for span in part.receives] if part else []
        for chip, part in parts.items()
    }
    dots = {chip: local_dots(math, held[chip], parts[chip], arrived[chip], layers) for chip in chips}
    adder = dot_sums(schedule)[number]
    sums = dots if adder is None else run(adder, dots)
    for chip in chips:
        apply(math, held[chip], parts[chip], arrived[chip], layers, sums[chip])
