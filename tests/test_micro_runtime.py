"""The C runtime against TensorFlow Lite Micro's own outputs, and against hostile files."""

import shutil
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.errors import MicroError
from multipod.micro import Interpreter

flatbuffers = pytest.importorskip("flatbuffers")
from tflite_models import FOLDER, Graph, Op, Tensor, build, stored  # noqa: E402

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
needs_models = pytest.mark.skipif(not FOLDER.is_dir(), reason="TFLM's models are not at hand")
INT8 = [
    "hello_world_int8", "keyword_scrambled", "keyword_scrambled_8bit", "micro_speech_quantized", "person_detect",
    "trained_lstm_int8",
]  # fmt: skip


@needs_models
@pytest.mark.parametrize("name", INT8)
def test_the_same_bytes_as_tflm(name):
    model, arrays = stored(name)
    interpreter = Interpreter(model)
    assert len(interpreter.outputs) == 1
    for kind in ("tflm_out", "tflm_stream_out"):
        interpreter.reset()
        for n in range(8 if name != "person_detect" else 2):
            if kind == "tflm_out":
                interpreter.reset()
            (output,) = interpreter.run(arrays[f"in0_{n}"])
            np.testing.assert_array_equal(output, arrays[f"{kind}0_{n}"])


def dense(depth: int = 4, channels: int = 3, **changes: object) -> bytes:
    """A fully connected layer of int8 and a reshape."""
    rng = np.random.default_rng(0)
    tensors = [
        Tensor([1, depth], "int8", [0.5], 3),
        Tensor([channels, depth], "int8", [0.25], 0, rng.integers(-127, 128, (channels, depth), np.int8)),
        Tensor([channels], "int32", [0.125], 0, rng.integers(-99, 99, channels, np.int32)),
        Tensor([1, channels], "int8", [1.0], -5),
        Tensor([2], "int32", data=np.array([channels, 1], np.int32)),
        Tensor([channels, 1], "int8", [1.0], -5),
    ]
    for place, tensor in changes.items():
        tensors[int(place[1:])] = tensor
    options = [(0, "b", 0), (1, "b", 0)]
    return build(Graph(tensors, [Op(9, [0, 1, 2], [3], options, 8), Op(22, [3, 4], [5])], [0], [5]))


def test_a_dense_layer_by_hand():
    interpreter = Interpreter(dense())
    x = np.array([[1, -2, 100, 7]], np.int8)
    rng = np.random.default_rng(0)
    w, bias = rng.integers(-127, 128, (3, 4), np.int8), rng.integers(-99, 99, 3, np.int32)
    real = ((x.astype(int) - 3) @ w.T.astype(int) + bias) * 0.125
    expected = np.clip(np.floor(np.abs(real) + 0.5) * np.sign(real) - 5, -128, 127)
    np.testing.assert_array_equal(interpreter.run(x)[0], expected.reshape(3, 1))


def test_the_arena_is_exact():
    model = dense()
    needed = Interpreter(model).arena_bytes
    assert Interpreter(model, needed).arena_bytes == needed
    with pytest.raises(MicroError) as error:
        Interpreter(model, needed - 1)
    assert str(error.value) == (
        f"the model needs an arena of {needed:,} bytes, and arena_bytes is {needed - 1:,}. "
        "Give it that many, or none to have it measured."
    )


@needs_models
@pytest.mark.parametrize("name", INT8)
def test_the_least_arena_gives_the_same_output(name):
    model, arrays = stored(name)
    exact, roomy = Interpreter(model), Interpreter(model, 1 << 20)
    np.testing.assert_array_equal(exact.run(arrays["in0_0"])[0], roomy.run(arrays["in0_0"])[0])


def test_inputs_of_another_shape_or_dtype():
    interpreter = Interpreter(dense())
    with pytest.raises(MicroError) as error:
        interpreter.run(np.zeros((4, 1), np.float32))
    assert str(error.value) == (
        "input 0 is int8[1, 4], and run got float32[4, 1]. Give arrays of just these shapes and dtypes."
    )
    with pytest.raises(MicroError, match=r"^the model has 1 inputs, and run got 2\.$"):
        interpreter.run(np.zeros((1, 4), np.int8), 3)


REFUSED = {
    "an operator that is not there": (
        build(Graph([Tensor([4]), Tensor([4])], [Op(20, [0], [1])], [0], [1])),
        r"^op 0 \(RELU_N1_TO_1\): the table of kernels lacks this operator\. Export the model without it",
    ),
    "hybrid quantisation": (
        dense(t0=Tensor([1, 4])),
        r"^op 0 \(FULLY_CONNECTED\): hybrid quantisation: .*\. Export the model without it\.$",
    ),
    "dynamic shapes": (
        dense(t0=Tensor([-1, 4], "int8", [0.5], 3)),
        r"^tensor 0 \(t0\): dynamic shapes are not supported\. Export the model without it\.$",
    ),
    "a short constant": (
        dense(t1=Tensor([3, 4], "int8", [0.25], 0, b"short")),
        r"^op 0 \(FULLY_CONNECTED\), tensor 1 \(t1\): a constant is shorter than its shape\. The file",
    ),
    "a shape that does not follow": (
        dense(t3=Tensor([1, 2], "int8", [1.0], -5)),
        r"^op 0 \(FULLY_CONNECTED\): the output's shape does not follow\.",
    ),
    "a scale of 0": (
        dense(t3=Tensor([1, 3], "int8", [0.0], -5)),
        r"^op 0 \(FULLY_CONNECTED\), tensor 3 \(t3\): a scale is not a positive, normal float32\.",
    ),
    "not a model": (
        b"hello, world" * 9,
        r"^at byte 0 of the file: not a \.tflite file: it does not say TFL3 at byte 4\.",
    ),
    "nothing": (b"", r"^at byte 0 of the file: not a \.tflite file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_place_and_reason(name):
    model, message = REFUSED[name]
    with pytest.raises(MicroError, match=message):
        Interpreter(model)


def test_a_truncated_file():
    model = dense()
    with pytest.raises(MicroError, match=r"at byte [\d,]+ of the file: an offset in the file leads nowhere\."):
        Interpreter(model[: len(model) // 2])


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 3), st.integers(0, 2**32 - 1), st.integers(0, 10**6))
def test_mutations_are_refused_or_run(kind, word, place):
    """Whatever the file says, it is refused with a MicroError, or runs to an end: `make -C c fuzz` by the million."""
    model = bytearray(dense())
    at = place % (len(model) - 4)
    if kind == 0:
        model[at] = word & 255
    elif kind == 1:
        model = model[:at]
    elif kind == 2:
        struct.pack_into(
            "<I", model, at & ~3, word if word % 3 else (0xFFFFFFFF, 0x7FFFFFFF, 0x80000000)[word % 9 // 3]
        )
    else:
        model[at] ^= 1 << (word & 7)
    try:
        interpreter = Interpreter(bytes(model))
    except MicroError:
        return
    interpreter.run(*[np.zeros(own.shape, own.dtype) for own in interpreter.inputs])


@pytest.fixture
def model_path(tmp_path):
    path = tmp_path / "dense.tflite"
    path.write_bytes(dense())
    return path


def test_the_commands(model_path, tmp_path):
    from click.testing import CliRunner

    from multipod.cli.micro import micro

    np.save(tmp_path / "x.npy", np.array([[1, -2, 100, 7]], np.int8))

    def said(*arguments: str) -> str:
        done = CliRunner().invoke(micro, [arguments[0], str(model_path), *arguments[1:]], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    assert "output 0: int8[3, 1]" in said("run", "--input", str(tmp_path / "x.npy"), "--out", str(tmp_path / "y.npz"))
    assert np.load(tmp_path / "y.npz")["out0"].shape == (3, 1)
    assert "0 FULLY_CONNECTED  0:int8[1, 4], 1:int8[3, 4], 2:int32[3] -> 3:int8[1, 3]" in said("inspect", "--tensors")
    assert "variables" in said("size")
    assert "RESHAPE" in said("profile", "--repeats", "2")
    assert "in place" in said("plan", "--out", str(tmp_path / "plan.svg"))
    assert (tmp_path / "plan.svg").read_text(encoding="utf-8").startswith("<svg")


def test_the_command_refuses_a_file_by_its_name(tmp_path):
    from click.testing import CliRunner

    from multipod.cli.micro import micro

    (tmp_path / "no.tflite").write_bytes(b"what is this?")
    error = CliRunner().invoke(micro, ["size", str(tmp_path / "no.tflite")]).exception
    assert isinstance(error, MicroError)
    assert str(error).startswith(f"{tmp_path}/no.tflite: at byte 0 of the file: not a .tflite file")
