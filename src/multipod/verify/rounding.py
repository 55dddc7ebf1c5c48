"""How far one update is from what it should have been: a relative error for each thing that it makes."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multipod.pytrees import Pytree
from multipod.step.state import PortableState
from multipod.verify.recording import gradient_in

EPS = 2.0**-24
"""Half a unit in the last place of float32: the rounding of one operation."""

EPS_OF = {"float32": EPS, "bfloat16": 2.0**-9}
"""The same of each type that a model may compute in."""

LIMIT = 10.0
"""Times the error of float32 on one device that an update may be from float64.

Sums in another order have errors of the same size: those seen are below 4. What is wrong is off by 1,000 and more.
"""

GRADIENT, CHANGE, KEPT, STATISTIC = "gradient of", "update of", "optimizer's", "statistic"
"""What the names of errors of tensors begin with; those of sums have one word."""

Errors = dict[str, float]
"""The relative error of each thing by its name, as `gradient of dense/kernel` or `loss`."""


Scale = Callable[[str, np.ndarray], float]
"""What the error of a leaf is measured in, of its name and its exact value."""


class UpdateResult(NamedTuple):
    """What an update makes, on the host.

    Attributes:
      state: after it, in names of the whole model.
      sums: of the objective's values, over the batch.
    """

    state: PortableState
    sums: Mapping[str, Any]


def errors_of(made: UpdateResult, exact: UpdateResult, before: PortableState) -> Errors:
    """The errors of an update against the same update in float64, from the same state `before`.

    Of a tensor it is the norm of the difference over the norm: of the gradient; of the change of a parameter; of a
    statistic; of what the optimizer keeps. Where a tensor is so small beside the others that float32 cannot hold it,
    it is measured in what float32 can: `EPS` of all gradients, or of the parameter itself.
    """
    found = _of_sums(made.sums, exact.sums)
    ours, true = made_of(made.state, before), made_of(exact.state, before)
    old = {name: _norm(leaf) for name, leaf in named(before.params).items()}
    scales: dict[str, Scale | None] = {
        GRADIENT: _beside_all(true[GRADIENT]),
        CHANGE: lambda name, leaf: max(_norm(leaf), EPS * old[name]),
        KEPT: _beside_all(true[KEPT]),
        STATISTIC: None,
    }
    for kind, scale in scales.items():
        found |= relative_errors(kind, ours[kind], true[kind], scale)
    return found


def made_of(state: PortableState, before: PortableState) -> dict[str, Pytree]:
    """The trees of tensors that an update makes, by the words that their names among the errors begin with."""
    return {
        GRADIENT: gradient_in(state.optimizer) or {},
        CHANGE: jax.tree.map(_minus, state.params, before.params),
        KEPT: state.optimizer,
        STATISTIC: state.statistics,
    }


def _beside_all(tree: Pytree) -> Scale:
    whole = float(np.sqrt(sum(_norm(leaf) ** 2 for leaf in jax.tree.leaves(tree))))
    return lambda _, leaf: max(_norm(leaf), EPS * whole)


def difference(one: Pytree, other: Pytree) -> str:
    """The path of the first leaf of which two trees have not the same bits; empty if all are the same."""
    pairs = zip(named(one).items(), named(other).values(), strict=True)
    return next((name for (name, a), b in pairs if not _same_bits(np.asarray(a), np.asarray(b))), "")


def _same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return np.array_equal(one, other, equal_nan=bool(jnp.issubdtype(one.dtype, jnp.floating)))


def shaken(tree: Pytree, rng: np.random.Generator) -> Pytree:
    """A tree with each float32 up to half a unit in the last place larger or smaller, on the host."""

    def shake(leaf: jax.Array) -> np.ndarray:
        value = np.asarray(leaf)
        if value.dtype != np.float32:
            return value
        return (value * (1 + EPS * rng.uniform(-1, 1, value.shape))).astype(np.float32)

    return jax.tree.map(shake, tree)


def may_differ_by_one(name: str, value: Any) -> bool:
    """Whether a sum of an objective counts what rounding can turn over, as right answers of equally likely classes."""
    return name != "count" and float(value).is_integer()


def _of_sums(sums: Mapping[str, Any], exact: Mapping[str, Any]) -> Errors:
    """Errors of the sums that both have: a pipeline has none of the guard's."""
    found = {}
    for name in exact.keys() & sums.keys():
        true, off = float(exact[name]), abs(float(sums[name]) - float(exact[name]))
        found[name] = 0.0 if off <= 1 and may_differ_by_one(name, true) else off / max(abs(true), 1e-30)
    return found


def relative_errors(what: str, made: Pytree, exact: Pytree, scale: Scale | None = None) -> Errors:
    """The norm of the difference of each leaf over `scale` of the exact one, its norm if None.

    scale: of the leaf's name and its exact value.
    """
    ours, true = named(made), named(exact)
    return {
        f"{what} {name}".strip(): _norm(_minus(ours[name], leaf))
        / max(scale(name, leaf) if scale else _norm(leaf), 1e-300)
        for name, leaf in true.items()
    }


def named(tree: Pytree) -> dict[str, Any]:
    """The leaves of a tree by their paths, as `dense/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _minus(one: Any, other: Any) -> np.ndarray:
    return np.asarray(one, np.float64) - np.asarray(other, np.float64)


def _norm(leaf: Any) -> float:
    return float(np.linalg.norm(np.asarray(leaf, np.float64).ravel()))
