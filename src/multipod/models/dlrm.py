"""DLRM, the recommendation model of MLPerf: dense features and ids in, one logit out.

    x_0 = bottom MLP(dense)                                 ReLU after every layer, the last too
    x_f = the sum of the vectors of field f's ids           f = 1 .. 26, from a table each
    z   = x_0, and x_i . x_j for all pairs i > j            the dot interaction
    y   = top MLP(z)                                        ReLU between layers; a logit

A table is dense, or a tensor train (TT-Rec), or hashed into fewer rows, chosen by its size.

Source: Naumov et al., 2019, arXiv:1906.00091, and the authors' code; the masked interaction: the multipod's submission
(arXiv:2011.03641); tensor trains: arXiv:2101.11714. The loss is one of logits; theirs has a sigmoid in the model.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from multipod.errors import DataError, RecipeError
from multipod.models import dlrm_hot, dlrm_tables
from multipod.models.dlrm_hot import Hot
from multipod.models.dlrm_tables import Packed, Tables
from multipod.nn import sharded_tables
from multipod.nn.dims import Dims
from multipod.nn.model import Moved, rows_name
from multipod.nn.tensor_train import Cores, TensorTrain, tensor_train
from multipod.nn.tensor_train_bag import Way, bag
from multipod.nn.tensor_train_init import Distribution, Scale, initial_cores
from multipod.pytrees import Batch, Params, Statistics

Lookup = Callable[..., jax.Array]

KAGGLE_ROWS = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992, 5_461_306, 10,
    5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""Distinct ids of Criteo's Kaggle set, by field; 33,762,577 together."""

TERABYTE_10M_ROWS = (
    9_980_333, 36_084, 17_217, 7378, 20_134, 3, 7112, 1442, 61, 9_758_201, 1_333_352, 313_829, 10, 2208, 11_156, 122, 4,
    970, 14, 9_994_222, 7_267_859, 9_946_608, 415_421, 12_420, 101, 36,
)  # fmt: skip
"""Distinct ids of Criteo's Terabyte set modulo 10 M, negatives sub-sampled; 49,126,297 together."""

MLPERF_ROWS = (
    39_884_406, 39_043, 17_289, 7420, 20_263, 3, 7120, 1543, 63, 38_532_951, 2_953_546, 403_346, 10, 2208, 11_938, 155,
    4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36,
)  # fmt: skip
"""Distinct ids of Criteo's Terabyte set modulo 40 M, as MLPerf trains on it; 187,767,399 together."""


@dataclass(frozen=True)
class Dlrm:
    """A DLRM; `kaggle`, `terabyte` and `mlperf` are the published ones.

    Batches have `dense`, float32 [examples, dense], and `ids`, int32 [examples, sum of hots]; ids outside their table
    give NaN, and `check_batch` refuses them on the host. `params` is a flat dictionary: `bottom/0/kernel` and
    so on; `tables/dense`, all dense tables one below the other, so that one gather serves them all; `tables/2/core0`
    and so on, the cores of a tensor train.

    Attributes:
      rows: of each table.
      features: of a vector, and of the last bottom layer.
      dense: dense features.
      bottom: hidden sizes of the bottom MLP.
      top: hidden sizes of the top MLP; a layer of one follows.
      hots: ids of each field in an example; empty is one each.
      interaction: "gather" takes the pairs below the diagonal; "masked" zeroes the others and gives all products to
        a first top layer with rows for them, which suits chips with matrix units. Their values are equal.
      tt_rows: tables with at least so many rows are tensor trains; 0 leaves all dense.
      tt_rank: of every bond; no larger than any bond of these tables can have.
      tt_cores: cores of a tensor train.
      tt_init: distribution of the cores' entries.
      tt_scale: of the cores, see `multipod.nn.tensor_train_init`.
      hash_rows: larger tables have so many rows, and ids are taken modulo that; 0 leaves them. Not with tensor trains.
      lookup: how tensor trains are looked up, see `multipod.nn.tensor_train_bag`.
      tables: how dense tables lie; with `--layout expert=N` over N devices.
      hot: the cache of hot rows beside tensor trains.
    """

    rows: tuple[int, ...]
    features: int = 16
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)
    hots: tuple[int, ...] = ()
    interaction: Literal["gather", "masked"] = "gather"
    tt_rows: int = 0
    tt_rank: int = 16
    tt_cores: int = 3
    tt_init: Distribution = "sampled-gaussian"
    tt_scale: Scale = "exact"
    hash_rows: int = 0
    lookup: Way = "auto"
    tables: Tables = field(default_factory=Tables)
    hot: Hot = field(default_factory=Hot)

    def __post_init__(self) -> None:
        wrong = []
        if not self.rows or min(self.rows) < 1:
            wrong.append(f"rows={self.rows} (at least 1 each)")
        least = {"features": 1, "dense": 1, "tt_rank": 1, "tt_cores": 2}
        wrong += [f"{n}={getattr(self, n)} (at least {low})" for n, low in least.items() if getattr(self, n) < low]
        if self.hots and (len(self.hots) != len(self.rows) or min(self.hots) < 1):
            wrong.append(f"{len(self.hots)} hots for {len(self.rows)} tables (one each, at least 1)")
        if self.hash_rows and self.tt_rows:
            wrong.append(f"hash_rows={self.hash_rows} with tt_rows={self.tt_rows} (one of them)")
        wrong += [*self.hot.wrong(), *self.tables.wrong()]
        if self.hot.share and not self.tt_rows:
            wrong.append(f"hot.share={self.hot.share} with tt_rows=0 (rows are cached of tensor trains)")
        wrong += [] if wrong else _ranks_that_cannot_be(self)
        if wrong:
            raise RecipeError(f"Dlrm: {', '.join(wrong)}. Change it in the recipe or with --set.")

    @property
    def trains(self) -> dict[int, TensorTrain]:
        """The tables that are tensor trains, by their number."""
        return _trains(self)

    @property
    def dense_rows(self) -> dict[int, int]:
        """Rows of the tables that are not, by their number."""
        kept = {number: n for number, n in enumerate(self.rows) if number not in self.trains}
        return {number: min(n, self.hash_rows) if self.hash_rows else n for number, n in kept.items()}

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """The sizes, (in, out), of all layers by name."""
        below = (self.dense, *self.bottom, self.features)
        above = (self.features + self.interactions, *self.top, 1)
        named = {f"bottom/{k}": size for k, size in enumerate(itertools.pairwise(below))}
        return named | {f"top/{k}": size for k, size in enumerate(itertools.pairwise(above))}

    @property
    def interactions(self) -> int:
        """Products that the top MLP takes: pairs, or the whole square."""
        vectors = len(self.rows) + 1
        return vectors * (vectors - 1) // 2 if self.interaction == "gather" else vectors**2

    @property
    def table_parameters(self) -> int:
        """Numbers in all tables and cores."""
        trained = sum(tt.parameters for tt in self.trains.values())
        return trained + self.features * sum(self.dense_rows.values())

    @property
    def layer_parameters(self) -> dict[str, int]:
        """Numbers in the `bottom` and in the `top` MLP."""
        sizes = {name: (m + 1) * n for name, (m, n) in self.layers.items()}
        return {part: sum(n for name, n in sizes.items() if name.startswith(part)) for part in ("bottom", "top")}

    @property
    def compression(self) -> float:
        """Numbers of dense tables over those of these; the MLPs not counted."""
        return self.features * sum(self.rows) / self.table_parameters

    @property
    def arrays(self) -> dict[str, Packed]:
        """The arrays of dense tables, by name."""
        return _arrays(self)

    def dims(self) -> dict[str, Dims]:
        """Names of the dims that a layout may split (`multipod.nn.dims`)."""
        return {name: dlrm_tables.DIMS[name] for name in self.arrays if name in dlrm_tables.DIMS}

    def notes(self, statistics: Statistics) -> dict[str, str]:
        """What a run says of the tables at its end."""
        mib = 4 * self.table_parameters / 2**20
        small = f", {self.compression:.1f} times smaller than dense" if self.compression > 1 else ""
        kinds = f"{len(self.trains)} of {len(self.rows)} as tensor trains" if self.trains else f"{len(self.rows)}"
        return {"tables": f"{kinds}, {mib:.3g} MiB{small}"} | dlrm_hot.notes(statistics)

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Normal layers of deviation sqrt(2 / (in + out)), biases sqrt(1 / out); tables uniform in +-1 / sqrt(rows).

        A row of a dense table begins the same wherever it lies.
        """
        layers_key, tables_key, cores_key = jax.random.split(key, 3)
        # One draw for all layers: XLA takes seconds to compile each on a CPU.
        normal = _Draws(jax.random.normal, layers_key, sum(self.layer_parameters.values()))
        params: dict[str, jax.Array] = {}
        for name, (m, n) in self.layers.items():
            fan_in = m
            if name == "top/0":  # as if it had only the rows of the pairs, whichever form the interaction has
                fan_in = self.features + len(self.rows) * (len(self.rows) + 1) // 2
            params[f"{name}/kernel"] = math.sqrt(2 / (fan_in + n)) * normal.next((m, n))
            params[f"{name}/bias"] = math.sqrt(1 / n) * normal.next((n,))
        begins = dict(zip(self.dense_rows, itertools.accumulate(self.dense_rows.values(), initial=0), strict=False))
        for name, array in self.arrays.items():
            params[name] = _initial_rows(tables_key, array, begins, self.features)
        for number, tt in self.trains.items():
            cores = initial_cores(tt, jax.random.fold_in(cores_key, number), self.tt_init, self.tt_scale)
            params |= {f"tables/{number}/core{k}": core for k, core in enumerate(cores)}
        cached, statistics = dlrm_hot.fresh(self.trains, self.hot) if self.hot.share else ({}, {})
        return params | cached, statistics

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[jax.Array, Statistics]:
        """Logits [examples]; see `Model`."""
        if not self.hot.share:
            return self.scored(params, batch["dense"], self.embedded(params, batch["ids"])), statistics
        lookup = dlrm_hot.lookup(params, statistics, self.lookup)
        logits = self.scored(params, batch["dense"], self.embedded(params, batch["ids"], lookup))
        if train:
            statistics = dlrm_hot.counted(self.hot, statistics, {n: self._own(batch["ids"], n) for n in self.trains})
        return logits, statistics

    def check_batch(self, host: Mapping[str, np.ndarray]) -> None:
        """Refuses ids outside their tables, before a batch goes to the devices.

        Raises:
          DataError: with the first such id, its table and its place.
        """
        ids = host["ids"]
        if ids.shape[-1] != sum(self._hots):
            return  # `embedded` says that
        limits = np.repeat(np.array(self.rows), self._hots)
        outside = (ids < 0) | (ids >= limits)
        if outside.any():
            example, column = map(int, np.argwhere(outside)[0])
            number = int(np.searchsorted(np.cumsum(self._hots), column, side="right"))
            raise DataError(
                f"table {number}: id {ids[example, column]} in row {example} of a batch is outside its "
                f"{self.rows[number]:,} rows, the first of {np.count_nonzero(outside):,} such ids. Give the model "
                "the rows that the data have (model.rows), or mend the data."
            )

    def embedded(self, params: Params, ids: jax.Array, lookup: Lookup | None = None) -> jax.Array:
        """The vectors of the ids [examples, sum of hots], those of one field added up: [examples, fields, features]."""
        if ids.shape[-1] != sum(self._hots):
            raise RecipeError(
                f"Dlrm: ids of shape {ids.shape}, and {len(self.rows)} fields take {sum(self._hots)} a row. Give rows "
                "and hots as the data have them."
            )
        found: dict[int, jax.Array] = {}
        for name, array in self.arrays.items():
            fields, whole = array.fields(self._hots), (array.rows, self.features)
            read, places = params.get(rows_name(name)), self.places(name, ids)
            if read is None:
                vectors = dlrm_tables.looked_up(name, params[name], places, fields, whole)
            else:
                vectors = sharded_tables.pooled(read, places, fields)
            found |= {number: vectors[:, k] for k, number in enumerate(array.numbers)}
        return self._all_vectors(params, found, ids, lookup)

    def row_tables(self) -> tuple[str, ...]:
        """The array of replicated tables; what a layout may split has gradients of its size (`ReadsRows`)."""
        return tuple(name for name in self.arrays if name not in dlrm_tables.DIMS)

    def rows_read(self, table: str, batch: Batch) -> jax.Array:
        """Which rows of it a batch reads; see `multipod.nn.model.ReadsRows`."""
        return self.places(table, batch["ids"])

    def places(self, name: str, ids: jax.Array) -> jax.Array:
        """Where the ids of the fields of an array of tables lie in it, [examples, number]; -1: nowhere."""
        columns, limits, sizes, begins = _columns(self, name)
        own = ids[:, columns]
        return jnp.where((own >= 0) & (own < limits), (own % sizes if self.hash_rows else own) + begins, -1)

    def vectors(self, params: Params, gathered: jax.Array, ids: jax.Array, lookup: Lookup | None = None) -> jax.Array:
        """`embedded`, from the rows [examples, places, features] that were gathered at the `places` of `tables/dense`.

        So that the rows can be differentiated in place of the whole table. `lookup(number, tt, cores, ids)` gives the
        vectors of a tensor train in another way than this, with a cache for example.
        """
        found, done = {}, 0
        for number in self.dense_rows:
            hot = self._hots[number]
            found[number] = gathered[:, done] if hot == 1 else gathered[:, done : done + hot].sum(1)
            done += hot
        return self._all_vectors(params, found, ids, lookup)

    def _all_vectors(
        self, params: Params, dense: dict[int, jax.Array], ids: jax.Array, lookup: Lookup | None
    ) -> jax.Array:
        """The vectors of all fields in their order: of dense tables as given, of tensor trains looked up."""
        found = dict(dense)
        for number, tt in self.trains.items():
            cores = tuple(params[f"tables/{number}/core{k}"] for k in range(self.tt_cores))
            found[number] = (lookup or self._train)(number, tt, cores, self._own(ids, number))
        return jnp.stack([found[number] for number in range(len(self.rows))], 1)

    def rearranges(self) -> tuple[str, ...]:
        """The cores and cached rows, if there is a cache; see `multipod.nn.model.Rearranging`."""
        if not self.hot.share:
            return ()
        cores = [f"tables/{number}/core{k}" for number in self.trains for k in range(self.tt_cores)]
        return (*cores, *map(dlrm_hot.name_of, self.trains))

    def is_due(self, update: jax.Array) -> jax.Array:
        """Whether the cache is filled or refreshed after this update."""
        return dlrm_hot.is_due(self.hot, update)

    def rearranged(self, params: Params, statistics: Statistics) -> tuple[Params, Statistics, dict[str, Moved]]:
        """The most counted rows cached; see `multipod.models.dlrm_hot`."""
        return dlrm_hot.refreshed(self.hot, self.trains, params, statistics)

    def scored(self, params: Params, dense: jax.Array, vectors: jax.Array) -> jax.Array:
        """Logits from dense features [examples, dense] and vectors [examples, fields, features]."""
        x = _mlp(params, "bottom", dense, len(self.bottom) + 1, last=True)
        z = interacted(jnp.concatenate([x[:, None], vectors], 1), self.interaction)
        return _mlp(params, "top", jnp.concatenate([x, z], 1), len(self.top) + 1, last=False)[:, 0]

    @property
    def _hots(self) -> tuple[int, ...]:
        return self.hots or (1,) * len(self.rows)

    def _own(self, ids: jax.Array, number: int) -> jax.Array:
        """The ids of a field."""
        end = sum(self._hots[: number + 1])
        return ids[:, end - self._hots[number] : end]

    def _train(self, number: int, tt: TensorTrain, cores: Cores, ids: jax.Array) -> jax.Array:
        """The vectors of a field whose table is a tensor train."""
        offsets = jnp.arange(0, ids.size + 1, ids.shape[1], dtype=jnp.int32)
        return bag(tt, cores, ids.reshape(-1), offsets, way=self.lookup, table=f"table {number}")


def interacted(vectors: jax.Array, form: Literal["gather", "masked"]) -> jax.Array:
    """The dot products x_i . x_j of vectors [examples, n, features], i > j.

    "gather": [examples, n (n - 1) / 2], row by row: (1, 0), (2, 0), (2, 1), ... "masked": the whole square, [examples,
    n^2], with zeros on and above the diagonal; entry n i + j is x_i . x_j.
    """
    n = vectors.shape[1]
    products = jnp.einsum("eif,ejf->eij", vectors, vectors)
    below = np.tril(np.ones((n, n), bool), -1)
    if form == "masked":
        return jnp.where(below, products, 0).reshape(len(vectors), n * n)
    return products.reshape(len(vectors), n * n)[:, np.flatnonzero(below)]


def masked_from_gathered(kernel: jax.Array, features: int, vectors: int) -> jax.Array:
    """The first top kernel of the masked form from that of the gather form: the same logits, bit for bit in exact sums.

    Rows that only ever meet zeros are zero.
    """
    below = np.flatnonzero(np.tril(np.ones((vectors, vectors), bool), -1))
    square = jnp.zeros((vectors**2, kernel.shape[1]), kernel.dtype).at[below].set(kernel[features:])
    return jnp.concatenate([kernel[:features], square])


def kaggle(**fields: Any) -> Dlrm:
    """The DLRM of Criteo's Kaggle set: 16 features, 540.2 M parameters in 26 tables."""
    return Dlrm(**({"rows": KAGGLE_ROWS} | fields))


def terabyte(**fields: Any) -> Dlrm:
    """The DLRM of Criteo's Terabyte set modulo 10 M: 64 features."""
    sizes: dict[str, Any] = {"rows": TERABYTE_10M_ROWS, "features": 64, "bottom": (512, 256), "top": (512, 512, 256)}
    return Dlrm(**(sizes | fields))


def mlperf(**fields: Any) -> Dlrm:
    """MLPerf's DLRM (v0.7 to v2.1): 128 features, 24.03 G parameters in tables; 171,392 below, 2,197,505 on top."""
    sizes: dict[str, Any] = {"rows": MLPERF_ROWS, "features": 128, "bottom": (512, 256), "top": (1024, 1024, 512, 256)}
    return Dlrm(**(sizes | fields))


@functools.lru_cache(maxsize=32)
def _trains(model: Dlrm) -> dict[int, TensorTrain]:
    if not model.tt_rows:
        return {}
    large = {number: n for number, n in enumerate(model.rows) if n >= model.tt_rows}
    return {number: tensor_train(n, model.features, model.tt_rank, cores=model.tt_cores) for number, n in large.items()}


def _ranks_that_cannot_be(model: Dlrm) -> list[str]:
    """The tables of which a bond cannot have `tt_rank`, and what all could have."""
    most = {number: min(tt.ranks) for number, tt in _trains(model).items() if min(tt.ranks) < model.tt_rank}
    if not most:
        return []
    named = [f"table {number} of {model.rows[number]:,} rows {rank}" for number, rank in most.items()]
    return [
        f"tt_rank={model.tt_rank} (larger than {', '.join(named)} can have; at most {min(most.values())}, or tt_rows="
        f"{max(model.rows[number] for number in most) + 1} to leave them dense)"
    ]


@functools.lru_cache(maxsize=32)
def _arrays(model: Dlrm) -> dict[str, Packed]:
    return dlrm_tables.packed(model.dense_rows, model.features, model.tables) if model.dense_rows else {}


@functools.lru_cache(maxsize=64)
def _columns(model: Dlrm, name: str) -> tuple[np.ndarray, ...]:
    """Of an array's fields: their columns of the ids; for each its limit, the rows of its table and its first row."""
    array, ends = _arrays(model)[name], np.cumsum([0, *model._hots])
    columns = [np.arange(ends[number], ends[number + 1]) for number in array.numbers]
    counts = [len(own) for own in columns]
    limits = [model.rows[number] for number in array.numbers]
    repeated = [np.repeat(np.array(given, np.int32), counts) for given in (limits, array.sizes, array.begins)]
    return np.concatenate(columns), *repeated


def _initial_rows(key: jax.Array, array: Packed, begins: dict[int, int], features: int) -> jax.Array:
    """The first values of an array of tables. A row's are a function of its number among all rows, not of its place."""
    order = np.argsort(array.begins)
    starts, sizes = (jnp.asarray(np.array(given, np.int32)[order]) for given in (array.begins, array.sizes))
    first = jnp.asarray([begins[array.numbers[k]] for k in order], jnp.int32)
    place = jnp.arange(array.rows, dtype=jnp.int32)
    table = jnp.searchsorted(starts, place, side="right") - 1
    within = place - starts[table]
    scale = jnp.where(within < sizes[table], sizes[table].astype(jnp.float32) ** -0.5, 0)  # room is zero
    draw = lambda row: jax.random.uniform(jax.random.fold_in(key, row), (features,), minval=-1)  # noqa: E731
    return jax.vmap(draw)(first[table] + within) * scale[:, None]


def _mlp(params: Params, part: str, x: jax.Array, layers: int, last: bool) -> jax.Array:
    for k in range(layers):
        x = x @ params[f"{part}/{k}/kernel"] + params[f"{part}/{k}/bias"]
        x = jax.nn.relu(x) if last or k < layers - 1 else x
    return x


class _Draws:
    """Random numbers, drawn at once and handed out in parts."""

    def __init__(self, draw: Any, key: jax.Array, count: int) -> None:
        self.numbers, self.used = draw(key, (count,)), 0

    def next(self, shape: Sequence[int]) -> jax.Array:
        size = math.prod(shape)
        self.used += size
        return self.numbers[self.used - size : self.used].reshape(shape)
