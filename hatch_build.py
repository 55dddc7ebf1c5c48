"""Puts the compiled parts into a wheel for a platform: `make wheel`.

Without MULTIPOD_WHEEL_FOR the wheel is pure Python and compiles its C and C++ at first use (`multipod.native`). With it
as `x86_64` or `aarch64`, Zig's C compiler (the package `ziglang`) makes the libraries for Linux with glibc 2.17 or
newer, on whatever machine this is. With `here`, this machine's `cc` and `c++` make them for Linux like its own.
"""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
PACKAGE = ROOT / "src" / "multipod"
GLIBC = "2.17"
HERE = "here"
TUNED = {
    "x86_64": ["-mcpu=x86_64_v3"],
    "aarch64": ["-mcpu=generic"],
    HERE: ["-march=x86-64-v3"] if platform.machine() == "x86_64" else [],
}
"""In place of `-march=native`, for what is tuned to the processor where it is compiled at first use."""


class NativePart(NamedTuple):
    """A library as `multipod` asks `multipod.native` for it, and the flags that it is compiled with here."""

    name: str
    sources: list[Path]
    headers: list[Path]
    includes: list[str]
    flags: list[str]
    tuned: bool


def parts() -> Iterator[NativePart]:
    """All compiled parts but the one that needs the system's libjpeg; those for JAX only where JAX is installed."""
    c = ROOT / "c"
    sources = sorted([*c.glob("src/**/*.c"), *c.glob("host/*.c")])
    headers = sorted(c.glob("**/*.h"))
    yield NativePart("multipod-micro", sources, headers, [str(c / "include")], ["-std=c11", "-O3", "-lm"], False)
    adasum = PACKAGE / "execute" / "adasum" / "adasum.c"
    flags = ["-O3", "-std=c11", "-fopenmp-simd", "-fno-trapping-math"]
    yield NativePart("multipod-adasum", [adasum], [], [], flags, True)
    tables, experts = PACKAGE / "nn" / "tables", PACKAGE / "nn" / "experts"
    train = [tables / f"tensor_train_{part}.h" for part in ("ids", "math", "walk")]
    flags = ["-O3", "-ffp-contract=fast", "-std=c++17", "-pthread"]
    yield NativePart("multipod-tensor-train-c", [tables / "tensor_train_c.cc"], train, [], flags, True)
    try:
        import jax
    except ImportError:
        print("no JAX in the environment of the build: its kernels compile at first use", file=sys.stderr)
        return
    version = f"-DJAX_{jax.__version__.replace('.', '_')}"
    flags = ["-O3", "-ffp-contract=fast", "-std=c++17", version]
    include = jax.ffi.include_dir()
    kernels = (
        ("multipod-tensor-train", tables / "tensor_train.cc", train),
        ("multipod-experts", experts / "grouped.cc", [experts / "tiles.h"]),
        ("multipod-nms", PACKAGE / "nn" / "detection" / "nms.cc", []),
    )
    for name, source, headers in kernels:
        yield NativePart(name, [source], headers, [include], flags, True)


def compile_part(part: NativePart, machine: str, folder: Path) -> Path:
    """Compiles one part for `machine`; returns its path in `folder`, named as `multipod.native` looks for it."""
    sys.path.insert(0, str(ROOT / "src"))
    from multipod.native import shipped_name

    target = folder / shipped_name(part.name, [*part.sources, *part.headers], part.flags)
    line = [*compiler(machine, "cc" if part.sources[0].suffix == ".c" else "c++"), *map(str, part.sources)]
    line += ["-shared", "-fPIC", "-s", "-fno-sanitize=undefined", *part.flags, *(TUNED[machine] if part.tuned else [])]
    subprocess.run([*line, *(f"-I{folder}" for folder in part.includes), "-o", str(target)], check=True)
    return target


def compiler(machine: str, language: str) -> list[str]:
    """The command that compiles C (`cc`) or C++ (`c++`) for `machine`."""
    if machine == HERE:
        return [language]
    return [sys.executable, "-m", "ziglang", language, "-target", f"{machine}-linux-gnu.{GLIBC}"]


class CustomBuildHook(BuildHookInterface):
    """Hatchling's hook, by the name that it looks for."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compiles the parts and marks the wheel as one for a platform, if one is asked for."""
        machine = os.environ.get("MULTIPOD_WHEEL_FOR", "")
        if self.target_name != "wheel" or version != "standard" or not machine:
            return
        if machine not in TUNED:
            raise SystemExit(f"MULTIPOD_WHEEL_FOR={machine}: no such machine. Known: {', '.join(TUNED)}.")
        self._folder = tempfile.TemporaryDirectory()
        for part in parts():
            library = compile_part(part, machine, Path(self._folder.name))
            build_data["force_include"][str(library)] = f"multipod/compiled/{library.name}"
        build_data["pure_python"] = False
        manylinux = f"manylinux_{GLIBC.replace('.', '_')}_{machine}"
        build_data["tag"] = f"py3-none-{f'linux_{platform.machine()}' if machine == HERE else manylinux}"
