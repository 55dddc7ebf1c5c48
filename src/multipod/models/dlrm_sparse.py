"""Training DLRM where a batch pays only for the rows that it touches: no gradient has the size of a table.

The rows of dense tables that a batch needs are gathered, and the loss is differentiated in them, in the layers and in
the cores. `multipod.optim.sparse` then changes the touched rows alone. Under SGD and Adagrad that is what whole
gradients give; a table of gigabytes costs an update what a small one does.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from multipod.errors import RecipeError
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_embeddings import Lookup
from multipod.optim.sparse import EPS, adagrad_rows, make_row_gradient, rowwise_adagrad_rows, sgd_rows
from multipod.pytrees import Batch, Params

Rule = Literal["sgd", "adagrad", "rowwise_adagrad"]
TABLE = "tables/dense"


class SparseState(NamedTuple):
    """Parameters, and their sums of squares (empty under SGD; a number a row for tables under `rowwise_adagrad`)."""

    params: dict[str, jax.Array]
    squares: dict[str, jax.Array]


def sparse_state(params: dict[str, jax.Array], rule: Rule) -> SparseState:
    """The state before the first update."""
    if rule == "sgd":
        return SparseState(params, {})
    squares = {name: jnp.zeros_like(w) for name, w in params.items() if name != TABLE or rule == "adagrad"}
    if rule == "rowwise_adagrad" and TABLE in params:
        squares[TABLE] = jnp.zeros(len(params[TABLE]), params[TABLE].dtype)
    return SparseState(params, squares)


def dense_places(model: Dlrm, ids: jax.Array) -> jax.Array:
    """The places in `tables/dense` that a batch reads, [examples, number].

    Raises:
      RecipeError: a model whose tables lie in other arrays too, for layouts to split.
    """
    if set(model.embeddings.arrays) - {TABLE}:
        raise RecipeError(
            f"updates of touched rows: tables.place={model.tables.place} keeps tables for the trainer to split. Take "
            "tables.place=replicated."
        )
    return model.embeddings.places(TABLE, ids) if model.embeddings.arrays else jnp.zeros((len(ids), 0), jnp.int32)


def sparse_update(
    model: Dlrm,
    state: SparseState,
    batch: Batch,
    rule: Rule,
    rate: jax.Array | float,
    core_rate: jax.Array | float | None = None,
    lookup: Callable[[Params], Lookup] | None = None,
) -> tuple[SparseState, jax.Array]:
    """The state after one batch (`dense`, `ids`, `label`), and the batch's mean logistic loss.

    Layers and cores are under the same rule, `rowwise_adagrad` being Adagrad for them; cores have `core_rate` if it is
    given. `lookup(params)` gives a `lookup` of `Embeddings.embed_rows`, which may use parameters of its own.
    """
    place = dense_places(model, batch["ids"])
    table = state.params.get(TABLE)
    others = {name: w for name, w in state.params.items() if name != TABLE}
    gathered = jnp.zeros((*place.shape, model.features)) if table is None else table[place]

    def loss(others: dict[str, jax.Array], gathered: jax.Array) -> jax.Array:
        vectors = model.embeddings.embed_rows(others, gathered, batch["ids"], lookup(others) if lookup else None)
        logits = model.logits(others, batch["dense"], vectors)
        return optax.sigmoid_binary_cross_entropy(logits, batch["label"].astype(jnp.float32)).mean()

    value, (slopes, of_rows) = jax.value_and_grad(loss, (0, 1))(others, gathered)
    params, squares = {}, {}
    for name, slope in slopes.items():
        own = core_rate if core_rate is not None and "/core" in name else rate
        if rule != "sgd":
            squares[name] = state.squares[name] + jnp.square(slope)
            slope = jnp.where(squares[name] > 0, slope * jax.lax.rsqrt(squares[name] + EPS), 0)
        params[name] = state.params[name] - own * slope
    if table is not None:
        gradient = make_row_gradient(place.reshape(-1), of_rows.reshape(-1, model.features), len(table))
        if rule == "sgd":
            params[TABLE] = sgd_rows(table, gradient, rate)
        else:
            rows = adagrad_rows if rule == "adagrad" else rowwise_adagrad_rows
            params[TABLE], squares[TABLE] = rows(table, state.squares[TABLE], gradient, rate)
    return SparseState(params, squares), value
