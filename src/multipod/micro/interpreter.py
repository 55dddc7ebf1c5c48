"""Runs a `.tflite` file with the embedded C runtime, from Python."""

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from multipod.errors import MicroError
from multipod.micro import library, model_file

DTYPES = {
    0: np.float32, 2: np.int32, 3: np.uint8, 4: np.int64, 6: np.bool_, 7: np.int16, 9: np.int8, 12: np.uint64,
    15: np.uint32, 16: np.uint16,
}  # fmt: skip
BAD_FILE, BAD_MODEL, UNSUPPORTED, NO_KERNEL, ARENA_TOO_SMALL, BAD_ARGUMENT, BAD_VALUE = range(1, 8)
ALIGNMENT = 16
ROOM_TO_MEASURE = 1 << 16
"""Bytes added to the file's size for the first guess at an arena in which to plan."""
LARGEST_ARENA = 1 << 30
VARIABLE = 0xFFFF
SCRATCH = 0xFF00


@dataclass(frozen=True)
class ArenaReport:
    """Bytes of memory by what they are for. `needed`: the least arena with which the model starts and runs.

    `planned` is what activations and scratch memory share, `persistent` what outlives a run (of it `variables`
    are the model's state), `start_up` what only the start needs beyond both. `flash` is the file itself. Sizes
    are those of this machine's pointers: a 32-bit chip needs less, which `multipod micro size` explains.
    """

    needed: int
    planned: int
    persistent: int
    variables: int
    flash: int

    @property
    def start_up(self) -> int:
        """The table of buffers that the planner works on, where it is larger than the activations."""
        return self.needed - self.planned - self.persistent


@dataclass(frozen=True)
class PlannedBuffer:
    """A piece of the arena: from operator `first` to `last` (both included; 65535 is the end of the run).

    `tensor` is a number in the main subgraph, or -1 for a kernel's scratch memory; `shares` is whether it lies over
    another buffer, which it replaces in place.
    """

    offset: int
    size: int
    tensor: int
    first: int
    last: int
    shares: bool


class Arena:
    """Memory that several models share, as long as no two of them run at the same time.

    Activations and scratch memory are there once, for the model that needs most; what outlives a run adds up.

    Args:
      scratch_bytes: memory for activations and scratch; for all, where `persistent_bytes` is 0.
      persistent_bytes: a second piece of memory for what outlives a run, as on chips with two kinds of RAM.
    """

    def __init__(self, scratch_bytes: int, persistent_bytes: int = 0) -> None:
        self.memory, self.persistent = _aligned(scratch_bytes), _aligned(persistent_bytes)
        self.state = library.ArenaStruct()
        library.load().mpm_arena_init_split(
            ctypes.byref(self.state),
            ctypes.c_void_p(self.memory.ctypes.data),
            scratch_bytes,
            ctypes.c_void_p(self.persistent.ctypes.data if persistent_bytes else None),
            persistent_bytes,
        )

    @property
    def used(self) -> tuple[int, int]:
        """Bytes of scratch memory (the most that any model needs) and of memory that outlives a run (their sum)."""
        return self.state.scratch_used, self.state.persistent_used


class Interpreter:
    """A model, ready to run: the same C code and the same bytes as on a chip.

    Args:
      model: a `.tflite` file.
      arena_bytes: memory for activations, scratch and state; by default exactly what it needs.
      arena: memory that it shares with other models, instead of its own.
      most_rounds: of all loops (WHILE) in one run together; None sets no limit, so that a file whose condition never
        fails runs for ever.

    Raises:
      MicroError: a file that is broken, does not fit together or needs what the runtime lacks; a small arena.
      NativeError: the runtime could not be compiled here.
    """

    def __init__(
        self,
        model: bytes,
        arena_bytes: int | None = None,
        *,
        arena: Arena | None = None,
        most_rounds: int | None = None,
    ) -> None:
        self._library, self._most_rounds = library.load(), most_rounds
        self._model = bytes(model)
        self._file = _aligned(len(model))
        self._file[:] = np.frombuffer(self._model, np.uint8)
        self._state = ctypes.create_string_buffer(self._library.mpm_host_interpreter_bytes())
        needed = _least_arena(self._model, lambda size: self._start(Arena(size)))
        self.plan = self._read_plan()  # with room to spare it still stands there
        _check_room(needed, self._numbers, arena_bytes, arena)
        started = self._start(arena or Arena(needed if arena_bytes is None else arena_bytes))
        assert started == needed, "an arena of the size that was measured must suffice"
        self.inputs = [self._tensor("input", i) for i in range(self._numbers[6])]
        self.outputs = [self._tensor("output", i) for i in range(self._numbers[7])]

    @property
    def arena_bytes(self) -> int:
        """The least arena with which this model starts and runs, exactly; one byte less is refused."""
        return self._numbers[0]

    @property
    def report(self) -> ArenaReport:
        """Where the arena's bytes go."""
        needed, planned, persistent, variables = self._numbers[:4]
        return ArenaReport(needed, planned, persistent, variables, len(self._model))

    def run(self, *inputs: Any) -> list[np.ndarray]:
        """The outputs for these inputs, as new arrays. State is kept from run to run: see `reset`.

        Raises:
          MicroError: inputs of another number, shape or dtype than the model's; a loop that went past `most_rounds`.
        """
        self._set(inputs)
        if self._most_rounds is not None:
            self._library.mpm_limit_rounds(self._state, ctypes.c_uint32(self._most_rounds))
        self._check(self._library.mpm_run(self._state), running=True)
        return [output.copy() for output in self.outputs]

    def reset(self) -> None:
        """Forgets all state: variables and streams begin anew."""
        self._library.mpm_reset(self._state)

    def profile(self, *inputs: Any, repeats: int = 20) -> list[tuple[str, float]]:
        """Each operator's name and its mean time in seconds over `repeats` runs. Forgets all state afterwards."""
        ticks = (ctypes.c_uint32 * max(1, self._numbers[4]))()
        self._set(inputs)
        self._library.mpm_host_profile(self._state, ticks)
        for _ in range(repeats):
            self._set(inputs)  # inputs may share memory with what came after them
            self._check(self._library.mpm_run(self._state), running=True)
        self._library.mpm_profile(self._state, None, None)
        self.reset()
        graphs = model_file.read(self._model)
        names = [op.name for op in graphs[0].operators] if graphs else []
        return [(name, tick / repeats * 1e-9) for name, tick in zip(names, ticks, strict=False)]

    def _set(self, inputs: tuple[Any, ...]) -> None:
        wrong = []
        if len(inputs) != len(self.inputs):
            raise MicroError(f"the model has {len(self.inputs)} inputs, and run got {len(inputs)}.")
        arrays = [np.asarray(value) for value in inputs]
        for i, (array, view) in enumerate(zip(arrays, self.inputs, strict=True)):
            if array.shape != view.shape or array.dtype != view.dtype:
                wrong.append(
                    f"input {i} is {view.dtype}{list(view.shape)}, and run got {array.dtype}{list(array.shape)}"
                )
        if wrong:
            raise MicroError("; ".join(wrong) + ". Give arrays of just these shapes and dtypes.")
        for array, view in zip(arrays, self.inputs, strict=True):
            view[...] = array

    def _start(self, arena: Arena) -> int:
        """Starts in this arena; returns the size that is needed, and raises for all faults but a small one."""
        self._arena = arena
        kernels = ctypes.c_void_p.in_dll(self._library, "mpm_all_kernels")
        status = self._library.mpm_init(
            self._state,
            ctypes.c_void_p(self._file.ctypes.data),
            len(self._model),
            ctypes.byref(arena.state),
            ctypes.byref(kernels),
            ctypes.c_uint32.in_dll(self._library, "mpm_all_kernels_count").value,
        )
        if status == ARENA_TOO_SMALL:
            return max(2 * len(arena.memory), self._error()[0][1])
        self._check(status)
        self._numbers = (ctypes.c_uint32 * 9)()
        self._library.mpm_host_report(self._state, self._numbers)
        return self._numbers[0]

    def _read_plan(self) -> list[PlannedBuffer]:
        size = ctypes.sizeof(library.BufferStruct) * self._numbers[8]
        return _planned((library.BufferStruct * self._numbers[8]).from_buffer_copy(self._arena.memory[:size].tobytes()))

    def _error(self) -> tuple[list[int], str]:
        numbers, what = (ctypes.c_int64 * 5)(), ctypes.c_char_p()
        self._library.mpm_host_error(self._state, numbers, ctypes.byref(what))
        return [*numbers], (what.value or b"").decode()

    def _check(self, status: int, *, running: bool = False) -> None:
        if status:
            (_, at, tensor, op, subgraph), what = self._error()
            if running:
                what, status = what or "a value out of range, or subgraphs nested too deep", BAD_VALUE
            raise MicroError(_sentence(self._model, status, at, tensor, op, subgraph, what))

    def _tensor(self, kind: str, index: int) -> np.ndarray:
        """A view of an input or output in the arena."""
        tensor = library.TensorStruct()
        self._check(getattr(self._library, f"mpm_{kind}_info")(self._state, index, ctypes.byref(tensor)))
        shape = tuple(tensor.dims[: tensor.rank])
        if tensor.type not in DTYPES:
            raise MicroError(f"{kind} {index}: NumPy has no dtype for type {tensor.type} of the schema. Add a CAST.")
        if not tensor.bytes:
            return np.zeros(shape, DTYPES[tensor.type])
        data = ctypes.cast(tensor.data, ctypes.POINTER(ctypes.c_uint8))
        return np.ctypeslib.as_array(data, (tensor.bytes,)).view(DTYPES[tensor.type]).reshape(shape)


def random_inputs(interpreter: Interpreter, seed: int = 0) -> list[np.ndarray]:
    """Random inputs for a model: uniform over an integer's range, and over -1 to 1 for floats."""
    rng = np.random.default_rng(seed)
    inputs = []
    for view in interpreter.inputs:
        if view.dtype.kind == "f":
            inputs.append(rng.uniform(-1, 1, view.shape).astype(view.dtype))
        elif view.dtype.kind == "b":
            inputs.append(rng.integers(0, 2, view.shape).astype(view.dtype))
        else:
            limits = np.iinfo(view.dtype)
            inputs.append(rng.integers(limits.min, limits.max, view.shape, view.dtype, endpoint=True))
    return inputs


def _aligned(size: int) -> np.ndarray:
    memory = np.zeros(size + ALIGNMENT, np.uint8)
    skip = -memory.ctypes.data % ALIGNMENT
    return memory[skip : skip + size]


def _least_arena(model: bytes, start: Any) -> int:
    """The exact size: what a start in an arena that is large enough reports."""
    size = len(model) + ROOM_TO_MEASURE
    while size <= LARGEST_ARENA:
        needed = start(size)
        if needed <= size:
            return needed
        size = needed
    raise MicroError(f"the model needs an arena of more than {LARGEST_ARENA:,} bytes. Is it made for a chip?")


def _check_room(needed: int, numbers: Any, arena_bytes: int | None, arena: Arena | None) -> None:
    """Raises MicroError where an arena is too small; `numbers` are those of mpm_host_report."""
    if arena_bytes is not None and arena_bytes < needed:
        raise MicroError(
            f"the model needs an arena of {needed:,} bytes, and arena_bytes is {arena_bytes:,}. "
            "Give it that many, or none to have it measured."
        )
    if arena is None:
        return
    table = ctypes.sizeof(library.BufferStruct) * numbers[8]  # the start works on it
    persistent, state = numbers[2], arena.state
    scratch = max(numbers[1], table)
    left = state.persistent_bytes or max(0, state.scratch_bytes - max(scratch, state.scratch_used))
    wrong = []
    if scratch > state.scratch_bytes:
        wrong.append(f"{scratch:,} bytes of scratch memory, and the arena has {state.scratch_bytes:,}")
    if persistent > left - state.persistent_used:
        free = max(0, left - state.persistent_used)
        wrong.append(f"{persistent:,} bytes that outlive a run, and the arena has {free:,} left")
    if wrong:
        raise MicroError(f"the model needs {'; '.join(wrong)}. Make the Arena larger, or give the model its own.")


def _planned(buffers: Any) -> list[PlannedBuffer]:
    planned = []
    for i, buffer in enumerate(buffers):
        if buffer.root == VARIABLE:
            continue
        offset = buffers[buffer.root].offset
        tensor = -1 if buffer.tensor >= SCRATCH else buffer.tensor
        planned.append(PlannedBuffer(offset, buffer.bytes, tensor, buffer.first, buffer.last, buffer.root != i))
    return planned


def _sentence(model: bytes, status: int, at: int, tensor: int, op: int, subgraph: int, what: str) -> str:
    """Where, what, and the next move."""
    where = [] if subgraph == 0 else [f"subgraph {subgraph}"]
    if op >= 0:
        where.append(model_file.operator_name(model, subgraph, op))
    if tensor >= 0:
        where.append(f"tensor {tensor}{_tensor_name(model, subgraph, tensor)}")
    if status == BAD_FILE:
        where.append(f"at byte {at:,} of the file")
    place = ", ".join(where) + ": " if where else ""
    move = {
        BAD_FILE: "Is it a whole .tflite file? Fetch or export it again.",
        BAD_MODEL: "The file contradicts itself: export it again, or look at it with `multipod micro inspect`.",
        UNSUPPORTED: "Export the model without it.",
        NO_KERNEL: "Export the model without it, or add a kernel to c/src/kernels and its name to c/src/kernels.h.",
        BAD_VALUE: "Look at the indices that this operator reads.",
    }.get(status, "This is a fault of multipod: report it.")
    return f"{place}{what}. {move}"


def _tensor_name(model: bytes, subgraph: int, tensor: int) -> str:
    graphs = model_file.read(model)
    if subgraph < len(graphs) and tensor < len(graphs[subgraph].tensors):
        return f" ({graphs[subgraph].tensors[tensor].name})"
    return ""
