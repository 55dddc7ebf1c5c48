"""The arithmetic of Adasum on the arrays of ranks: dots, blends and mixes in float64, passing over memory in pieces."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from multipod.execute.adasum.native import NativeFunctions, load_functions
from multipod.execute.adasum.operator import LARGEST, Layers

CHUNK = 1 << 15
"""Elements that are made float64 at a time: 256 KiB, so that they stay in a core's cache."""


class Arithmetic:
    """What the combination asks of arrays: here those of NumPy; `engines/torch.py` has a form for tensors.

    Args:
      native: take the functions in C (`native.py`) where they are to be had.
    """

    xp: Any = np

    def __init__(self, native: bool = True) -> None:
        self._native = native

    def itemsize(self, vector: Any) -> int:
        """Bytes of an element."""
        return int(vector.itemsize)

    def zeros(self, like: Any, length: int) -> Any:
        """Float64 zeros, where `like` is."""
        return np.zeros(length)

    def add_dots(self, dots: Any, mine: Any, theirs: Any, cuts: np.ndarray, left: bool) -> None:
        """Adds a.b, a.a, b.b of each part to float64 dots [3 tensors]; a is `mine` where `left`, else `theirs`."""
        a, b = (mine, theirs) if left else (theirs, mine)
        fast = self._fast(a, b)
        if fast is not None:
            fast.dots(a, b, cuts, dots)
            return
        for layer, begin, end in cuts.tolist():
            for x, y in self._chunks(a[begin:end], b[begin:end]):
                dots[3 * layer : 3 * layer + 3] += self._stacked([x @ y, x @ x, y @ y])

    def blend(self, mine: Any, theirs: Any, cuts: np.ndarray, own: Any, other: Any) -> None:
        """mine = own * mine + other * theirs in place, in float64, rounded once: the two may nearly cancel."""
        fast = self._fast(mine, theirs)
        if fast is not None:
            fast.blend(mine, theirs, cuts, own, other)
            return
        for layer, begin, end in cuts.tolist():
            for part in self._slices(mine, begin, end):
                mine[part] = own[layer] * self._wide(mine[part]) + other[layer] * self._wide(theirs[part])

    def add_gram(self, gram: Any, rows: Sequence[Any], cuts: np.ndarray) -> None:
        """Adds the dots of all pairs of p arrays to float64 gram [tensors p p]."""
        fast = self._fast(*rows)
        if fast is not None:
            fast.gram(rows, cuts, gram)
            return
        p = len(rows)
        for layer, begin, end in cuts.tolist():
            for wide in self._chunks(*(row[begin:end] for row in rows)):
                matrix = self._stacked(wide)
                gram[p * p * layer : p * p * (layer + 1)] += (matrix @ matrix.T).reshape(-1)

    def mix(self, out: Any, rows: Sequence[Any], cuts: np.ndarray, weights: np.ndarray) -> None:
        """out = sum_r weights[tensor, r] rows[r], in float64, rounded once; `out` may be one of the rows."""
        fast = self._fast(out, *rows)
        if fast is not None:
            fast.mix(out, rows, cuts, np.ascontiguousarray(weights))
            return
        for layer, begin, end in cuts.tolist():
            for part in self._slices(out, begin, end):
                out[part] = sum(float(w) * self._wide(row[part]) for w, row in zip(weights[layer], rows, strict=True))

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
        """Converts values to a NumPy array."""
        return np.asarray(values)

    def _wide(self, part: Any) -> Any:
        return part.astype(np.float64)

    def _stacked(self, parts: Sequence[Any]) -> Any:
        return np.stack(parts)

    def _chunks(self, *arrays: Any) -> Iterable[list[Any]]:
        """Yields the arrays in float64, `CHUNK` elements at a time."""
        for part in self._slices(arrays[0], 0, len(arrays[0])):
            yield [self._wide(array[part]) for array in arrays]

    def _slices(self, like: Any, begin: int, end: int) -> list[slice]:
        """Slices from `begin` to `end`, `CHUNK` elements at a time."""
        return [slice(low, min(low + CHUNK, end)) for low in range(begin, end, CHUNK)]

    def _fast(self, *arrays: np.ndarray) -> NativeFunctions | None:
        """The functions in C, if they take these arrays."""
        if not self._native or any(a.dtype != arrays[0].dtype or not a.flags.c_contiguous for a in arrays):
            return None
        return load_functions(arrays[0].dtype)


def flag_broken(math: Arithmetic, vector: Any, layers: Layers) -> np.ndarray:
    """Returns float64 [layers]: 1 where the tensor is not finite on this rank."""
    return np.array([0.0 if math.finite(vector[begin:end]) else 1.0 for begin, end in itertools.pairwise(layers.ends)])
