"""Operators of a traced program: FLOPs and bytes of each, with element-wise arithmetic fused as a compiler would.

Needs no compiler and no device. The fusion is a rule and not XLA's: arithmetic element by element, with the reductions
that end it, is one operator as long as nothing between must be finished first (a product, a gather, a reduction).
Its inputs from outside pass the memory once, and so do its results that others need.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.interpreters import partial_eval

from multipod.plan.tables.layers import fill, product_fill
from multipod.plan.work import Kind, Operation

FREE = {
    "broadcast_in_dim", "reshape", "squeeze", "expand_dims", "convert_element_type", "stop_gradient", "copy",
    "sharding_constraint", "optimization_barrier", "iota", "pvary", "copy_p", "reduce_precision",
    "bitcast_convert_type",
    "random_wrap", "random_unwrap", "random_seed", "random_fold_in", "axis_index", "transpose", "slice", "rev",
    "pad", "concatenate", "dynamic_slice", "select_n", "split",
}  # fmt: skip
"""What a compiler does on the way of something else; still an operator of its own where nothing else is beside it."""

DEAR = {"exp": 10, "log": 10, "tanh": 15, "logistic": 15, "erf": 20, "erf_inv": 25, "sin": 20, "cos": 20, "pow": 25,
        "rsqrt": 4, "sqrt": 4, "div": 4, "log1p": 12, "expm1": 12, "cbrt": 20, "rem": 4, "random_bits": 100,
        "threefry2x32": 100, "exp2": 8, "integer_pow": 2, "rng_bit_generator": 20}  # fmt: skip
"""FLOPs of an element where it is more than one."""

MOVES = {"gather", "scatter", "scatter-add", "scatter_add", "sort", "dynamic_update_slice", "top_k", "approx_top_k"}
WINDOWS = {"reduce_window_sum", "reduce_window_max", "reduce_window", "select_and_scatter_add", "cumsum",
           "cumlogsumexp", "cummax", "cumprod", "argmax", "argmin"}  # fmt: skip
COLLECTIVES = {
    "psum": "all-reduce", "psum_invariant": "all-reduce", "pmax": "all-reduce", "pmin": "all-reduce",
    "all_gather": "all-gather", "all_gather_invariant": "all-gather", "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter", "all_to_all": "all-to-all", "ppermute": "neighbour",
}  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """A collective in the program: its pattern, the axes, the bytes of the whole vector, how often; its name scopes."""

    pattern: str
    axes: tuple[str, ...]
    nbytes: float
    count: float
    scopes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traced:
    """What was found in a program, by whether it is inside `jax.shard_map` (the passes) or outside (the update).

    Attributes:
      inside, outside: operators.
      sent: collectives that stand in the program; those that a compiler adds are not there.
      loops: `while` loops, whose trips no jaxpr tells; counted once.
    """

    inside: tuple[Operation, ...]
    outside: tuple[Operation, ...]
    sent: tuple[Sent, ...]
    loops: int


def trace(jaxpr: Any, lanes: int = 1) -> Traced:
    """The operators of a `jax.core.ClosedJaxpr`, without those whose results nothing uses: no compiler keeps these."""
    used, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), instantiate=True)
    walk = _Walk(lanes)
    walk.visit(used, 1.0, False)
    return Traced(tuple(walk.ops[True]), tuple(walk.ops[False]), tuple(walk.sent), walk.loops)


class _Walk:
    def __init__(self, lanes: int) -> None:
        self.lanes = lanes
        self.ops: dict[bool, list[Operation]] = {True: [], False: []}
        self.sent: list[Sent] = []
        self.loops = 0

    def visit(self, jaxpr: Any, times: float, inside: bool, scopes: tuple[str, ...] = ()) -> None:
        """One jaxpr: what must be finished is an operator, the rest goes to the fusions."""
        fused = _Fusions()
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            inner = list(_inner(eqn))
            within = (*scopes, *filter(None, str(eqn.source_info.name_stack).split("/")))
            if inner:
                fused.barrier(eqn)
                self._inside(eqn, inner, times, inside, within)
            elif name in COLLECTIVES:
                fused.barrier(eqn)
                self._collective(eqn, times, within)
            elif (op := self._alone(eqn)) is not None:
                fused.barrier(eqn)
                self.ops[inside].append(_times(op, times))
            else:
                fused.add(eqn)
        self.ops[inside].extend(_times(op, times) for op in fused.operators(jaxpr))

    def _inside(self, eqn: Any, inner: list[Any], times: float, inside: bool, scopes: tuple[str, ...]) -> None:
        name = eqn.primitive.name
        if name == "scan":
            times *= eqn.params["length"]
        elif name == "while":
            self.loops += 1
        elif name == "cond":
            inner = inner[-1:]
        for jaxpr in inner:
            self.visit(jaxpr, times, inside or name == "shard_map", scopes)

    def _collective(self, eqn: Any, times: float, scopes: tuple[str, ...]) -> None:
        axes = eqn.params.get("axes") or eqn.params.get("axis_name") or ()
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        gathers = eqn.primitive.name.startswith("all_gather")
        nbytes = sum(_bytes(var) for var in (eqn.outvars if gathers else eqn.invars))
        self.sent.append(Sent(COLLECTIVES[eqn.primitive.name], axes, nbytes, times, scopes))

    def _alone(self, eqn: Any) -> Operation | None:
        name = eqn.primitive.name
        if name == "dot_general":
            return self._dot(eqn)
        if name == "conv_general_dilated":
            return self._convolution(eqn)
        if name in MOVES:
            return Operation(name, "memory", 0.0, _moved(eqn))
        if name in WINDOWS:
            window = math.prod(eqn.params.get("window_dimensions", (1,)))
            elements = max(map(_elements, [*eqn.invars, *eqn.outvars]))
            return Operation(name, "vector", float(elements * window), _touched(eqn))
        return None

    def _dot(self, eqn: Any) -> Operation:
        (contract, _), (batch, _) = eqn.params["dimension_numbers"]
        left, out = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        inner = math.prod(left[k] for k in contract)
        many = math.prod(left[k] for k in batch)
        rows = math.prod(left) // max(1, inner * many)
        outer = math.prod(out) // max(1, rows * many)
        return Operation(
            "matmul",
            "matmul",
            2.0 * math.prod(out) * inner,
            _touched(eqn),
            product_fill(rows, inner, outer, self.lanes),
        )

    def _convolution(self, eqn: Any) -> Operation:
        numbers, params = eqn.params["dimension_numbers"], eqn.params
        kernel, out = eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
        outputs, inputs = (kernel[k] for k in numbers.rhs_spec[:2])
        taps = math.prod(kernel[k] for k in numbers.rhs_spec[2:])
        groups = params["feature_group_count"] * params["batch_group_count"]
        # Zeros between the elements of a dilated input are no work; a gradient by the kernel has a window of a
        # whole image.
        flops = 2.0 * math.prod(out) * inputs * taps / math.prod(params["lhs_dilation"])
        if params["batch_group_count"] > 1:
            flops /= params["batch_group_count"]
        rows = math.prod(out) // max(1, outputs)
        packed = inputs * taps if inputs < 16 else inputs
        full = (
            fill(packed, self.lanes) * fill(outputs, self.lanes) * min(1.0, rows / self.lanes)
            if self.lanes > 1
            else 1.0
        )
        kind: Kind = "vector" if groups > 1 and inputs == 1 else "convolution"
        return Operation("conv" if kind == "convolution" else "depthwise", kind, flops, _touched(eqn), full)


class _Fusions:
    """Clusters of element-wise equations: those of one level that use each other's results."""

    def __init__(self) -> None:
        self.level: dict[Any, int] = defaultdict(int)
        self.maker: dict[Any, int] = {}
        self.nodes: list[tuple[Any, int]] = []
        self.parent: list[int] = []

    def barrier(self, eqn: Any) -> None:
        """What uses a result of this comes later."""
        after = self._after(eqn) + 1
        for var in eqn.outvars:
            self.level[var] = after

    def add(self, eqn: Any) -> None:
        """Joins the clusters of its inputs that are of its level."""
        number, level = len(self.nodes), self._after(eqn)
        self.nodes.append((eqn, level))
        self.parent.append(number)
        for var in _vars(eqn.invars):
            maker = self.maker.get(var)
            if maker is not None and self.nodes[maker][1] == level and self.level[var] == level:
                self.parent[self._root(maker)] = self._root(number)
        reduces = eqn.primitive.name.startswith("reduce_") and eqn.primitive.name != "reduce_precision"
        for var in eqn.outvars:
            self.maker[var] = number
            self.level[var] = level + reduces

    def operators(self, jaxpr: Any) -> Iterator[Operation]:
        """One for each cluster."""
        used_by: dict[Any, set[int]] = defaultdict(set)
        outside = -1
        for eqn in jaxpr.eqns:
            for var in _vars(eqn.invars):
                out = eqn.outvars[0] if eqn.outvars else None
                mine = self.maker.get(out, outside) if out is not None else outside
                used_by[var].add(self._root(mine) if mine != outside else outside)
        for var in _vars(jaxpr.outvars):
            used_by[var].add(outside)
        clusters: dict[int, list[Any]] = defaultdict(list)
        for number, (eqn, _) in enumerate(self.nodes):
            clusters[self._root(number)].append(eqn)
        for root, eqns in clusters.items():
            if (op := self._operator(root, eqns, used_by)) is not None:
                yield op

    def _operator(self, root: int, eqns: list[Any], used_by: dict[Any, set[int]]) -> Operation | None:
        made = {var for eqn in eqns for var in eqn.outvars}
        read = {var for eqn in eqns for var in _vars(eqn.invars)} - made
        written = {var for var in made if used_by[var] - {root}}
        names = {eqn.primitive.name for eqn in eqns}
        if names <= FREE and not names & {"concatenate", "transpose", "pad"}:
            return None
        nbytes = sum(map(_bytes, read)) + sum(map(_bytes, written))
        flops = float(sum(_flops(eqn) for eqn in eqns))
        dear = "softmax" if "exp" in names else "random" if names & {"random_bits", "threefry2x32"} else "fusion"
        return Operation(dear, "vector", flops, nbytes) if nbytes or flops else None

    def _after(self, eqn: Any) -> int:
        return max((self.level[var] for var in _vars(eqn.invars)), default=0)

    def _root(self, number: int) -> int:
        while self.parent[number] != number:
            self.parent[number] = self.parent[self.parent[number]]
            number = self.parent[number]
        return number


def _inner(eqn: Any) -> Iterator[Any]:
    """The jaxprs in an equation's parameters; of a custom derivative only the function itself."""
    for name, value in eqn.params.items():
        if name in ("fwd_jaxpr_thunk", "bwd", "jvp_jaxpr_fun", "jvp_jaxpr_thunk", "cond_jaxpr"):
            continue
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(one, "eqns"):
                yield one
            elif hasattr(one, "jaxpr") and hasattr(one.jaxpr, "eqns"):
                yield one.jaxpr


def _times(op: Operation, times: float) -> Operation:
    if times == 1:
        return op
    return Operation(op.name, op.kind, op.flops * times, op.nbytes * times, op.fill, op.count * times)


def _vars(atoms: Any) -> list[Any]:
    return [atom for atom in atoms if not hasattr(atom, "val")]  # literals have values


def _elements(var: Any) -> int:
    return math.prod(getattr(var.aval, "shape", ()))


def _bytes(var: Any) -> float:
    itemsize = getattr(getattr(var.aval, "dtype", None), "itemsize", 4)
    return float(_elements(var) * itemsize)


def _touched(eqn: Any) -> float:
    return sum(map(_bytes, [*_vars(eqn.invars), *eqn.outvars]))


def _moved(eqn: Any) -> float:
    """What passes the memory: a gather reads what it takes, a scatter changes what it is given, a sort goes log2(n)
    times."""
    name = eqn.primitive.name
    if name == "gather":
        return 2 * sum(map(_bytes, eqn.outvars))
    if name == "sort":
        longest = eqn.invars[0].aval.shape[eqn.params["dimension"]]
        return 2 * sum(map(_bytes, eqn.outvars)) * max(1.0, math.log2(max(2, longest)))
    if name.startswith("scatter"):
        return 2 * sum(map(_bytes, eqn.invars[1:])) + 2 * sum(map(_bytes, eqn.outvars))
    return _touched(eqn)


def _flops(eqn: Any) -> int:
    name = eqn.primitive.name
    if name in FREE:
        return 0
    elements = max(map(_elements, [*_vars(eqn.invars), *eqn.outvars]), default=0)
    return elements * DEAR.get(name, 1)
