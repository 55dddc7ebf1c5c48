"""The whole way of a model: trained, exported, quantised, run by the embedded runtime, bundled for a chip."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from processes import clean_environment

from multipod.cli.main import main
from multipod.errors import MicroError
from multipod.micro import Interpreter, convert
from multipod.micro.bundle import TARGETS, bundle, kernels_of
from multipod.micro.graph import to_stored
from multipod.models.resnet import SmallResNet
from multipod.recipes.digits import digits

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
TINY = f"{Path(__file__).parent / 'tiny_recipe.py'}:tiny"


@pytest.fixture(scope="module")
def exported():
    """The digits' network, smaller and untrained, in int8; with a test image as it is stored."""
    model = SmallResNet(width=4, activation="relu")
    params, statistics = model.init(jax.random.key(0))

    def function(image):
        return jax.nn.softmax(model.apply(params, statistics, {"image": image}, train=False, key=None)[0])

    images = digits().data.test().read(np.arange(16))["image"]
    made = convert(function, images[:1], calibration=[one[None] for one in images], report=False)
    return made, to_stored(images[:1], made.graph.inputs[0])


@pytest.mark.slow
def test_its_convolutions_become_convolutions_with_batch_norm_and_activation_inside(exported):
    kinds = [op.kind for op in exported[0].graph.ops]
    assert set(kinds) == {"CONV_2D", "ADD", "MEAN", "FULLY_CONNECTED", "SOFTMAX"}
    assert kinds.count("CONV_2D") == 9


def test_a_bundle_holds_the_model_its_kernels_and_what_they_should_print(exported, tmp_path):
    model = convert(lambda x: jax.nn.softmax(x @ np.eye(4, 3, dtype=np.float32)), np.ones((1, 4), np.float32),
                    calibration=[np.eye(4, dtype=np.float32)[:1]]).model  # fmt: skip
    value = np.array([[1, 2, 3, 4]], np.int8)
    bundle(model, "cortex-m4", tmp_path, [value])
    assert kernels_of(model) == ["mpm_fully_connected_s8", "mpm_softmax_s8"]
    printed = " ".join(f"{byte:02x}" for byte in Interpreter(model).run(value)[0].tobytes())
    assert (tmp_path / "expected.txt").read_text() == f"output 0: {printed}\n"
    assert "&mpm_fully_connected_s8, &mpm_softmax_s8" in (tmp_path / "kernels.c").read_text()
    assert "LENGTH = 4194304" in (tmp_path / "link.ld").read_text()
    assert not (tmp_path / "runtime" / "src" / "all_kernels.c").exists()
    arm = shutil.which("arm-none-eabi-gcc") and shutil.which("qemu-system-arm")
    if arm:
        done = subprocess.run(["make", "-C", str(tmp_path), "-j2", "test"], capture_output=True, text=True, timeout=200)
        assert "the same bytes as on the host" in done.stdout, done.stderr


def test_what_a_chip_printed_is_compared_as_numbers_where_it_is_float32(tmp_path):
    """Another C library's last places pass; larger differences, missing lines and values that are no numbers do not."""
    model = convert(lambda x: jax.nn.softmax(x), np.ones((1, 4), np.float32), report=False).model
    bundle(model, "cortex-m4", tmp_path, [np.array([[1, 2, 3, 4]], np.float32)])

    def compared(expected, printed):
        for file, values in (("expected.txt", expected), ("printed.txt", printed)):
            shown = " ".join(f"{byte:02x}" for byte in np.asarray(values, np.float32).tobytes())
            (tmp_path / file).write_text(f"output 0 float32: {shown}\n")
        command = ["awk", "-f", "compare.awk", "expected.txt", "printed.txt"]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=20).stdout.splitlines()[0]

    values = np.array([1.5, -2.25, 1e-30, 0, -7.1], np.float32)
    assert compared(values, values) == "the same bytes as on the host"
    assert compared(values, values * np.float32(1 + 1e-6)) == "the same numbers as on the host, to 1e-5"
    assert compared(values, values * np.float32(1 + 1e-3)).startswith("expected output 0")
    assert compared([np.nan, *values], [np.nan, *(values * np.float32(1 + 1e-6))]).startswith("the same numbers")
    assert compared([np.nan, *values], [0, *values]).startswith("expected output 0")
    assert compared([np.inf, *values], [-np.inf, *values]).startswith("expected output 0")
    assert compared([np.inf, *values], [np.inf, *(values * np.float32(1 + 1e-3))]).startswith("expected output 0")


def test_bundles_that_cannot_be_are_refused(tmp_path):
    ones = np.ones((1, 64), np.float32)
    model = convert(lambda x: x @ np.ones((64, 5000), np.float32), ones, calibration=[ones]).model
    with pytest.raises(MicroError, match=r"no target 'cortex-m5'. Nearest: .*cortex-m55"):
        bundle(model, "cortex-m5", tmp_path)
    with pytest.raises(MicroError, match="do not fit cortex-m0 as QEMU has it, with 262,144 bytes of flash"):
        bundle(model, "cortex-m0", tmp_path)
    assert set(TARGETS) == {"cortex-m0", "cortex-m3", "cortex-m4", "cortex-m55", "rv32imac"}


@pytest.mark.slow
def test_a_run_folder_becomes_a_file_that_predicts_the_same(tmp_path, monkeypatch, capsys):
    run = tmp_path / "run"
    train = [sys.executable, "-m", "multipod", "train", TINY, "--out", str(run), "--quiet"]
    done = subprocess.run(train, env=clean_environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    monkeypatch.chdir(tmp_path)
    arguments = ["export", str(run), "--int8", "-o", "m.tflite", "--cpu-devices", "8", "--finetune", "5"]
    monkeypatch.setattr(sys, "argv", ["multipod", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    out = capsys.readouterr().out
    assert ended.value.code == 0
    same = int(out.split("same prediction")[1].split("of 360")[0].split()[-1])
    assert same >= 345  # five steps move a model this small over some ties
    assert (tmp_path / "m.tflite").read_bytes()[4:8] == b"TFL3"
