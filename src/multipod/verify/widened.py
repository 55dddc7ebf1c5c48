"""A traced function in float64: each operation that it has, with every float widened.

What an update should have computed is what its own program says, without rounding. A second implementation of every
model could say something else; a program whose floats are wider cannot.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive

from multipod.errors import LayoutError
from multipod.pytrees import Pytree, Shapes

Values = Sequence[Any]
Rule = Callable[..., Any]

CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr",
         "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}  # fmt: skip
"""Operations that are programs themselves, and the parameter that holds the program."""

SAME_ALONE = ("psum", "psum_invariant", "pmax", "pmin", "ppermute", "pvary", "pcast", "pbroadcast", "all_gather",
              "all_gather_invariant", "reduce_scatter", "all_to_all", "sharding_constraint", "mesh_cast", "copy",
              "copy_p", "reduce_precision")  # fmt: skip
"""What one device alone hands on as it is, or with a dim of one more or less."""

TYPES, SHARDINGS = ("new_dtype", "preferred_element_type", "dtype"), ("sharding", "out_sharding")
"""Parameters of operations that name a type, and that name a mesh."""

SCATTERS: dict[str, Any] = {
    "scatter": lax.scatter,
    "scatter-add": lax.scatter_add,
    "scatter_add": lax.scatter_add,
    "scatter_mul": lax.scatter_mul,
    "scatter_min": lax.scatter_min,
    "scatter_max": lax.scatter_max,
}


def widened(function: Callable[..., Pytree], *shapes: Shapes) -> Callable[..., Pytree]:
    """`function` as traced for `shapes`, in float64 whatever types of float it names, compiled.

    Bits of random numbers, whole numbers and constants are those of `function`; a float32 constant keeps its value.
    Custom kernels (FFI calls) stay as they are and round: their inputs and results are converted.

    Args:
      function: for one device: collectives of several are refused.
      shapes: of its arguments, as for `jax.eval_shape`.

    Returns:
      the function of the same arguments, any floats in them, to a tree with float64 in place of each float.

    Raises:
      LayoutError: an operation over several devices.
    """
    closed, out = jax.make_jaxpr(function, return_shape=True)(*shapes)
    structure: Any = jax.tree.structure(out)

    @jax.jit
    def run(*inputs: jax.Array) -> Pytree:
        return structure.unflatten(_evaluate(closed, inputs))

    def called(*arguments: Pytree) -> Pytree:
        values = map(np.asarray, jax.tree.leaves(arguments))
        with jax.enable_x64(True):
            typed = zip(values, closed.in_avals, strict=True)
            return run(*(_wide(value) if _is_float(value.dtype) else value.astype(aval.dtype) for value, aval in typed))

    return called


def _type(atom: Any) -> Any:
    """The type that a value had when it was traced."""
    return atom.aval.dtype


def _shape(atom: Any) -> tuple[int, ...]:
    return atom.aval.shape


def _wide(value: Any) -> Any:
    return value.astype(jnp.float64) if jnp.issubdtype(jnp.result_type(value), jnp.floating) else value


def _evaluate(program: ClosedJaxpr | Jaxpr, inputs: Values) -> list[Any]:
    """The results of a program for inputs whose floats are wide."""
    jaxpr, constants = (program.jaxpr, program.consts) if isinstance(program, ClosedJaxpr) else (program, ())
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return _wide(jnp.asarray(atom.val, _type(atom))) if isinstance(atom, Literal) else values[atom]

    for variable, value in zip((*jaxpr.constvars, *jaxpr.invars), (*map(_wide, constants), *inputs), strict=True):
        values[variable] = value
    for equation in jaxpr.eqns:
        made = _results(equation, [read(atom) for atom in equation.invars])
        values.update(zip(equation.outvars, map(_wide, made), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _results(equation: JaxprEqn, inputs: Values) -> Values:
    name, parameters = equation.primitive.name, equation.params
    if name in CALLS:
        return _evaluate(parameters[CALLS[name]], inputs)
    if name in SAME_ALONE:
        return [value.reshape(_shape(made)) for value, made in zip(inputs, equation.outvars, strict=True)]
    rule = RULES.get(name)
    if rule is not None:
        return rule(equation, inputs)
    if name in SCATTERS:
        return [_scattered(equation, inputs)]
    return _bound(equation.primitive, inputs, _wide_parameters(parameters))


def _bound(primitive: Primitive, inputs: Values, parameters: dict[str, Any]) -> Values:
    made = primitive.bind(*inputs, **parameters)
    return made if primitive.multiple_results else [made]


def _wide_parameters(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters of an operation, the wide type in place of one that they name, and no word of any mesh."""
    wide = {name: jnp.dtype("float64") for name in TYPES if _is_float(parameters.get(name))}
    return parameters | wide | {name: None for name in SHARDINGS if name in parameters}


def _is_float(kind: Any) -> bool:
    return kind is not None and bool(jnp.issubdtype(kind, jnp.floating))


def _of_one_device(equation: JaxprEqn, inputs: Values) -> Values:
    """What a program for each device makes where there is one.

    Raises:
      LayoutError: there are several.
    """
    if equation.params["mesh"].size > 1:
        raise LayoutError(
            f"a float64 form of a program over {equation.params['mesh'].size} devices: a reference is of one device. "
            "Give it a program for a mesh of 1x1, or one without shard_map."
        )
    return _evaluate(equation.params["jaxpr"], inputs)


def _as_made(equation: JaxprEqn, inputs: Values) -> Values:
    """The operation in the types in which it was traced."""
    narrow = [value.astype(_type(atom)) for value, atom in zip(inputs, equation.invars, strict=True)]
    return _bound(equation.primitive, narrow, equation.params)


def _scanned(equation: JaxprEqn, inputs: Values) -> Values:
    p = equation.params
    constants, carried = p["num_consts"], p["num_carry"]
    fixed, first, each = inputs[:constants], inputs[constants : constants + carried], inputs[constants + carried :]

    def body(carry: Values, one: Values) -> tuple[list[Any], list[Any]]:
        made = _evaluate(p["jaxpr"], [*fixed, *carry, *one])
        return made[:carried], made[carried:]

    last, stacked = lax.scan(body, list(first), list(each), length=p["length"], reverse=p["reverse"])
    return [*last, *stacked]


def _looped(equation: JaxprEqn, inputs: Values) -> Values:
    p = equation.params
    asks, works = p["cond_nconsts"], p["body_nconsts"]
    of_test, of_body, first = inputs[:asks], inputs[asks : asks + works], inputs[asks + works :]

    def goes_on(carry: Values) -> Any:
        return _evaluate(p["cond_jaxpr"], [*of_test, *carry])[0]

    def body(carry: Values) -> list[Any]:
        made = _evaluate(p["body_jaxpr"], [*of_body, *carry])
        # Of `jax.vmap` there is an answer for each row, and a row that is done stays as it is.
        rows = goes_on(carry)
        kept = [jnp.expand_dims(rows, range(rows.ndim, leaf.ndim)) for leaf in made]
        return [jnp.where(row, new, old) for row, new, old in zip(kept, made, carry, strict=True)]

    return lax.while_loop(lambda carry: goes_on(carry).any(), body, list(first))


def _chosen(equation: JaxprEqn, inputs: Values) -> Values:
    branches = [lambda *given, branch=branch: _evaluate(branch, given) for branch in equation.params["branches"]]
    return lax.switch(inputs[0], branches, *inputs[1:])


def _scattered(equation: JaxprEqn, inputs: Values) -> Any:
    p = equation.params
    return SCATTERS[equation.primitive.name](
        *inputs,
        dimension_numbers=p["dimension_numbers"],
        indices_are_sorted=p["indices_are_sorted"],
        unique_indices=p["unique_indices"],
        mode=p["mode"],
    )


RULES: dict[str, Rule] = {
    "shard_map": _of_one_device,
    "scan": _scanned,
    "while": _looped,
    "cond": _chosen,
    "axis_index": lambda equation, inputs: [jnp.zeros((), jnp.int32)],
    "bitcast_convert_type": _as_made,
    "ffi_call": _as_made,
    "pure_callback": _as_made,
}
"""Operations that are not simply done with wider inputs."""
