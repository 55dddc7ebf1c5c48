"""The arithmetic of Adasum in C, on NumPy arrays: three passes at the speed of memory. `adasum.c` beside this file."""

import ctypes
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from multipod.errors import NativeError
from multipod.native import library

SOURCE = Path(__file__).with_name("adasum.c")
FLAGS = ("-O3", "-march=native", "-std=c11", "-fopenmp-simd", "-fno-trapping-math")
DTYPES = {np.dtype(np.float32): ("float32", ctypes.c_float), np.dtype(np.float64): ("float64", ctypes.c_double)}


class Functions(NamedTuple):
    """Functions on flat contiguous arrays of one dtype and equal length; they do not hold Python's lock.

    Attributes:
      products: (a, b) to float64 [3]: a.b, a.a, b.b, summed in float64.
      blend: (mine, theirs, own, other): mine = own mine + other theirs, in float64, rounded once.
      within: (vector, most): whether no element is larger than `most`, or NaN.
    """

    products: Callable[[np.ndarray, np.ndarray], np.ndarray]
    blend: Callable[[np.ndarray, np.ndarray, float, float], None]
    within: Callable[[np.ndarray, float], bool]


@lru_cache(maxsize=8)
def functions(dtype: np.dtype) -> Functions | None:
    """Those for arrays of `dtype`; None if there is no compiler, or the dtype is neither float32 nor float64."""
    if dtype not in DTYPES:
        return None
    try:
        loaded = ctypes.CDLL(str(library("multipod-adasum", [SOURCE], flags=FLAGS)))
    except (NativeError, OSError):
        return None
    name, real = DTYPES[dtype]
    pointer, double, length = ctypes.c_void_p, ctypes.c_double, ctypes.c_int64
    signatures = {
        "products": ([pointer, pointer, length, pointer], None),
        "blend": ([pointer, pointer, length, double, double], None),
        "within": ([pointer, length, real], ctypes.c_int),
    }
    found = []
    for stem, (arguments, result) in signatures.items():
        function = getattr(loaded, f"{stem}_{name}")
        function.argtypes, function.restype = arguments, result
        found.append(function)
    return Functions(partial(_products, found[0]), partial(_blend, found[1]), partial(_within, found[2]))


def _products(function: Any, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    total = np.empty(3)
    function(a.ctypes.data, b.ctypes.data, len(a), total.ctypes.data)
    return total


def _blend(function: Any, mine: np.ndarray, theirs: np.ndarray, own: float, other: float) -> None:
    function(mine.ctypes.data, theirs.ctypes.data, len(mine), float(own), float(other))


def _within(function: Any, vector: np.ndarray, most: float) -> bool:
    return bool(function(vector.ctypes.data, len(vector), most))
