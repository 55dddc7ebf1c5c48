"""Loops and branches: unrolled while they are short, else WHILE and IF with graphs of their own."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr

from multipod.micro.graph import Op, Tensor
from multipod.micro.lowering.lower import CannotLowerError, Lowering, Value
from multipod.micro.lowering.moves import emit_concatenation, emit_reshape, emit_slice
from multipod.micro.operators.operator import Operator, Options


def lower_scan(low: Lowering, eqn: Any, inputs: list[Value]) -> list[Value]:
    """A scan: copies of its body up to `Unroll.steps`, else a WHILE that counts."""
    params = eqn.params
    consts, carry = _counts(eqn)
    fixed, state, rows = inputs[:consts], inputs[consts : consts + carry], inputs[consts + carry :]
    length = params["length"]
    if length > low.unroll.steps:
        return _scan_as_while(low, eqn, fixed, state, rows)
    outputs: list[list[Value]] = [[] for _ in params["jaxpr"].out_avals[carry:]]
    order = range(length - 1, -1, -1) if params["reverse"] else range(length)
    for step in order:
        here = [_row(low, x, step) for x in rows]
        result = low.closed(params["jaxpr"], [*fixed, *state, *here])
        state = result[:carry]
        for collected, value in zip(outputs, result[carry:], strict=True):
            collected.append(value)
    stacked = [_stack(low, values[::-1] if params["reverse"] else values) for values in outputs]
    return [*state, *stacked]


def _counts(eqn: Any) -> tuple[int, int]:
    """How many inputs are constant over the steps, and how many values are carried from one to the next.

    Read off the shapes, since JAX has named these parameters differently: a row has one dim less than its array.
    """
    body = eqn.params["jaxpr"]
    rows = sum(len(var.aval.shape) > len(aval.shape) for var, aval in zip(eqn.invars, body.in_avals, strict=True))
    stacks = sum(len(var.aval.shape) > len(aval.shape) for var, aval in zip(eqn.outvars, body.out_avals, strict=True))
    carry = len(eqn.outvars) - stacks
    return len(eqn.invars) - rows - carry, carry


def _row(low: Lowering, x: Value, step: int) -> Value:
    start, limit = [step, *[0] * (len(x.shape) - 1)], [step + 1, *x.shape[1:]]
    return emit_reshape(low, emit_slice(low, x, start, limit, None, (1, *x.shape[1:])), tuple(x.shape[1:]))


def _stack(low: Lowering, values: list[Value]) -> Value:
    if all(isinstance(value, np.ndarray) for value in values):
        return np.stack([np.asarray(value) for value in values])
    rows = [emit_reshape(low, value, (1, *value.shape)) for value in values]
    return emit_concatenation(low, rows, 0, (len(rows), *values[0].shape))


def _scan_as_while(low: Lowering, eqn: Any, fixed: list[Value], state: list[Value], rows: list[Value]) -> list[Value]:
    """Writes a scan with `lax.while_loop`, a counter and arrays that are filled in place."""
    params = eqn.params
    body, length, reverse = params["jaxpr"], params["length"], params["reverse"]
    carry = _counts(eqn)[1]
    stacks = [np.zeros((length, *aval.shape), aval.dtype) for aval in body.out_avals[carry:]]

    def unrolled(*values: Any) -> Any:
        consts, first, xs = (
            values[: len(fixed)],
            values[len(fixed) : len(fixed) + carry],
            values[len(fixed) + carry :],
        )

        def step(loop: Any) -> Any:
            count, here, filled = loop
            row = length - 1 - count if reverse else count
            inputs = [jax.lax.dynamic_index_in_dim(x, row, keepdims=False) for x in xs]
            result = jax.extend.core.jaxpr_as_fun(body)(*consts, *here, *inputs)
            new = [
                jax.lax.dynamic_update_index_in_dim(stack, value, row, 0)
                for stack, value in zip(filled, result[carry:], strict=True)
            ]
            return count + 1, list(result[:carry]), new

        _, last, filled = jax.lax.while_loop(
            lambda loop: loop[0] < length, step, (np.int32(0), list(first), [jax.numpy.asarray(s) for s in stacks])
        )
        return *last, *filled

    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (*fixed, *state, *rows)]
    return low.closed(jax.make_jaxpr(unrolled)(*shapes), [*fixed, *state, *rows])


def lower_while(low: Lowering, eqn: Any, inputs: list[Value]) -> list[Value]:
    """WHILE. What the loop reads from outside and is computed travels through it as a variable."""
    params = eqn.params
    split = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    outer, inner, state = inputs[: split[0]], inputs[split[0] : split[1]], inputs[split[1] :]
    moving = [value for value in (*outer, *inner) if isinstance(value, Tensor)]
    variables = [*moving, *state]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in variables]

    def consts(values: list[Value], arguments: Any) -> list[Any]:
        return [arguments[moving.index(v)] if isinstance(v, Tensor) else v for v in values]

    def cond(*loop: Any) -> Any:
        return jax.extend.core.jaxpr_as_fun(params["cond_jaxpr"])(*consts(outer, loop), *loop[len(moving) :])

    def body(*loop: Any) -> Any:
        new = jax.extend.core.jaxpr_as_fun(params["body_jaxpr"])(*consts(inner, loop), *loop[len(moving) :])
        return *loop[: len(moving)], *new

    graphs = {
        "cond_subgraph_index": low.graph(jax.make_jaxpr(cond)(*shapes), f"while_{low.names}_cond"),
        "body_subgraph_index": low.graph(jax.make_jaxpr(body)(*shapes), f"while_{low.names}_body"),
    }
    return _call(low, "WHILE", variables, variables, graphs)[len(moving) :]


def lower_cond(low: Lowering, eqn: Any, inputs: list[Value]) -> list[Value]:
    """The branch that is taken, if that is known; IF for two branches; a chain of choices for more is refused."""
    index, *operands = inputs
    branches = eqn.params["branches"]
    if isinstance(index, np.ndarray):
        return low.closed(branches[int(np.clip(index, 0, len(branches) - 1))], operands)
    if len(branches) != 2:
        raise CannotLowerError(f"switches among {len(branches)} branches; nest lax.cond")
    moving = [value for value in operands if isinstance(value, Tensor)]
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in moving]

    def branch(closed: ClosedJaxpr) -> ClosedJaxpr:
        def call(*values: Any) -> Any:
            arguments = [values[moving.index(v)] if isinstance(v, Tensor) else v for v in operands]
            return jax.extend.core.jaxpr_as_fun(closed)(*arguments)

        return jax.make_jaxpr(call)(*shapes)

    graphs = {
        "then_subgraph_index": low.graph(branch(branches[1]), f"if_{low.names}_then"),
        "else_subgraph_index": low.graph(branch(branches[0]), f"if_{low.names}_else"),
    }
    zero = np.zeros(index.shape, index.dtype)
    chosen = index if index.dtype == "bool" else low.emit("NOT_EQUAL", [index, zero], index.shape, "bool")
    outputs = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in branches[0].out_avals]
    return _call(low, "IF", [chosen, *moving], outputs, graphs)


def _call(low: Lowering, kind: str, inputs: list[Value], outputs: list[Any], graphs: dict[str, Any]) -> list[Value]:
    tensors = tuple(low.fresh(kind.lower(), tuple(o.shape), np.dtype(o.dtype).name) for o in outputs)
    low.ops.append(Op(kind, tuple(low.tensor(v) for v in inputs), tensors, graphs, low.source))
    return list(tensors)


def _evaluate_while(op: Op, xs: Any) -> Any:
    test, body = op.options["cond_subgraph_index"], op.options["body_subgraph_index"]
    start = [jnp.asarray(x) for x in xs]
    return lax.while_loop(lambda loop: test(*loop)[0].reshape(()), lambda loop: body(*loop), start)


def _evaluate_if(op: Op, xs: Any) -> Any:
    then, other = op.options["then_subgraph_index"], op.options["else_subgraph_index"]
    return lax.cond(jnp.reshape(xs[0], ()), then, other, *xs[1:])


def _graphs(number: int, first: str, second: str) -> Options:
    names = (f"{first}_subgraph_index", f"{second}_subgraph_index")
    return Options(number, {name: (position, "graph", 0) for position, name in enumerate(names)})


OPERATORS = (
    Operator(
        "WHILE", _graphs(93, "cond", "body"), since="1.15.0", evaluate=_evaluate_while,
        primitives={"while": lower_while, "scan": lower_scan},
    ),
    Operator("IF", _graphs(92, "then", "else"), since="1.15.0", evaluate=_evaluate_if, primitives={"cond": lower_cond}),
)  # fmt: skip
