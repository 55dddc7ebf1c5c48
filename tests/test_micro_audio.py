"""The operators of the audio front end: the C runtime against TFLM's, bit for bit, one by one and all together."""

import shutil
from collections.abc import Iterator

import numpy as np
import pytest

from multipod.errors import MicroError
from multipod.micro import Interpreter

pytest.importorskip("flatbuffers")
pytest.importorskip("tflite_micro", reason="TensorFlow Lite Micro's wheel is not installed")
from flatbuffers import flexbuffers
from tflite_models import FOLDER, Graph, Op, Tensor, build, stored
from tflite_operators import Case, check

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
CUSTOM = 32


def custom(name: str, given: list[Tensor], made: list[Tensor], **options: int) -> bytes:
    """A model of one custom operator; those of `given` that are not constants are inputs."""
    count = len(given)
    outputs = [*range(count, count + len(made))]
    extra = bytes(flexbuffers.Dumps(options)) if options else b""
    op = Op(CUSTOM, [*range(count)], outputs, custom=name, custom_options=extra)
    return build(Graph([*given, *made], [op], [k for k in range(count) if given[k].data is None], outputs))


def case(label: str, name: str, given: list[Tensor], made: list[Tensor], **options: int) -> Case:
    return label, lambda: (custom(name, given, made, **options), [t for t in given if t.data is None])


def int16(numbers: np.ndarray) -> Tensor:
    return Tensor(numbers.shape, "int16", data=numbers.astype(np.int16))


SUBTRACTION = {
    "alternate_one_minus_smoothing": 14000, "alternate_smoothing": 2384, "clamping": 1, "min_signal_remaining": 819,
    "num_channels": 40, "one_minus_smoothing": 15974, "smoothing": 410, "smoothing_bits": 10,
    "spectral_subtraction_bits": 14,
}  # fmt: skip


def cases() -> Iterator[Case]:
    rng = np.random.default_rng(1)
    window = int16(rng.integers(0, 4096, 60))
    yield case("window", "SignalWindow", [Tensor([2, 60], "int16"), window], [Tensor([2, 60], "int16")], shift=11)
    for size in (1, 64):
        made = [Tensor([size], "int16"), Tensor([], "int32")]
        yield case(f"scale-{size}", "SignalFftAutoScale", [Tensor([size], "int16")], made)
    for length, given in ((16, 16), (64, 50), (128, 128), (256, 200), (512, 480), (1024, 1000)):
        made = [Tensor([length + 2], "int16")]
        yield case(f"rfft-{length}", "SignalRfft", [Tensor([given], "int16")], made, T=7, fft_length=length)
    made = [Tensor([2, 34], "int16")]
    yield case("rfft-rows", "SignalRfft", [Tensor([2, 20], "int16")], made, T=7, fft_length=32)
    yield case(
        "energy", "SignalEnergy", [Tensor([130], "int16")], [Tensor([65], "uint32")], end_index=65, start_index=0
    )
    widths = rng.integers(1, 9, 13)
    places = np.cumsum(widths) - widths
    bank = [Tensor([65], "uint32"), *(int16(rng.integers(0, 4096, widths.sum())) for _ in range(2))]
    bank += [int16(rng.integers(0, 57, 13)), int16(places), int16(widths)]
    yield case("bank", "SignalFilterBank", bank, [Tensor([12], "uint64")], num_channels=12)
    one, made = Tensor([40], "uint32"), Tensor([40], "uint32")
    yield case("noise", "SignalFilterBankSpectralSubtraction", [one], [made, made], **SUBTRACTION)
    gains = int16(rng.integers(-32768, 32768, 125))
    yield case("pcan", "SignalPCAN", [one, one, gains], [made], snr_shift=6)
    for correction, scale in ((0, 1600), (5, 65536)):
        options = {"input_correction_bits": correction, "output_scale": scale}
        yield case(f"log-{scale}", "SignalFilterBankLog", [one], [Tensor([40], "int16")], **options)


def test_equal_to_tflm(capfd):
    check(cases())


def streams() -> Iterator[Case]:
    flag = Tensor([], "bool")
    for size, step, prefill in ((5, 2, 1), (6, 3, 1), (4, 4, 0)):
        given, made = [Tensor([2, 12], "int16")], [Tensor([2, 12 // step, size], "int16"), flag]
        yield case(
            f"framer-{size}-{step}", "SignalFramer", given, made, frame_size=size, frame_step=step, prefill=prefill
        )
    for left, right, step in ((2, 0, 1), (0, 0, 1)):  # those that are whole from the first frame on
        made = [Tensor([4 * (left + right + 1)], "int16"), flag]
        options = {"stacker_left_context": left, "stacker_right_context": right, "stacker_step": step}
        yield case(f"stacker-{left}", "SignalStacker", [Tensor([4], "int16")], made, num_channels=4, **options)
    for length in (0, 3, 11):
        yield case(f"delay-{length}", "SignalDelay", [Tensor([2, 6], "int16")], [Tensor([2, 6], "int16")],
                   delay_length=length)  # fmt: skip
    for dtype, number in (("int16", 7), ("float32", 0)):
        given, made = [Tensor([2, 3, 5], dtype)], [Tensor([2, 6], dtype)]
        yield case(f"overlap-{dtype}", "SignalOverlapAdd", given, made, T=number, frame_step=2)


def test_streams_equal_tflm(capfd):
    check(streams())


def test_frames_that_are_not_whole_yet():
    """By hand: TFLM leaves in its output what lay there."""
    options = {"frame_size": 5, "frame_step": 2, "prefill": 0}
    made = [Tensor([2, 5], "int16"), Tensor([], "bool")]
    framer = Interpreter(custom("SignalFramer", [Tensor([4], "int16")], made, **options))
    for _ in range(2):
        frames, valid = framer.run(np.array([1, 2, 3, 4], np.int16))
        assert not valid
        frames, valid = framer.run(np.array([5, 6, 7, 8], np.int16))
        np.testing.assert_array_equal(frames, [[1, 2, 3, 4, 5], [3, 4, 5, 6, 7]])
        assert valid
        framer.reset()
    options = {"num_channels": 1, "stacker_left_context": 1, "stacker_right_context": 2, "stacker_step": 2}
    made = [Tensor([4], "int16"), Tensor([], "bool")]
    stacker = Interpreter(custom("SignalStacker", [Tensor([1], "int16")], made, **options))
    found = [stacker.run(np.array([x], np.int16)) for x in range(1, 6)]
    assert [bool(valid) for _, valid in found] == [False, False, True, False, True]
    np.testing.assert_array_equal(found[2][0], [1, 1, 2, 3])
    np.testing.assert_array_equal(found[4][0], [2, 3, 4, 5])


def test_square_roots():
    """By hand, since TFLM's binding takes no uint64: rounded to nearest, of 32 bits at most to 16."""
    three = Tensor([], "int32", data=np.array(0, np.int32))
    model = custom("SignalFilterBankSquareRoot", [Tensor([7], "uint64"), three], [Tensor([7], "uint32")])
    x = np.array([0, 2, 3, 2**32 - 1, 2**32, 2**40 + 2**20 + 1, 2**64 - 1], np.uint64)
    expected = [0, 1, 2, 65535, 65536, 2**20 + 1, 2**32 - 1]
    np.testing.assert_array_equal(Interpreter(model).run(x)[0], expected)


@pytest.mark.skipif(not FOLDER.is_dir(), reason="TFLM's models are not at hand")
@pytest.mark.parametrize("kind", ["tflm_out", "tflm_stream_out"])
def test_the_whole_front_end(kind):
    """16-bit sound to 40 features; the estimate of the noise is state, which a reset clears."""
    model, arrays = stored("audio_preprocessor_int8")
    interpreter = Interpreter(model)
    for n in range(8):
        if kind == "tflm_out":
            interpreter.reset()
        np.testing.assert_array_equal(interpreter.run(arrays[f"in0_{n}"])[0], arrays[f"{kind}0_{n}"])


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (custom("SignalRfft", [Tensor([20], "int16")], [Tensor([26], "int16")], T=7, fft_length=24), "power of two"),
        (custom("SignalRfft", [Tensor([20], "int16")], [Tensor([34], "int16")], T=7), "an option is missing"),
        (custom("SignalRfft", [Tensor([20], "int16")], [Tensor([34], "int16")]), "the operator has no options"),
        (custom("SignalNoise", [Tensor([20], "int16")], [Tensor([34], "int16")]), "lacks this operator"),
    ],
)
def test_what_cannot_be(model, message):
    with pytest.raises(MicroError, match=message):
        Interpreter(model)
