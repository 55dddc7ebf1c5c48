"""Adasum, which adds gradients that are orthogonal and averages those that are parallel: the operator and its rules.

Here are two plain forms of the whole combination; `ranks.py` and `devices.py` beside this file do it between ranks and
devices.

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
- Dots and squared lengths are summed in float64; JAX does without (`multipod.execute.adasum.devices`).
"""

import itertools
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from multipod.errors import PoisonedError, ScheduleError

LEAST = float(np.finfo(np.float64).tiny ** 0.5)
"""Squared lengths below it (1.5e-154) count as none: products with them may leave the range of float64. The square of
float32's smallest denormal is 2e-90, so this is about float64 vectors alone."""

LARGEST = 1e150
"""Float64 elements beyond it may count as infinite: their squares may be."""

CANCELLED = 2.0**-48
"""In the Gram form, squared lengths of this share of what went in are rounding errors, and count as none."""


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
        """A short text of the tensors, which ranks compare."""
        digest = zlib.crc32(repr((self.sizes, self.names)).encode())
        return f"{len(self.sizes)} tensors {digest:08x}"


# The operator.


def coefficients(dots: Any, left: Any, right: Any, xp: Any = np) -> tuple[Any, Any]:
    """Finds the factors of both vectors, [...] each.

    Args:
      dots: float64 [..., 3]: a.b, |a|^2 and |b|^2.
      left: m_a, the leaves under a.
      right: m_b.
      xp: NumPy, or the module of arrays that works like it (`torch`).
    """
    d = dots[..., 0]
    factors = []
    for squared, leaves in ((dots[..., 1], left), (dots[..., 2], right)):
        none = squared < LEAST
        factors.append(xp.where(none, 1.0, 1.0 - leaves / (left + right) * d / xp.where(none, 1.0, squared)))
    return factors[0], factors[1]


def adasum(a: np.ndarray, b: np.ndarray, left: int = 1, right: int = 1) -> np.ndarray:
    """The operator on two tensors in float64, as the formula says it."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    d, aa, bb = np.vdot(a, b), np.vdot(a, a), np.vdot(b, b)
    c_a, c_b = coefficients(np.array([[d, aa, bb]]), left, right)
    return c_a[0] * a + c_b[0] * b


# Two plain forms of the whole combination: what the engines are compared with, and what JAX computes.


def tree(vectors: Mapping[int, np.ndarray]) -> np.ndarray:
    """Combines single tensors in float64, over the binary tree of their numbers.

    Numbers that are missing are left out of the tree. All engines agree with it.
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
    weights = np.broadcast_to(np.eye(len(numbers)), gram.shape)
    # At least the length of what went into each node, in units in which `gram` are the nodes' dots.
    size = np.sqrt(np.maximum(np.einsum("lii->li", gram), 0))
    nodes, leaves = list(numbers), [1] * len(numbers)
    while len(nodes) > 1:
        squared = np.einsum("lii->li", gram)
        squared = np.where(squared <= CANCELLED * np.square(size), 0, squared)
        above: list[int] = []
        counts: list[int] = []
        joins = []
        factors = np.zeros((len(gram), len(nodes), len(nodes)))
        for place, (number, count) in enumerate(zip(nodes, leaves, strict=True)):
            row = len(above)
            if above and above[-1] == number // 2:
                joins.append((row - 1, place - 1, place, counts[-1], count))
                counts[-1] += count
            else:
                above.append(number // 2)
                counts.append(count)
                factors[:, row, place] = 1
        if joins:
            rows, left, right, *shares = np.array(joins).T
            dots = np.stack([gram[:, left, right], squared[:, left], squared[:, right]], -1)
            factors[:, rows, left], factors[:, rows, right] = coefficients(dots, *shares)
            factors = factors[:, : len(above)]
            gram, weights = factors @ gram @ factors.transpose(0, 2, 1), factors @ weights
            size = (np.abs(factors) @ size[:, :, None])[:, :, 0]
        nodes, leaves = above, counts
    return weights[:, 0]


def orthogonality(combined: np.ndarray, vectors: Iterable[np.ndarray], layers: Layers) -> np.ndarray:
    """|Adasum(g_1 .. g_p)|^2 / sum |g_i|^2 of each layer: 1 if all are orthogonal, 1/p if all are equal; 1 for zeros.

    Source: Maleki et al. 2021, arXiv:2006.02924, section 3.
    """
    together = sum(_squares(vector, layers) for vector in vectors)
    return np.where(together > 0, _squares(combined, layers) / np.where(together > 0, together, 1), 1.0)


def _squares(vector: np.ndarray, layers: Layers) -> np.ndarray:
    parts = (np.asarray(vector[begin:end], np.float64) for begin, end in itertools.pairwise(layers.ends))
    return np.array([part @ part for part in parts])


# What is not finite.


SKIP = "There is no result, and every rank knows: skip this update on all of them, or lower the rate or the loss scale."


def refuse_poisoned(who: str, flags: np.ndarray, names: Sequence[str], move: str = SKIP) -> None:
    """Refuses vectors with tensors that are not finite, by the tensors' names and the ranks.

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
