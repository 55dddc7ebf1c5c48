"""The arithmetic of Adasum in C, on NumPy arrays: passes at the speed of memory. `adasum.c` beside this file."""

import ctypes
import platform
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multipod.errors import NativeError
from multipod.native import library

SOURCE = Path(__file__).with_name("adasum.c")
FLAGS = ("-O3", "-march=native", "-std=c11", "-fopenmp-simd", "-fno-trapping-math")
WIDE = ("-mprefer-vector-width=512",)
"""Compilers shun x86's longest vectors; these loops are a third faster with them (Xeon with AVX-512, 2026-11-21)."""

DTYPES = {np.dtype(np.float32): ("float32", ctypes.c_float), np.dtype(np.float64): ("float64", ctypes.c_double)}


class NativeFunctions(NamedTuple):
    """Functions on flat contiguous arrays of one dtype; they do not hold Python's lock.

    `cuts` is int64 [parts, 3]: tensor, from, to, counted from the beginning of the arrays; all results are by tensor.

    Attributes:
      dots: (a, b, cuts, dots): adds a.b, a.a, b.b to float64 dots [tensors, 3].
      blend: (mine, theirs, cuts, own, other): mine = own mine + other theirs in float64, rounded once; own and other
        are float64 [tensors].
      gram: (rows, cuts, gram): adds the dots of all pairs of p arrays to float64 gram [tensors, p, p].
      mix: (out, rows, cuts, weights): out = sum_r weights[tensor, r] rows[r], likewise; `out` may be one of them.
      within: (vector, most): whether no element is larger than `most`, or NaN.
    """

    dots: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
    blend: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray], None]
    gram: Callable[[Sequence[np.ndarray], np.ndarray, np.ndarray], None]
    mix: Callable[[np.ndarray, Sequence[np.ndarray], np.ndarray, np.ndarray], None]
    within: Callable[[np.ndarray, float], bool]


@lru_cache(maxsize=8)
def load_functions(dtype: np.dtype) -> NativeFunctions | None:
    """Loads the functions for float32 or float64 arrays; None if there is no compiler, or for another dtype."""
    loaded = _library() if dtype in DTYPES else None
    if loaded is None:
        return None
    name, real = DTYPES[dtype]
    pointer, length = ctypes.c_void_p, ctypes.c_int64
    signatures = {
        "dots": ([pointer, pointer, length, pointer, pointer], None),
        "blends": ([pointer, pointer, length, pointer, pointer, pointer], None),
        "gram": ([pointer, length, length, pointer, pointer], None),
        "mix": ([pointer, pointer, length, length, pointer, pointer], None),
        "within": ([pointer, length, real], ctypes.c_int),
    }
    typed = []
    for stem, (arguments, result) in signatures.items():
        function = getattr(loaded, f"{stem}_{name}")
        function.argtypes, function.restype = arguments, result
        typed.append(function)
    dots, blend, gram, mix, within = typed
    return NativeFunctions(
        partial(_dots, dots), partial(_blend, blend), partial(_gram, gram), partial(_mix, mix), partial(_within, within)
    )


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    for flags in ((*FLAGS, *WIDE), FLAGS) if platform.machine() == "x86_64" else (FLAGS,):
        try:
            return ctypes.CDLL(str(library("multipod-adasum", [SOURCE], flags=flags)))
        except (NativeError, OSError):
            continue
    return None


def _dots(function: Any, a: np.ndarray, b: np.ndarray, cuts: np.ndarray, dots: np.ndarray) -> None:
    function(a.ctypes.data, b.ctypes.data, len(cuts), cuts.ctypes.data, dots.ctypes.data)


def _blend(
    function: Any, mine: np.ndarray, theirs: np.ndarray, cuts: np.ndarray, own: np.ndarray, other: np.ndarray
) -> None:
    places = cuts.ctypes.data, own.ctypes.data, other.ctypes.data
    function(mine.ctypes.data, theirs.ctypes.data, len(cuts), *places)


def _gram(function: Any, rows: Sequence[np.ndarray], cuts: np.ndarray, gram: np.ndarray) -> None:
    places = np.array([row.ctypes.data for row in rows], np.uintp)
    function(places.ctypes.data, len(rows), len(cuts), cuts.ctypes.data, gram.ctypes.data)


def _mix(function: Any, out: np.ndarray, rows: Sequence[np.ndarray], cuts: np.ndarray, weights: np.ndarray) -> None:
    places = np.array([row.ctypes.data for row in rows], np.uintp)
    function(out.ctypes.data, places.ctypes.data, len(rows), len(cuts), cuts.ctypes.data, weights.ctypes.data)


def _within(function: Any, vector: np.ndarray, most: float) -> bool:
    return bool(function(vector.ctypes.data, len(vector), most))
