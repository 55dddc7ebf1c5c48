"""The C++ kernel of tensor-train bags as plain C functions for `ctypes`: without JAX, on threads (`tensor_train_c.cc`).

`multipod.nn.tables.tensor_train_native` is the same kernel as JAX operations.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

from multipod import native

HERE = Path(__file__).parent
HEADERS = [HERE / f"tensor_train_{part}.h" for part in ("ids", "math", "walk")]
NAME = "multipod-tensor-train-c"
FLAGS = ["-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", "-pthread"]

DONE, NO_MEMORY = -1, -2
"""What the functions return, if not the place of an id outside the table; below that, cores or offsets do not fit."""

NO_ID = -(2**63)
"""The value of `skip` in a `Call` for which every id is looked up."""


class Call(ctypes.Structure):
    """The cores, the ids and the bags of a call, as `multipod_tt_call` in the C++ file says."""

    _fields_ = (
        ("shape", ctypes.c_void_p),
        ("core", ctypes.c_void_p),
        ("cores", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("id", ctypes.c_void_p),
        ("offset", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("ids", ctypes.c_int64),
        ("bags", ctypes.c_int64),
        ("offsets", ctypes.c_int64),
        ("wide", ctypes.c_int64),
        ("skip", ctypes.c_int64),
        ("wide_ids", ctypes.c_int32),
        ("mean", ctypes.c_int32),
        ("threads", ctypes.c_int64),
    )


@functools.cache
def load() -> Any:
    """The library, with the functions `multipod_tt_bag`, `multipod_tt_touched` and `multipod_tt_bag_backward`.

    Raises:
      NativeError: it cannot be compiled here.
    """
    path = native.library(NAME, [HERE / "tensor_train_c.cc"], headers=HEADERS, flags=FLAGS)
    library = ctypes.CDLL(str(path))
    call, pointer = ctypes.POINTER(Call), ctypes.c_void_p
    library.multipod_tt_bag.argtypes = (call, pointer, pointer)
    library.multipod_tt_touched.argtypes = (call, pointer, pointer, pointer, pointer)
    library.multipod_tt_bag_backward.argtypes = (call, *[pointer] * 6)
    for function in (library.multipod_tt_bag, library.multipod_tt_touched, library.multipod_tt_bag_backward):
        function.restype = ctypes.c_int64
    return library
