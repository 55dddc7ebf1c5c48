"""The C++ kernel of tensor-train bags (`multipod.nn.tables.tensor_train_library`) as an operation of PyTorch on CPU.

Programs that run as they are called get an autograd function, and compiled ones the operator
`torch.ops.multipod.tensor_train_bag`, which is a node of their graph; called by itself it costs 0.2 ms more a step.
float32; one order of differentiation; so many threads as `torch.get_num_threads` says, where there is enough work.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from multipod.errors import DataError, NativeError
from multipod.interop.torch_tables.plain import NO_PADDING, Bags
from multipod.nn.tables import tensor_train_library as library
from multipod.nn.tables.bags import check_bags

Cores = Sequence[torch.Tensor]
Maybe: TypeAlias = torch.Tensor | None


@torch.compiler.assume_constant_result
def is_available() -> bool:
    """Whether there is a kernel on this machine."""
    try:
        library.load()
    except NativeError:
        return False
    return True


def bag(cores: Cores, rows: int, bags: Bags, *, sparse: bool = False) -> torch.Tensor:
    """The sums or means of bags, float32 [bags, features]. Differentiable once, in the cores and in the weights.

    Args:
      cores: float32, on the CPU, [m_k, R_{k-1}, n_k, R_k] each.
      rows: of the table.
      bags: of ids below `rows`.
      sparse: whether gradients of cores are sparse tensors, of the slices that were read.

    Raises:
      DataError: ids or offsets that do not fit the table.
      NativeError: the kernel cannot be compiled here.
    """
    if not torch.compiler.is_compiling():
        return _eager(cores, rows, bags, sparse)
    if sparse:
        return _outside_the_graph(cores, rows, bags, sparse)
    return tensor_train_bag(list(cores), *bags, rows)[0]


def _eager(cores: Cores, rows: int, bags: Bags, sparse: bool) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return _forward(_Held.of(cores, rows, bags), keep=False)[0]
    return _Bag.apply(rows, sparse, bags, bags.weights, *cores)


_outside_the_graph = torch.compiler.disable(_eager)  # compiled programs have no sparse gradients


class _Bag(Function):
    """The autograd function: ids in the kernel's order are kept for backward, and products are made again."""

    @staticmethod
    def forward(ctx: Any, rows: int, sparse: bool, bags: Bags, weights: Maybe, *cores: torch.Tensor) -> torch.Tensor:
        held = _Held.of(cores, rows, bags)
        out, order = _forward(held, keep=True)
        ctx.save_for_backward(bags.ids, bags.offsets, weights, *cores)  # to find them changed
        ctx.held, ctx.order, ctx.sparse = held, order, sparse
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, above: torch.Tensor) -> tuple[Any, ...]:
        cores = ctx.saved_tensors[3:]
        of_cores, of_weights = _backward(ctx.held, cores, ctx.order, above, ctx.sparse, ctx.needs_input_grad[3])
        return None, None, None, of_weights, *of_cores


def _forward(held: "_Held", keep: bool) -> tuple[torch.Tensor, Maybe]:
    """The bags, and with `keep` the ids in the kernel's order, int64 [ids]."""
    out = torch.empty(held.call.bags, held.features)
    order = torch.empty(held.call.ids, dtype=torch.int64) if keep else None
    done = library.load().multipod_tt_bag(held.call, out.data_ptr(), _address(order))
    if done != library.DONE:
        _refuse(done, held)
    return out, order


def _backward(
    held: "_Held", cores: Cores, order: torch.Tensor, above: torch.Tensor, sparse: bool, weigh: bool
) -> tuple[list[torch.Tensor], Maybe]:
    """The gradients of the cores, and of the weights if `weigh`, from `above`, that of the bags."""
    above = above.contiguous()
    touched = _Touched.of(held, cores, order) if sparse else None
    slices = touched.slices if touched else None
    outs = [torch.empty(core.shape) for core in cores] if touched is None else touched.values(cores)
    of_weights = torch.empty(held.bags.ids.shape) if weigh else None
    done = library.load().multipod_tt_bag_backward(
        held.call,
        order.data_ptr(),
        above.data_ptr(),
        _address(of_weights),
        None if touched is None else touched.places.data_ptr(),
        slices,
        _pointers(outs),
    )
    if done != library.DONE:
        _refuse(done, held)
    return outs if touched is None else touched.as_sparse(outs, cores), of_weights


class _Touched(NamedTuple):
    """Which slices of the cores a batch reads, as the kernel says them: of all cores, one after the other."""

    places: torch.Tensor
    digits: torch.Tensor
    slices: Any

    @classmethod
    def of(cls, held: "_Held", cores: Cores, order: torch.Tensor) -> "_Touched":
        total = sum(map(len, cores))
        places, digits = torch.empty(total, dtype=torch.int32), torch.empty(total, dtype=torch.int64)
        slices = (ctypes.c_int64 * len(cores))()
        done = library.load().multipod_tt_touched(
            held.call, order.data_ptr(), places.data_ptr(), digits.data_ptr(), slices
        )
        if done != library.DONE:
            _refuse(done, held)
        return cls(places, digits, slices)

    def values(self, cores: Cores) -> list[torch.Tensor]:
        """Room for the gradients of the slices."""
        return [torch.empty(count, *core.shape[1:]) for count, core in zip(self.slices, cores, strict=True)]

    def as_sparse(self, values: list[torch.Tensor], cores: Cores) -> list[torch.Tensor]:
        """Sparse tensors of the slices; each core's digits have room for all of its slices."""
        digits = self.digits.split([len(core) for core in cores])
        indices = [digit[: len(value)].unsqueeze(0) for digit, value in zip(digits, values, strict=True)]
        return [
            torch.sparse_coo_tensor(index, value, core.shape, check_invariants=False, is_coalesced=True)
            for index, value, core in zip(indices, values, cores, strict=True)
        ]


class _Held(NamedTuple):
    """A call of the C functions, and what must live as long as it."""

    call: library.Call
    features: int
    bags: Bags
    memory: tuple[Any, ...]

    @classmethod
    def of(cls, cores: Cores, rows: int, bags: Bags) -> "_Held":
        ids, offsets, weights = bags.ids.contiguous(), bags.offsets, bags.weights
        cores = [core.contiguous() for core in cores]
        offsets = None if offsets is None else offsets.contiguous()
        weights = None if weights is None else weights.contiguous()
        shape, features = _shape(*[core.shape for core in cores])
        pointers = _pointers(cores)
        call = library.Call(
            ctypes.addressof(shape),
            ctypes.addressof(pointers),
            len(cores),
            rows,
            ids.data_ptr(),
            _address(offsets),
            _address(weights),
            ids.numel(),
            bags.number,
            0 if offsets is None else len(offsets),
            ids.shape[1] if offsets is None else 0,
            library.NO_ID if bags.padding == NO_PADDING else bags.padding,
            ids.dtype == torch.int64,
            bags.mean,
            torch.get_num_threads(),
        )
        return cls(call, features, bags, (shape, pointers, cores, ids, offsets, weights))


@functools.lru_cache(maxsize=256)
def _shape(*shapes: tuple[int, int, int, int]) -> tuple[Any, int]:
    """The cores' shapes for C, and the features of a row."""
    numbers = [number for shape in shapes for number in shape]
    features = 1
    for shape in shapes:
        features *= shape[2]
    return (ctypes.c_int32 * len(numbers))(*numbers), features


def _pointers(tensors: Cores) -> Any:
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


def _address(tensor: Maybe) -> int | None:
    return None if tensor is None else int(tensor.data_ptr())


def _refuse(code: int, held: _Held) -> None:
    """Raises what the kernel's code means."""
    bags = held.bags
    if code == library.NO_MEMORY:
        raise MemoryError(f"TTEmbeddingBag: no memory for {bags.ids.numel():,} ids in {bags.number:,} bags")
    check(held.call.rows, bags)
    raise DataError(
        f"TTEmbeddingBag: {bags.ids.numel():,} ids in {bags.number:,} bags do not fit the kernel: it takes below 2^31 "
        "of each. Look them up in several calls."
    )


def check(rows: int, bags: Bags) -> None:
    """Refuses ids and offsets that do not fit a table of so many rows.

    Raises:
      DataError: with everything that is wrong, the first id outside the table and its place.
    """
    ids = bags.ids.reshape(-1)
    if bags.offsets is None:
        offsets = torch.arange(bags.number + 1) * bags.ids.shape[1]
    else:
        end = bags.offsets.new_tensor([len(ids)])
        offsets = bags.offsets if bags.last else torch.cat([bags.offsets, end])
    check_bags(ids.cpu().numpy(), offsets.cpu().numpy(), rows, table="TTEmbeddingBag")


# The operator of compiled programs. The arguments after `cores` are those of `Bags`.


@torch.library.custom_op("multipod::tensor_train_bag", mutates_args=(), device_types="cpu")
def tensor_train_bag(
    cores: list[torch.Tensor],
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    padding: int,
    mean: bool,
    last: bool,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The bags, and the order of the ids that backward takes."""
    out, order = _forward(_Held.of(cores, rows, Bags(ids, offsets, weights, padding, mean, last)), keep=True)
    assert order is not None
    return out, order


@tensor_train_bag.register_fake
def _shapes_forward(
    cores: list[torch.Tensor],
    ids: torch.Tensor,
    offsets: Maybe,
    weights: Maybe,
    padding: int,
    mean: bool,
    last: bool,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    features = 1
    for core in cores:
        features *= core.shape[2]
    bags = Bags(ids, offsets, weights, padding, mean, last).number
    return cores[0].new_empty(bags, features), ids.new_empty(ids.numel(), dtype=torch.int64)


@torch.library.custom_op("multipod::tensor_train_bag_backward", mutates_args=(), device_types="cpu")
def tensor_train_bag_backward(
    above: torch.Tensor,
    order: torch.Tensor,
    cores: list[torch.Tensor],
    ids: torch.Tensor,
    offsets: torch.Tensor | None,
    weights: torch.Tensor | None,
    padding: int,
    mean: bool,
    last: bool,
    rows: int,
) -> list[torch.Tensor]:
    """The gradients of the cores, and last those of the weights if there are any."""
    held = _Held.of(cores, rows, Bags(ids, offsets, weights, padding, mean, last))
    of_cores, of_weights = _backward(held, cores, order, above, False, weights is not None)
    return of_cores if of_weights is None else [*of_cores, of_weights]


@tensor_train_bag_backward.register_fake
def _shapes_backward(
    above: torch.Tensor,
    order: torch.Tensor,
    cores: list[torch.Tensor],
    ids: torch.Tensor,
    offsets: Maybe,
    weights: Maybe,
    padding: int,
    mean: bool,
    last: bool,
    rows: int,
) -> list[torch.Tensor]:
    like = cores if weights is None else [*cores, weights]
    return [tensor.new_empty(tensor.shape) for tensor in like]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    cores, *tensors = inputs[:4]
    ctx.save_for_backward(output[1], *tensors, *cores)
    ctx.settings = inputs[4:]


def _gradient(ctx: Any, above: torch.Tensor, _: Any) -> tuple[Any, ...]:
    order, ids, offsets, weights, *cores = ctx.saved_tensors
    of_all = tensor_train_bag_backward(above, order, cores, ids, offsets, weights, *ctx.settings)
    of_weights = None if weights is None else of_all[-1]
    return of_all[: len(cores)], None, None, of_weights, None, None, None, None


tensor_train_bag.register_autograd(_gradient, setup_context=_remember)
