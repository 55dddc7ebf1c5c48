"""One training run of the TT-Rec experiment: a small DLRM, one epoch of generated clicks, its exact AUC."""

import functools
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multipod.data.clicks.synthetic import Synthetic
from multipod.metrics.ranking import auc
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_sparse import Rule, SparseState, dense_places, sparse_state, sparse_update
from multipod.nn.tables.hot_rows import bag_with_hot_rows, count_ids, empty_cache, refresh

BATCH = 128


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
      auc: of the test examples.
      accuracy: of the test examples.
      parameters: in tables and cores.
      seconds: of the epoch, without compiling.
    """

    auc: float
    accuracy: float
    parameters: int
    seconds: float


def small(data: Synthetic, **fields: Any) -> Dlrm:
    """The model of all runs: 16 features, bottom 13-64-16, top 64-1; the three largest tables as `fields` say."""
    return Dlrm(**({"rows": data.rows, "bottom": (64,), "top": (64,)} | fields))


def run(
    model: Dlrm,
    data: Synthetic,
    rule: Rule,
    rate: float,
    core_rate: float | None = None,
    cache: float = 0.0,
    seed: int = 0,
) -> Result:
    """One epoch in the order of generation (the examples are independent), then the test.

    `cache`: the share of rows of each tensor train that are cached after the first tenth of the epoch.
    """
    batches = _batches(data.train().arrays)
    params = jax.jit(lambda: model.init(jax.random.key(seed))[0])()
    hot: dict[str, Any] = {}
    if cache:
        for number, tt in model.embeddings.trains.items():
            params[f"hot/{number}"], hot[str(number)] = empty_cache(tt, max(1, round(cache * tt.rows)))
    state = sparse_state(params, rule)
    warm = len(batches["label"]) // 10 if cache else 0
    start = time.perf_counter()
    if cache:
        state, hot = _epoch(model, rule, rate, core_rate, True, state, hot, {n: a[:warm] for n, a in batches.items()})
        state, hot = _refreshed(model, state, hot)
    state, hot = _epoch(model, rule, rate, core_rate, False, state, hot, {n: a[warm:] for n, a in batches.items()})
    jax.block_until_ready(state)
    seconds = time.perf_counter() - start
    test = data.test().arrays
    logits = np.asarray(_logits(model, state.params, hot, test["dense"], test["ids"]))
    return Result(
        auc(test["label"], logits),
        float(np.mean((logits > 0) == (test["label"] == 1))),
        model.embeddings.parameters,
        seconds,
    )


def _batches(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    count = len(arrays["label"]) // BATCH
    return {name: array[: count * BATCH].reshape(count, BATCH, *array.shape[1:]) for name, array in arrays.items()}


@functools.partial(jax.jit, static_argnums=(0, 1, 4), donate_argnums=5)
def _epoch(
    model: Dlrm,
    rule: Rule,
    rate: Any,
    core_rate: Any,
    counts: bool,
    state: SparseState,
    hot: dict[str, Any],
    batches: Any,
) -> tuple[SparseState, dict[str, Any]]:
    def one(carry: Any, batch: Any) -> tuple[Any, jax.Array]:
        state, hot = carry
        offsets = jnp.arange(BATCH + 1, dtype=jnp.int32)
        if counts:
            hot = {number: count_ids(own, batch["ids"][:, int(number)], offsets) for number, own in hot.items()}
        state, loss = sparse_update(model, state, batch, rule, rate, core_rate, _lookup(hot))
        return (state, hot), loss

    return jax.lax.scan(one, (state, hot), batches)[0]


def _lookup(hot: dict[str, Any]) -> Any:
    """How tensor trains with a cache are looked up; None without."""
    if not hot:
        return None

    def with_params(params: Any) -> Any:
        def lookup(number: int, tt: Any, cores: Any, ids: jax.Array) -> jax.Array:
            offsets = jnp.arange(len(ids) + 1, dtype=jnp.int32)
            return bag_with_hot_rows(tt, cores, params[f"hot/{number}"], hot[str(number)], ids[:, 0], offsets)

        return lookup

    return with_params


def _refreshed(model: Dlrm, state: SparseState, hot: dict[str, Any]) -> tuple[SparseState, dict[str, Any]]:
    """Caches filled with the rows most counted; their optimizer state stays that of rows without gradient."""
    params, caches = dict(state.params), dict(hot)
    for number, tt in model.embeddings.trains.items():
        names = [f"tables/{number}/core{k}" for k in range(model.tt_cores)]
        cores = tuple(params[name] for name in names)
        fill = jax.jit(functools.partial(refresh, tt))
        _, params[f"hot/{number}"], caches[str(number)], _ = fill(cores, params[f"hot/{number}"], hot[str(number)])
    return SparseState(params, state.squares), caches


@functools.partial(jax.jit, static_argnums=0)
def _logits(model: Dlrm, params: Any, hot: dict[str, Any], dense: jax.Array, ids: jax.Array) -> jax.Array:
    table = params.get("tables/dense")
    place = dense_places(model, ids)
    gathered = jnp.zeros((*place.shape, model.features)) if table is None else table[place]
    lookup = _lookup(hot)
    return model.logits(
        params, dense, model.embeddings.embed_rows(params, gathered, ids, lookup(params) if lookup else None)
    )
