"""Finds the C and C++ that ship with multipod as shared libraries: those in the wheel, or compiled at first use.

`library` returns the path of a shared library, for `ctypes` or `jax.ffi`. A wheel for a platform has it inside. Else,
and where it is to be tuned to this processor (`-march=native`) and there is a compiler, it is compiled into the
user's cache, once for each set of sources, flags and compiler; the next call finds it there in about a millisecond.
Where there is neither, `NativeError` is raised, and callers that have another way then take it.
"""

import contextlib
import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from multipod import runtime
from multipod.errors import NativeError

SHOWN_LINES = 30

SHIPPED = Path(__file__).with_name("compiled")
"""Where a wheel for a platform has its libraries; `hatch_build.py` puts them there."""

LEVEL_3 = {"avx2", "bmi2", "fma"}
"""Flags of x86 processors that the shipped libraries need which are tuned when they are compiled here (x86-64-v3)."""


def library(
    name: str,
    sources: Sequence[Path],
    *,
    headers: Sequence[Path] = (),
    includes: Sequence[str | Path] = (),
    flags: Sequence[str] = ("-O2",),
    compiler: str | None = None,
    cache: Path | None = None,
) -> Path:
    """The path of the shared library made of `sources`: the wheel's, the cache's, or compiled now.

    Safe with several processes at once: one compiles, the others wait for it, and a half-written file
    never bears the final name. A file in the cache is never changed afterwards.

    Args:
      name: the stem of the file, as `multipod-micro`.
      sources: all C, or all C++ (any suffix but `.c`). Their bytes are part of the key.
      headers: files that the sources include, whose bytes are part of the key as well. Headers of other
        packages need not be named; put the package's version in a `-D` flag if they may change.
      includes: folders for `-I`, as `jax.ffi.include_dir()`.
      flags: for compiling and linking. `-march=native` adds this processor to the key.
      compiler: a command; by default what CC or CXX says, or else `cc` or `c++`.
      cache: the folder; by default `~/.cache/multipod/native`.

    Raises:
      NativeError: no compiler, sources that it refuses (with its words), or a folder that cannot be written.
    """
    if not sources:
        raise ValueError(f"{name}: no sources")
    shipped = shipped_library(name, [*sources, *headers], flags)
    if shipped is not None and compiler is None and not is_tuned(flags):
        return shipped
    try:
        return _compiled_library(name, sources, headers, includes, flags, compiler, cache)
    except NativeError:
        if shipped is None:
            raise
        return shipped


def shipped_name(name: str, files: Sequence[Path], flags: Sequence[str]) -> str:
    """The file name of a library in a wheel: it changes with the bytes of `files` and with the definitions in `flags`.

    Other flags may differ from those that are compiled with at first use.
    """
    digest = hashlib.sha256("\0".join(flag for flag in flags if flag.startswith("-D")).encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return f"{name}-{digest.hexdigest()[:16]}.so"


def shipped_library(name: str, files: Sequence[Path], flags: Sequence[str]) -> Path | None:
    """The library that came with the wheel; None if there is none of these sources that this processor can run."""
    if not SHIPPED.is_dir():
        return None
    path = SHIPPED / shipped_name(name, files, flags)
    if is_tuned(flags) and platform.machine() == "x86_64" and not {*_processor().split()} >= LEVEL_3:
        return None
    return path if path.is_file() else None


def is_tuned(flags: Sequence[str]) -> bool:
    """Whether a library is compiled for the very processor that it runs on."""
    return any("native" in flag for flag in flags)


def _compiled_library(
    name: str,
    sources: Sequence[Path],
    headers: Sequence[Path],
    includes: Sequence[str | Path],
    flags: Sequence[str],
    compiler: str | None,
    cache: Path | None,
) -> Path:
    """The path of the library in the cache, compiled now if it is not there."""
    command = _compiler(sources, compiler, name)
    arguments = ["-shared", "-fPIC", *flags, *(f"-I{folder}" for folder in includes)]
    folder = cache or runtime.native_cache()
    target = folder / f"{name}-{_key(command, arguments, [*sources, *headers])}.so"
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _alone(target.with_suffix(".lock")):
            if not target.exists():
                _compile(name, command, arguments, sources, target)
    except OSError as error:
        raise NativeError(
            f"{name}: the compiled library cannot be written to {folder}: {error.strerror}. "
            "Make room there, or set XDG_CACHE_HOME to a folder that can be written."
        ) from error
    return target


def _variable(sources: Sequence[Path]) -> str:
    """The environment variable that names the compiler of these sources."""
    return "CC" if all(source.suffix == ".c" for source in sources) else "CXX"


def _compiler(sources: Sequence[Path], chosen: str | None, name: str) -> tuple[str, ...]:
    """The compiler's command, its program with the full path."""
    variable = _variable(sources)
    language, package = ("C", "gcc") if variable == "CC" else ("C++", "g++")
    words = shlex.split(chosen or runtime.compiler(variable))
    program = shutil.which(words[0]) if words else None
    if program is None:
        raise NativeError(
            f"{name}: no {language} compiler: '{' '.join(words)}' is not on the PATH. "
            f"Install one (on Debian: apt-get install {package}), or name yours in {variable}."
        )
    return (program, *words[1:])


@functools.cache
def _version(command: tuple[str, ...]) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


@functools.cache
def _processor() -> str:
    """What `-march=native` depends on: homes are shared between machines, and so are caches in them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _key(command: tuple[str, ...], arguments: list[str], files: Sequence[Path]) -> str:
    """Sixteen hex digits that change whenever the library could."""
    digest = hashlib.sha256()
    native = _processor() if is_tuned(arguments) else ""
    for text in (*command, _version(command), *arguments, platform.machine(), native):
        digest.update(text.encode() + b"\0")
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Holds `lock`, so that processes started together compile once. Without it the result is the same, but slower."""
    with lock.open("w") as held:
        with contextlib.suppress(OSError):  # some network file systems have no locks
            fcntl.flock(held, fcntl.LOCK_EX)
        try:
            yield
        finally:  # who waited for this file finds the library made, who comes later makes a new lock
            lock.unlink(missing_ok=True)


def _compile(name: str, command: tuple[str, ...], arguments: list[str], sources: Sequence[Path], target: Path) -> None:
    descriptor, made = tempfile.mkstemp(dir=target.parent, prefix=f".{name}-", suffix=".so")
    os.close(descriptor)
    try:
        line = [*command, *map(str, sources), *arguments, "-o", made]
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).strip().splitlines()
            raise NativeError(
                f"{name}: the compiler refused the sources:\n  {shlex.join(line)}\n"
                + "\n".join(f"  {text}" for text in said[:SHOWN_LINES])
                + f"\nName another compiler in {_variable(sources)}, or report this."
            )
        os.replace(made, target)
    finally:
        Path(made).unlink(missing_ok=True)
