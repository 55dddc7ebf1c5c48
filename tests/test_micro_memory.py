"""Where the C runtime puts things: arenas in two pieces and shared ones, plans from the file, state and its reset."""

import shutil
import struct

import numpy as np
import pytest

from multipod.errors import MicroError
from multipod.micro import Arena, Interpreter
from multipod.micro.schema import NUMBERS

pytest.importorskip("flatbuffers")
from tflite_models import Graph, Op, Tensor, build
from tflite_networks import convolutional, dense

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
ADD = ([(0, "b", 0)], 11)


def image(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-128, 128, (1, 12, 12, 1)).astype(np.int8)


def memory(zero: int = 7) -> bytes:
    """An SVDF of int8 whose state has a zero point, and an LSTM-like second state of int16 (another SVDF)."""
    rng = np.random.default_rng(1)

    def layer(dtype: str, zero_point: int) -> list[Tensor]:
        return [
            Tensor([4, 3], "int8", [0.02], 0, rng.integers(-127, 128, (4, 3)).astype(np.int8)),
            Tensor([4, 5], dtype, [0.01], 0, rng.integers(-127, 128, (4, 5)).astype(dtype)),
            Tensor([4], "int32", [0.0003], 0, rng.integers(-99, 99, 4).astype(np.int32)),
            Tensor([1, 20], dtype, [0.03], zero_point, variable=True),
            Tensor([1, 4], "int8", [0.05], -3),
        ]

    tensors = [Tensor([1, 3], "int8", [0.05], 4), *layer("int8", zero), *layer("int16", 0)]
    options = [(0, "i", 1), (1, "b", 1)]
    ops = [Op(27, [0, 1, 2, 3, 4], [5], options, 6), Op(27, [0, 6, 7, 8, 9], [10], options, 6)]
    return build(Graph(tensors, ops, [0], [5, 10]))


def test_an_arena_in_two_pieces():
    model, x = convolutional(), image()
    whole = Interpreter(model)
    report = whole.report
    start = report.planned + report.start_up  # what the start needs for itself lies among the scratch memory
    apart = Interpreter(model, arena=Arena(start, report.persistent))
    np.testing.assert_array_equal(apart.run(x)[0], whole.run(x)[0])
    with pytest.raises(MicroError) as error:
        Interpreter(model, arena=Arena(start - 16, report.persistent - 8))
    assert str(error.value) == (
        f"the model needs {start:,} bytes of scratch memory, and the arena has {start - 16:,}; {report.persistent:,} "
        f"bytes that outlive a run, and the arena has {report.persistent - 8:,} left. "
        "Make the Arena larger, or give the model its own."
    )


def test_two_pieces_are_not_left():
    """Nothing is written beyond either piece, whichever of them is too small."""
    from multipod.micro import interpreter

    model = convolutional()
    report = Interpreter(model).report
    start = report.planned + report.start_up
    for scratch, persistent in [(start, report.persistent), (64, 4096), (4096, 64), (16, 16)]:
        arena = Arena(scratch + 512, persistent + 512)
        arena.memory[:] = arena.persistent[:] = 0xA5
        arena.state.scratch_bytes = scratch
        arena.state.persistent_bytes = persistent
        arena.state.persistent = arena.persistent.ctypes.data + 256 + persistent
        started = object.__new__(Interpreter)
        started._library, started._model = interpreter.library.load(), model
        started._file = interpreter._aligned(len(model))
        started._file[:] = np.frombuffer(model, np.uint8)
        started._state = interpreter.ctypes.create_string_buffer(started._library.mpm_host_interpreter_bytes())
        started._start(arena)
        assert (arena.memory[scratch:] == 0xA5).all()
        assert (arena.persistent[:256] == 0xA5).all()
        assert (arena.persistent[256 + persistent :] == 0xA5).all()


def test_models_share_an_arena():
    """Scratch memory once, the rest added up; each model keeps its state while others run."""
    models = [convolutional(), memory(), dense()]
    alone = [Interpreter(model) for model in models]
    reports = [one.report for one in alone]
    arena = Arena(max(one.planned + one.start_up for one in reports) + sum(one.persistent for one in reports))
    shared = [Interpreter(model, arena=arena) for model in models]
    assert arena.used == (max(one.planned for one in reports), sum(one.persistent for one in reports))
    rng = np.random.default_rng(3)
    for _ in range(3):
        for one, other in zip(shared, alone, strict=True):
            inputs = [rng.integers(-128, 128, own.shape).astype(own.dtype) for own in one.inputs]
            for a, b in zip(one.run(*inputs), other.run(*inputs), strict=True):
                np.testing.assert_array_equal(a, b)
    with pytest.raises(MicroError, match=r"bytes that outlive a run, and the arena has 0 left\. Make the Arena larger"):
        Interpreter(models[0], arena=arena)


@pytest.mark.parametrize("zero", [7, 0])
def test_reset_brings_back_the_first_state(zero):
    model = memory(zero)
    interpreter = Interpreter(model)
    inputs = np.random.default_rng(2).integers(-128, 128, (4, 1, 3)).astype(np.int8)
    first = [interpreter.run(x) for x in inputs]
    again = [interpreter.run(x) for x in inputs]
    assert any((a[0] != b[0]).any() for a, b in zip(first, again, strict=True))
    interpreter.reset()
    for x, expected in zip(inputs, first, strict=True):
        for a, b in zip(interpreter.run(x), expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_state_is_that_of_tflm():
    runtime = pytest.importorskip("tflite_micro").runtime
    theirs, ours = runtime.Interpreter.from_bytes(memory(0), arena_size=1 << 16), Interpreter(memory(0))
    for x in np.random.default_rng(5).integers(-128, 128, (6, 1, 3)).astype(np.int8):
        theirs.set_input(x, 0)
        theirs.invoke()
        for k, output in enumerate(ours.run(x)):
            np.testing.assert_array_equal(output, theirs.get_output(k))


def sums(plan: list[int] | None) -> bytes:
    """((x + x) + x) + (x + x): four tensors of 64 bytes beside the input."""
    ops = [Op(0, [0, 0], [1], *ADD), Op(0, [1, 0], [2], *ADD), Op(0, [2, 1], [3], *ADD)]
    metadata = {}
    if plan is not None:
        metadata["OfflineMemoryAllocation"] = struct.pack(f"<{3 + len(plan)}i", 1, 0, len(plan), *plan)
    return build(Graph([Tensor([16])] * 4, ops, [0], [3], metadata))


def test_a_plan_from_the_file():
    x = np.arange(16, dtype=np.float32)
    for plan in ([64, 128, 0, 192], [-1, -1, 256, -1], [0, 64, 128, -1]):
        interpreter = Interpreter(sums(plan))
        found = {buffer.tensor: buffer.offset for buffer in interpreter.plan if not buffer.shares}
        assert all(found[k] == offset for k, offset in enumerate(plan) if offset >= 0 and k in found)
        np.testing.assert_array_equal(interpreter.run(x)[0], 5 * x)
    # the exporter's way: an output over an input that is needed no more
    interpreter = Interpreter(sums([0, 64, 0, 64]))
    assert interpreter.report.planned == 128
    np.testing.assert_array_equal(interpreter.run(x)[0], 5 * x)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ([0, 32, 64, 128], r"tensor 1 \(t1\): two tensors meet in the offline plan\."),
        ([0, 68, 128, 192], r"tensor 1 \(t1\): the offline plan has an offset that cannot be\."),
        ([0, 64, 2**31 - 8, 192], r"tensor 2 \(t2\): the offline plan has an offset that cannot be\."),
    ],
)
def test_a_plan_that_cannot_be(plan, message):
    with pytest.raises(MicroError, match=message):
        Interpreter(sums(plan))


def variable(tensor: Tensor, *, once: bool, name: str = "counter") -> bytes:
    """Adds its input to a variable and gives the sum; CALL_ONCE sets the variable to 5 before."""
    handle = (NUMBERS["VAR_HANDLE"], [(0, "s", "box"), (1, "s", name)], 111)
    read, assign = (NUMBERS["READ_VARIABLE"], [], 112), (NUMBERS["ASSIGN_VARIABLE"], [], 113)

    def op(kind: tuple, inputs: list[int], outputs: list[int]) -> Op:
        return Op(kind[0], inputs, outputs, kind[1], kind[2])

    resource = Tensor([1], "resource")
    ops = [Op(NUMBERS["CALL_ONCE"], [], [], [(0, "i", 1)], 103)] if once else []
    ops += [op(handle, [], [1]), op(read, [1], [2]), Op(0, [2, 0], [3], *ADD), op(assign, [1, 3], [])]
    main = Graph([tensor, resource, tensor, tensor], ops, [0], [3])
    five = Tensor(tensor.shape, tensor.dtype, tensor.scales, tensor.zero, np.full(tensor.shape, 5, tensor.dtype))
    first = Graph([resource, five], [op(handle, [], [0]), op(assign, [0, 1], [])], [], [])
    return build(main, first) if once else build(main)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("tensor", [Tensor([3]), Tensor([3], "int8", [0.5], 2)], ids=["float32", "int8"])
def test_variables_with_names(tensor, once):
    """Runs them as TFLM does; a reset also forgets that CALL_ONCE has run, which TFLM's does not."""
    runtime = pytest.importorskip("tflite_micro").runtime
    model = variable(tensor, once=once)
    theirs, ours = runtime.Interpreter.from_bytes(model, arena_size=1 << 16), Interpreter(model)
    inputs = np.random.default_rng(6).integers(0, 9, (4, 3)).astype(tensor.dtype)
    first = []
    for x in inputs:
        theirs.set_input(x, 0)
        theirs.invoke()
        first += ours.run(x)
        np.testing.assert_array_equal(first[-1], theirs.get_output(0))
    ours.reset()
    for x, expected in zip(inputs, first, strict=True):
        np.testing.assert_array_equal(ours.run(x)[0], expected)


def test_variables_that_cannot_be():
    handle = Op(NUMBERS["VAR_HANDLE"], [], [0], [(1, "s", "x")], 111)
    read = Op(NUMBERS["READ_VARIABLE"], [0], [1], [], 112)
    resource = Tensor([1], "resource")
    with pytest.raises(MicroError, match=r"^op 0 \(VAR_HANDLE\): nothing assigns a value to this variable\. The file"):
        Interpreter(build(Graph([resource, Tensor([3])], [handle, read], [], [1])))
    assign = Op(NUMBERS["ASSIGN_VARIABLE"], [0, 2], [], [], 113)
    interpreter = Interpreter(build(Graph([resource, Tensor([4]), Tensor([3])], [handle, assign, read], [2], [1])))
    with pytest.raises(MicroError, match=r"^op 2 \(READ_VARIABLE\): a variable has another size\."):
        interpreter.run(np.zeros(3, np.float32))
