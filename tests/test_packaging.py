"""What is in the wheel: the package and its C runtime, but not the experiments, which run from a checkout."""

import shutil
import subprocess
import sys
import tomllib
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
from processes import clean_environment
from tree_names import PACKAGE, ROOT

from multipod import native
from multipod.errors import NativeError
from multipod.execute.adasum import native as adasum
from multipod.micro import library as micro
from multipod.nn.detection import nms_native
from multipod.nn.experts import native as experts
from multipod.nn.tables import tensor_train_library, tensor_train_native

WHEEL = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """A folder with the package as the wheel holds it."""
    folder = tmp_path_factory.mktemp("site")
    excluded = {Path(path).name for path in WHEEL["exclude"]}
    shutil.copytree(PACKAGE, folder / "multipod", ignore=shutil.ignore_patterns("__pycache__", *excluded))
    return folder


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = clean_environment() | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )


def test_the_wheel_leaves_the_experiments_out():
    assert WHEEL["exclude"] == ["src/multipod/experiments"]
    assert WHEEL["packages"] == ["src/multipod"]
    assert WHEEL["force-include"] == {"c": "multipod/micro/c"}


def test_what_a_wheel_for_a_platform_holds_is_what_the_package_asks_for(monkeypatch):
    """Names hold the bytes of sources and headers in the order in which callers give them."""
    monkeypatch.syspath_prepend(str(ROOT))
    import hatch_build

    asked = {}

    def library(name, sources, *, headers=(), flags=(), **rest):
        asked[name] = native.shipped_name(name, [*sources, *headers], flags)
        raise NativeError("only asked")

    monkeypatch.setattr(native, "library", library)
    monkeypatch.setattr(adasum, "library", library)
    asking = (
        micro.load,
        adasum._library,
        tensor_train_library.load,
        tensor_train_native.register,
        experts.register,
        nms_native.register,
    )
    for ask in asking:
        with suppress(NativeError):
            ask.__wrapped__()
    parts = list(hatch_build.parts())
    named = {part.name: native.shipped_name(part.name, [*part.sources, *part.headers], part.flags) for part in parts}
    assert named == asked


def test_every_source_in_c_is_in_a_wheel_for_a_platform(monkeypatch):
    """But those that need the system's libjpeg. So a kernel that is new is not forgotten."""
    monkeypatch.syspath_prepend(str(ROOT))
    import hatch_build

    shipped = {source for part in hatch_build.parts() for source in part.sources}
    there = {file for suffix in ("*.c", "*.cc", "*.cpp") for file in PACKAGE.rglob(suffix)}
    assert {file.relative_to(PACKAGE).as_posix() for file in there - shipped} == {
        "data/images/jpeg.c",
        "data/images/resize.c",
    }


def test_an_installed_package_says_where_the_experiments_are(installed):
    done = run(installed, "-m", "multipod", "reproduce", "lars")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "multipod: the experiments come with multipod's repository, and this is an installed package. In a checkout "
        "say `pip install --editable .`, then `multipod reproduce` there.\n"
    )


def test_every_command_is_there_without_the_experiments(installed):
    code = (
        "import click, multipod; from multipod.cli.main import COMMANDS, cli; print(multipod.__file__); "
        "print([name for name in COMMANDS if cli.get_command(click.Context(cli), name) is None])"
    )
    done = run(installed, "-c", code)
    assert (done.stdout.split(), done.stderr) == ([str(installed / "multipod" / "__init__.py"), "[]"], "")


def test_the_wheel_is_built_so(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel")
    (built,) = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = zipfile.ZipFile(built).namelist()
    assert not [name for name in names if name.startswith("multipod/experiments")]
    assert {"multipod/py.typed", "multipod/data/digits.npz"} <= {*names}
    assert {"multipod/cli/main.py", "multipod/micro/c/include/mpm.h", "multipod/nn/tables/tensor_train.cc"} <= {*names}
