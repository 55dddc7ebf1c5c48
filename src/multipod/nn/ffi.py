"""C++ kernels that ship with multipod as JAX operations on CPU: compiled at first use for this machine."""

import ctypes
from collections.abc import Iterable, Sequence
from pathlib import Path

import jax

from multipod import native


def register(name: str, source: Path, targets: Iterable[str], *, headers: Sequence[Path] = ()) -> None:
    """Compiles `source` if need be (`multipod.native`), and tells JAX of its `targets`, for `jax.ffi.ffi_call`.

    Raises:
      NativeError: it cannot be compiled here.
    """
    version = f"-DJAX_{jax.__version__.replace('.', '_')}"  # the headers are JAX's
    flags = ["-O3", "-march=native", "-ffp-contract=fast", "-std=c++17", version]
    path = native.library(name, [source], headers=headers, includes=[jax.ffi.include_dir()], flags=flags)
    library = ctypes.CDLL(str(path))
    for target in targets:
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, target)), platform="cpu")
