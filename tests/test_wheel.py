"""The wheel in an environment of its own: what it requires and no more, no compiler, no checkout."""

import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from processes import clean_environment
from tree_names import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

LOAD = """
from multipod import native
from multipod.execute.adasum import native as adasum
from multipod.micro import library as micro
from multipod.nn.detection import nms_native
from multipod.nn.experts import native as experts
from multipod.nn.tables import tensor_train_library, tensor_train_native

for load in (micro.load, adasum._library, tensor_train_library.load, tensor_train_native.register, experts.register,
             nms_native.register):
    load()
print(native.__file__)
"""
"""Loads all compiled parts; without a compiler, one that the wheel lacks is an error."""


def checked(command: list[str | Path], **how) -> str:
    """What a command that succeeds prints."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=1000, **how)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """The wheel for this machine, its parts compiled by Zig's compiler where there is one, else by its own."""
    pytest.importorskip("hatchling")
    machine = platform.machine() if importlib.util.find_spec("ziglang") else "here"
    if machine == "here" and not (shutil.which("cc") and shutil.which("c++")):
        pytest.skip("there is neither ziglang nor a compiler of C and C++")
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", folder]
    checked(build, cwd=ROOT, env=clean_environment() | {"MULTIPOD_WHEEL_FOR": machine})
    (built,) = folder.glob("*.whl")
    return built


class Environment:
    """A virtual environment in `folder`, with a home of its own in which nothing has been compiled."""

    def __init__(self, folder: Path) -> None:
        self.programs, self.home = folder / "venv" / "bin", folder / "home"
        venv.create(folder / "venv", with_pip=True)
        self.home.mkdir()

    def pip(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs pip, with the settings of this machine."""
        kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [self.programs / "python", "-m", "pip", "--quiet", *words]
        return subprocess.run(command, env=kept, capture_output=True, text=True, timeout=1000)

    def run(self, program: str, *words: str) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment, in its home; no other program is on the PATH."""
        settings = {"HOME": str(self.home), "PATH": str(self.programs), "COLUMNS": "100"}
        command = [self.programs / program, *words]
        return subprocess.run(command, cwd=self.home, env=settings, capture_output=True, text=True, timeout=1000)

    def multipod(self, *words: str) -> str:
        """What a command prints that succeeds."""
        done = self.run("multipod", *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def sizes(self) -> dict[str, int]:
        """Bytes of each package, the largest first."""
        (site,) = self.programs.parent.glob("lib/*/site-packages")
        sizes = {
            one.name: sum(path.stat().st_size for file in one.files or () if (path := Path(file.locate())).is_file())
            for one in distributions(path=[str(site)])
        }
        return dict(sorted(sizes.items(), key=lambda item: -item[1]))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Environment:
    """An environment with the wheel and the packages that it requires."""
    environment = Environment(tmp_path_factory.mktemp("installed"))
    fetched = environment.pip("download", "--no-deps", "--dest", str(environment.home / "fetched"), "tomli-w")
    if fetched.returncode:
        pytest.skip(f"no package index can be reached: {fetched.stderr.strip().splitlines()[-1]}")
    # With the JAX for which the wheel's kernels were compiled.
    done = environment.pip("install", str(wheel), f"jax=={version('jax')}")
    assert done.returncode == 0, done.stderr
    sizes = environment.sizes()
    largest = ", ".join(f"{name} {size / 1e6:.0f}" for name, size in [*sizes.items()][:8])
    print(f"{len(sizes)} packages, {sum(sizes.values()) / 1e6:.0f} MB: {largest}")
    return environment


def test_the_wheel_has_the_compiled_parts_and_requires_ten_packages(wheel):
    archive = zipfile.ZipFile(wheel)
    libraries = [re.sub(r"-\w+\.so", "", Path(name).name) for name in archive.namelist() if name.endswith(".so")]
    parts = ("adasum", "experts", "micro", "nms", "tensor-train", "tensor-train-c")
    assert sorted(libraries) == [f"multipod-{part}" for part in parts]
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    required = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert len([line for line in required if "extra ==" not in line]) <= 10


@pytest.fixture(scope="module")
def trained(installed) -> subprocess.CompletedProcess[str]:
    """A short training, which leaves the folder `run`."""
    done = installed.run(
        "multipod", "train", "digits", "--set", "updates=4", "--set", "evaluate_every=4", "--out", "run"
    )
    assert done.returncode == 0, done.stderr
    return done


def test_it_trains_plans_and_simulates(installed, trained):
    assert "test accuracy" in trained.stdout
    assert "pip install 'multipod[report,tensorboard]'" in trained.stderr
    assert "layouts priced" in installed.multipod("plan", "transformer", "--on", "tpu-v3-pod:2x2", "--batch", "512")
    assert "detour-ring" in installed.multipod("simulate", "all-reduce", "--on", "mesh:8x8", "--bytes", "100M")


def test_its_compiled_parts_are_used(installed):
    done = installed.run("python", "-c", LOAD)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed.programs.parent)
    assert not (installed.home / ".cache" / "multipod" / "native").exists()


@pytest.mark.usefixtures("trained")
def test_an_extra_brings_what_was_missing(installed, wheel):
    refused = installed.run("multipod", "export", "run")
    assert refused.stderr == "multipod: export: flatbuffers is not installed. pip install 'multipod[export]'\n"
    done = installed.pip("install", f"{wheel}[export]")
    assert done.returncode == 0, done.stderr
    installed.multipod("export", "run", "--int8", "--finetune", "0")
    assert "output 0: int8[1, 10]" in installed.multipod("micro", "run", "run/model.tflite")
