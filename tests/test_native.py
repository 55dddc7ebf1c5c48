"""The system's compiler, called at first use."""

import ctypes
import platform
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from multipod import native
from multipod.errors import NativeError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared libraries are named for Linux here")
ADD = "int combine(int a, int b) { return a + b; }"


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def combine(path: Path) -> int:
    return ctypes.CDLL(str(path)).combine(6, 7)


def test_compiles_once_and_again_when_anything_changes(tmp_path):
    cache = tmp_path / "cache"
    header = write(tmp_path, "by.h", "#define BY 2\n")
    source = write(tmp_path, "scale.c", '#include "by.h"\nint combine(int a, int b) { return a * b * BY; }')

    def compiled(*flags: str) -> Path:
        return native.library("scale", [source], headers=[header], includes=[tmp_path], flags=flags, cache=cache)

    first = compiled("-O1")
    assert combine(first) == 84
    made = first.stat().st_mtime_ns
    assert compiled("-O1") == first
    assert first.stat().st_mtime_ns == made
    assert compiled("-O2") != first
    header.write_text("#define BY 3\n", encoding="utf-8")
    assert combine(compiled("-O1")) == 126
    assert sorted(path.suffix for path in cache.iterdir()) == [".so"] * 3  # no lock, no half-written file is left


def test_a_wheels_library_is_taken_where_there_is_no_compiler_or_nothing_to_tune(tmp_path, monkeypatch):
    source = write(tmp_path, "add.c", ADD)
    (shipped := tmp_path / "compiled").mkdir()
    monkeypatch.setattr(native, "SHIPPED", shipped)
    monkeypatch.setattr(native, "_processor", lambda: "flags : fma avx2 bmi2")
    made = native.library("add", [source], cache=tmp_path / "cache")
    ours = made.rename(shipped / native.shipped_name("add", [source], ["-O2"]))
    assert native.library("add", [source], cache=tmp_path / "cache") == ours
    assert native.library("add", [source], flags=["-O3"], cache=tmp_path / "cache") == ours
    tuned, defined = ["-march=native"], ["-DVERSION=2"]
    assert native.library("add", [source], flags=tuned, cache=tmp_path / "cache").parent == tmp_path / "cache"
    assert native.library("add", [source], flags=defined, cache=tmp_path / "cache").parent == tmp_path / "cache"
    assert native.library("add", [source], flags=tuned, compiler="no-such-compiler") == ours
    with pytest.raises(NativeError, match="no C compiler"):
        native.library("add", [source], flags=defined, compiler="no-such-compiler")
    if platform.machine() == "x86_64":
        monkeypatch.setattr(native, "_processor", lambda: "flags : sse2")
        with pytest.raises(NativeError, match="no C compiler"):
            native.library("add", [source], flags=tuned, compiler="no-such-compiler")
    source.write_text(ADD.replace("+", "-"), encoding="utf-8")
    assert native.library("add", [source], cache=tmp_path / "cache").parent == tmp_path / "cache"


def test_cxx_by_suffix(tmp_path):
    source = write(
        tmp_path,
        "sum.cc",
        '#include <vector>\nextern "C" int combine(int a, int b) { return std::vector<int>{a, b}[1]; }',
    )
    assert combine(native.library("sum", [source], cache=tmp_path)) == 7


COMPILE = """
import sys
from pathlib import Path
from multipod import native
folder = Path(sys.argv[1])
print(native.library("many", [folder / "add.c"], cache=folder / "cache"))
"""


def test_several_processes_at_once(tmp_path):
    write(tmp_path, "add.c", ADD)
    command = [sys.executable, "-c", COMPILE, str(tmp_path)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(6)]
    paths = {process.communicate(timeout=120)[0].strip() for process in running}
    assert len(paths) == 1
    assert combine(Path(paths.pop())) == 13
    assert len([*(tmp_path / "cache").iterdir()]) == 1


def test_no_compiler(tmp_path):
    source = write(tmp_path, "add.c", ADD)
    with pytest.raises(NativeError) as error:
        native.library("add", [source], compiler="no-such-cc -m32", cache=tmp_path)
    assert str(error.value) == (
        "add: no C compiler: 'no-such-cc -m32' is not on the PATH. "
        "Install one (on Debian: apt-get install gcc), or name yours in CC."
    )


def test_the_environment_names_the_compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "my-own-c++")
    with pytest.raises(NativeError, match=r"no C\+\+ compiler: 'my-own-c\+\+'.*install g\+\+.*CXX"):
        native.library("sum", [write(tmp_path, "sum.cc", "")], cache=tmp_path)


def test_the_cache_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    path = native.library("add", [write(tmp_path, "add.c", ADD)])
    assert path.parent == tmp_path / "mine" / "multipod" / "native"


def test_a_compile_error_is_told_in_the_compilers_words(tmp_path):
    source = write(tmp_path, "wrong.c", "int combine(int a) { return b; }")
    with pytest.raises(
        NativeError, match=re.compile(r"wrong: the compiler refused.*wrong\.c:1.*b.*undeclared", re.S)
    ) as error:
        native.library("wrong", [source], cache=tmp_path / "cache")
    assert str(error.value).endswith("Name another compiler in CC, or report this.")
    assert [*(tmp_path / "cache").iterdir()] == []


def test_a_cache_that_cannot_be_written(tmp_path):
    source = write(tmp_path, "add.c", ADD)
    with pytest.raises(NativeError, match=r"add: the compiled library cannot be written to .*: Not a directory\."):
        native.library("add", [source], cache=source / "cache")


def test_a_compiler_of_several_words_and_a_new_version_of_it(tmp_path):
    source = write(tmp_path, "add.c", ADD)
    paths = []
    for version in ("1", "2"):
        wrapper = write(
            tmp_path, f"cc{version}", f'#!/bin/sh\n[ "$1" = --version ] && echo {version} && exit\nexec cc "$@"\n'
        )
        wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
        paths.append(native.library("add", [source], compiler=f"{wrapper} -g0", cache=tmp_path))
    assert paths[0] != paths[1]
    assert combine(paths[0]) == combine(paths[1]) == 13
