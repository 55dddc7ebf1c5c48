"""Walks the jaxpr of a function: computes what depends on constants alone, makes operators of the rest."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from multipod.errors import ExportError
from multipod.micro.graph import Graph, Op, Tensor, constant, drop_dead, substitute

Value = Tensor | np.ndarray
"""What a variable of the jaxpr stands for: an edge of the graph, or an array that is known already."""

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat": "jaxpr",
         "checkpoint": "jaxpr", "remat2": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
         "custom_vjp_call_jaxpr": "fun_jaxpr", "custom_lin": "jaxpr"}  # fmt: skip
"""Primitives that only call a jaxpr, with the name of the parameter that holds it: they are entered."""

UNCHANGED = {"stop_gradient", "copy", "copy_p", "reduce_precision", "optimization_barrier", "pvary", "name",
             "sharding_constraint"}  # fmt: skip
"""Primitives whose outputs are their inputs."""

DTYPES = {"float32", "int32", "bool", "int8", "int16"}
"""Types of edges. Arrays of other types may only be constants."""


class CannotLowerError(Exception):
    """Says why a primitive has no TFLite form with these parameters; collected by `lower`."""


@dataclass(frozen=True)
class Unroll:
    """Loops of at most `steps` become that many copies of their body; longer ones become WHILE."""

    steps: int = 64


@dataclass
class Lowering:
    """A graph under construction, and what went wrong so far.

    `rules` are what each primitive becomes. `problems` maps (where, what) to how often: everything that cannot be
    lowered is listed, not just the first.
    """

    rules: Mapping[str, "PrimitiveRule"]
    unroll: Unroll = field(default_factory=Unroll)
    ops: list[Op] = field(default_factory=list)
    problems: dict[tuple[str, str], int] = field(default_factory=dict)
    source: str = ""
    names: int = 0

    def emit(
        self, kind: str, inputs: Sequence[Value | None], shape: Sequence[int], dtype: str = "", **options: Any
    ) -> Tensor:
        """Adds an operator with one output, and returns the output. dtype: by default that of the first input."""
        tensors = tuple(None if value is None else self.tensor(value) for value in inputs)
        lead = tensors[0]
        dtype = dtype or ("float32" if lead is None else lead.dtype)
        output = self.fresh(kind.lower(), tuple(map(int, shape)), dtype)
        self.ops.append(Op(kind, tensors, (output,), options, self.source))
        return output

    def fresh(self, name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
        """A new edge."""
        self.names += 1
        return Tensor(f"{name}_{self.names}", shape, dtype)

    def tensor(self, value: Value) -> Tensor:
        """The edge that carries a value."""
        return value if isinstance(value, Tensor) else constant(value)

    def run(self, jaxpr: Jaxpr, consts: Sequence[Value], inputs: Sequence[Value]) -> list[Value]:
        """Lowers a jaxpr and returns what its outputs stand for."""
        known: dict[Var, Value] = {}

        def read(atom: Any) -> Value:
            return np.asarray(atom.val) if isinstance(atom, Literal) else known[atom]

        known.update(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            outside = self.source
            self.source = _where(eqn) or outside
            outputs = self.equation(eqn, [read(atom) for atom in eqn.invars])
            known.update((var, value) for var, value in zip(eqn.outvars, outputs, strict=True) if isinstance(var, Var))
            self.source = outside
        return [read(atom) for atom in jaxpr.outvars]

    def closed(self, closed: Any, inputs: Sequence[Value]) -> list[Value]:
        """Lowers a jaxpr that has its constants, and returns what its outputs stand for."""
        if isinstance(closed, ClosedJaxpr):
            return self.run(closed.jaxpr, [_array(const) for const in closed.consts], inputs)
        return self.run(closed, [], inputs)

    def equation(self, eqn: JaxprEqn, inputs: list[Value]) -> list[Value]:
        """Lowers one equation; what cannot be is noted, and stands as an edge that nothing makes."""
        name = eqn.primitive.name
        known = [value for value in inputs if not isinstance(value, Tensor)]
        if len(known) == len(inputs) and name not in CALLS and not eqn.effects:
            return _compute(eqn, known)
        if name in CALLS:
            return self.closed(eqn.params[CALLS[name]], inputs[-_arity(eqn.params[CALLS[name]]) :] if inputs else [])
        try:
            if name not in self.rules and name not in UNCHANGED:
                raise CannotLowerError("has no TFLite form")
            _check_dtypes(eqn)
            result = inputs if name in UNCHANGED else self.rules[name](self, eqn, inputs)
            return result if isinstance(result, list) else [result]
        except CannotLowerError as problem:
            shapes = ", ".join(_aval_text(atom.aval) for atom in eqn.invars)
            problem_at = (self.source, f"{name}({shapes}): {problem}")
            self.problems[problem_at] = self.problems.get(problem_at, 0) + 1
            avals: list[Any] = [var.aval for var in eqn.outvars]
            return [self.fresh("missing", tuple(aval.shape), edge_dtype(aval.dtype)) for aval in avals]

    def graph(self, jaxpr: ClosedJaxpr, name: str) -> Graph:
        """A graph inside this one, such as the body of a loop; its problems are added to ours."""
        inner = Lowering(self.rules, self.unroll, problems=self.problems, source=self.source, names=self.names)
        avals: list[Any] = list(jaxpr.in_avals)
        inputs = [inner.fresh("arg", tuple(a.shape), edge_dtype(a.dtype)) for a in avals]
        outputs = [inner.output(value) for value in inner.closed(jaxpr, inputs)]
        self.names = inner.names
        return drop_dead(Graph(tuple(inputs), tuple(outputs), tuple(inner.ops), name))

    def output(self, value: Value) -> Tensor:
        """An edge that may be a graph's output: not a constant and not an input, which a runtime could not write."""
        made = {tensor for op in self.ops for tensor in op.outputs}
        tensor = self.tensor(value)
        if tensor in made:
            return tensor
        if tensor.constant and tensor.dtype == "bool":
            raise CannotLowerError("an output is a constant bool")
        return self.emit("RESHAPE", [tensor, np.array(tensor.shape, np.int32)], tensor.shape)


PrimitiveRule = Callable[[Lowering, JaxprEqn, list[Value]], Value | list[Value]]
"""What a primitive becomes: gets its equation and the values of its inputs, returns those of its outputs."""


def lower(
    function: Callable[..., Any],
    examples: Sequence[Any],
    rules: Mapping[str, PrimitiveRule],
    unroll: Unroll = Unroll(),
) -> Graph:
    """The graph of `function` for inputs of the shapes and types of `examples` (arrays, or `jax.ShapeDtypeStruct`).

    `rules` are what each primitive becomes (`operators.table.PRIMITIVES`).
    Constants that the function closes over become constants of the graph. Inputs and outputs may be pytrees:
    they are numbered as `jax.tree.leaves` does, and named by their path.

    Raises:
      ExportError: lists every primitive that has no TFLite form, with the user's line and how often.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*examples)
    names = [_path(path, "input") for path, _ in jax.tree.leaves_with_path(tuple(examples))]
    lowering = Lowering(rules, unroll)
    avals: list[Any] = list(closed.in_avals)
    inputs = [Tensor(name, tuple(aval.shape), edge_dtype(aval.dtype)) for name, aval in zip(names, avals, strict=True)]
    outputs = lowering.closed(closed, inputs)
    if lowering.problems:
        raise ExportError(_report(lowering.problems))
    edges = tuple(lowering.output(value) for value in outputs)
    graph = drop_dead(Graph(tuple(inputs), edges, tuple(lowering.ops)))
    return _named(graph, [_path(path, "output") for path, _ in jax.tree.leaves_with_path(shapes)])


def _named(graph: Graph, names: Sequence[str]) -> Graph:
    new = {tensor: replace(tensor, name=name) for tensor, name in zip(graph.outputs, names, strict=True)}
    return substitute(graph, new)


def _path(path: tuple[Any, ...], stem: str) -> str:
    text = jax.tree_util.keystr(path, simple=True, separator="/")
    return f"{stem}_{text}" if text else stem


def _report(problems: dict[tuple[str, str], int]) -> str:
    lines = [
        f"  {where or 'unknown line'}: {what}" + (f" ({count} times)" if count > 1 else "")
        for (where, what), count in problems.items()
    ]
    what = "1 operation" if len(lines) == 1 else f"{len(lines)} operations"
    return (
        f"export: {what} cannot be lowered to TFLite:\n" + "\n".join(lines) + "\n"
        "Write them with operations that can be (docs/design/micro-export.md has the table), or export the function "
        "without that part."
    )


def _compute(eqn: JaxprEqn, inputs: list[np.ndarray]) -> list[Value]:
    """The outputs of an equation whose inputs are all known."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        outputs = eqn.primitive.bind(*map(_typed, inputs, eqn.invars), **params)
    outputs = outputs if eqn.primitive.multiple_results else [outputs]
    return [_array(output) for output in outputs]


def _array(value: Any) -> Any:
    """A NumPy array; a random key stays what it is, since only primitives that know it may read it."""
    is_key = hasattr(value, "dtype") and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value if is_key else np.asarray(value)


def _typed(value: np.ndarray, atom: Any) -> Any:
    is_key = jax.dtypes.issubdtype(atom.aval.dtype, jax.dtypes.prng_key)
    return value if is_key else jax.numpy.asarray(value, atom.aval.dtype)


def _check_dtypes(eqn: JaxprEqn) -> None:
    foreign = {v.aval.dtype.name for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype")} - DTYPES
    foreign -= {"int64", "uint32", "uint8", "float64"} if eqn.primitive.name == "convert_element_type" else set()
    if foreign:
        raise CannotLowerError(f"works in {', '.join(sorted(foreign))}; export a float32 version of the model")


def edge_dtype(dtype: Any) -> str:
    """The type on the device for a type on the host: 64 bits become 32, what is not known there float32."""
    name = np.dtype(dtype).name
    return {"int64": "int32", "uint32": "int32", "float64": "float32"}.get(name, name) if name in DTYPES | {
        "int64", "uint32", "float64"
    } else "float32"  # fmt: skip


def _arity(jaxpr: Any) -> int:
    return len(jaxpr.jaxpr.invars if isinstance(jaxpr, ClosedJaxpr) else jaxpr.invars)


def _aval_text(aval: Any) -> str:
    return f"{aval.dtype.name}{list(aval.shape)}" if hasattr(aval, "shape") else str(aval)


def _where(eqn: JaxprEqn) -> str:
    """`model.py:31:8 (forward)`: the user's line, without the folder's full path."""
    text = source_info_util.summarize(eqn.source_info)
    return "" if text.startswith("<") or text == "unknown" else text
