"""The C runtime as a shared library: compiled at first use, and its structs as `ctypes` sees them."""

import ctypes
import functools
from pathlib import Path

from multipod import native
from multipod.errors import MicroError

FLAGS = ("-std=c11", "-O3")
"""The runtime is strict C11: the flags that its own Makefile warns with are not needed here."""


class TensorStruct(ctypes.Structure):
    """`struct mpm_tensor` of `c/include/mpm.h`."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint32),
        ("count", ctypes.c_uint32),
        ("dims", ctypes.c_int32 * 6),
        ("scale", ctypes.c_float),
        ("zero_point", ctypes.c_int32),
        ("scales", ctypes.c_void_p),
        ("scale_count", ctypes.c_uint32),
        ("channel_dim", ctypes.c_int32),
        ("rank", ctypes.c_uint8),
        ("type", ctypes.c_uint8),
        ("constant", ctypes.c_uint8),
        ("variable", ctypes.c_uint8),
    )


class BufferStruct(ctypes.Structure):
    """`struct mpm_buffer` of `c/src/kernel.h`: one entry of the memory plan."""

    _fields_ = (
        ("bytes", ctypes.c_uint32),
        ("offset", ctypes.c_uint32),
        ("tensor", ctypes.c_uint16),
        ("first", ctypes.c_uint16),
        ("last", ctypes.c_uint16),
        ("root", ctypes.c_uint16),
    )


class ArenaStruct(ctypes.Structure):
    """`struct mpm_arena` of `c/include/mpm.h`."""

    _fields_ = (
        ("scratch", ctypes.c_void_p),
        ("persistent", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_uint32),
        ("persistent_bytes", ctypes.c_uint32),
        ("scratch_used", ctypes.c_uint32),
        ("persistent_used", ctypes.c_uint32),
    )


class KernelStruct(ctypes.Structure):
    """`struct mpm_kernel` of `c/src/kernel.h`, without the function that prepares it."""

    _fields_ = (
        ("builtin", ctypes.c_int16),
        ("type", ctypes.c_uint8),
        ("type_input", ctypes.c_uint8),
        ("custom", ctypes.c_char_p),
    )


def source_folder() -> Path:
    """Where the C sources are: in an installed package beside this file, in the repository at its root.

    Raises:
      MicroError: they are in neither place.
    """
    here = Path(__file__).parent
    for folder in (here / "c", here.parents[2] / "c"):
        if (folder / "include" / "mpm.h").is_file():
            return folder
    raise MicroError(f"multipod.micro: the C runtime's sources are not in {here / 'c'}. Install multipod again.")


@functools.cache
def load() -> ctypes.CDLL:
    """The library, compiled if the cache does not have it (about 10 s).

    Raises:
      NativeError: no C compiler, or one that refuses the sources.
    """
    folder = source_folder()
    sources = sorted([*folder.glob("src/**/*.c"), *folder.glob("host/*.c")])
    path = native.library(
        "multipod-micro",
        sources,
        headers=sorted(folder.glob("**/*.h")),
        includes=[folder / "include"],
        flags=[*FLAGS, "-lm"],
    )
    library = ctypes.CDLL(str(path))
    library.mpm_input.restype = ctypes.c_void_p
    library.mpm_output.restype = ctypes.c_void_p
    return library
