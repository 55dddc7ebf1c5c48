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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from multipod.errors import RecipeError
from multipod.nn.model import Batch, Params, Statistics
from multipod.nn.tensor_train import Cores, TensorTrain, tensor_train
from multipod.nn.tensor_train_bag import Way, bag
from multipod.nn.tensor_train_init import Distribution, Scale, initial_cores

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
    give NaN. (`multipod.data.criteo` checks them when it reads.) `params` is a flat dictionary: `bottom/0/kernel` and
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
      tt_rank: of every bond.
      tt_cores: cores of a tensor train.
      tt_init: distribution of the cores' entries.
      tt_scale: of the cores, see `multipod.nn.tensor_train_init`.
      hash_rows: larger tables have so many rows, and ids are taken modulo that; 0 leaves them. Not with tensor trains.
      lookup: how tensor trains are looked up, see `multipod.nn.tensor_train_bag`.
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

    def notes(self) -> dict[str, str]:
        """What a run says of the tables at its end."""
        mib = 4 * self.table_parameters / 2**20
        small = f", {self.compression:.1f} times smaller than dense" if self.compression > 1 else ""
        kinds = f"{len(self.trains)} of {len(self.rows)} as tensor trains" if self.trains else f"{len(self.rows)}"
        return {"tables": f"{kinds}, {mib:.3g} MiB{small}"}

    def init(self, key: jax.Array) -> tuple[Params, Statistics]:
        """Normal layers of deviation sqrt(2 / (in + out)), biases sqrt(1 / out); tables uniform in +-1 / sqrt(rows)."""
        layers_key, tables_key, cores_key = jax.random.split(key, 3)
        # One draw for all layers and one for all tables: XLA takes seconds to compile each on a CPU.
        normal = _Draws(jax.random.normal, layers_key, sum(self.layer_parameters.values()))
        uniform = _Draws(_uniform, tables_key, self.features * sum(self.dense_rows.values()))
        params: dict[str, jax.Array] = {}
        for name, (m, n) in self.layers.items():
            fan_in = m
            if name == "top/0":  # as if it had only the rows of the pairs, whichever form the interaction has
                fan_in = self.features + len(self.rows) * (len(self.rows) + 1) // 2
            params[f"{name}/kernel"] = math.sqrt(2 / (fan_in + n)) * normal.next((m, n))
            params[f"{name}/bias"] = math.sqrt(1 / n) * normal.next((n,))
        if self.dense_rows:
            scale = np.repeat([rows**-0.5 for rows in self.dense_rows.values()], list(self.dense_rows.values()))
            params["tables/dense"] = uniform.next((len(scale), self.features)) * scale[:, None].astype(np.float32)
        for number, tt in self.trains.items():
            cores = initial_cores(tt, jax.random.fold_in(cores_key, number), self.tt_init, self.tt_scale)
            params |= {f"tables/{number}/core{k}": core for k, core in enumerate(cores)}
        return params, {}

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[jax.Array, Statistics]:
        """Logits [examples]; see `Model`."""
        vectors = self.embedded(params, batch["ids"])
        return self.scored(params, batch["dense"], vectors), statistics

    def embedded(self, params: Params, ids: jax.Array) -> jax.Array:
        """The vectors of the ids [examples, sum of hots], those of one field added up: [examples, fields, features]."""
        if ids.shape[-1] != sum(self._hots):
            raise RecipeError(
                f"Dlrm: ids of shape {ids.shape}, and {len(self.rows)} fields take {sum(self._hots)} a row. Give rows "
                "and hots as the data have them."
            )
        place = self.dense_places(ids)
        return self.vectors(params, _gathered(params["tables/dense"], place) if self.dense_rows else place, ids)

    def dense_places(self, ids: jax.Array) -> jax.Array:
        """Where the ids of the fields with dense tables lie in `tables/dense`, [examples, number]; -1: nowhere."""
        columns, sizes, begins = _dense_columns(self)
        own = ids[:, columns]
        limits = np.array(self.rows, np.int32)[np.repeat(np.arange(len(self.rows)), self._hots)][columns]
        return jnp.where((own >= 0) & (own < limits), (own % sizes if self.hash_rows else own) + begins, -1)

    def vectors(
        self, params: Params, gathered: jax.Array, ids: jax.Array, lookup: Callable[..., jax.Array] | None = None
    ) -> jax.Array:
        """`embedded`, from the rows [examples, places, features] that were gathered at `dense_places`.

        So that the rows can be differentiated in place of the whole table. `lookup(number, tt, cores, ids)` gives the
        vectors of a tensor train in another way than this, with a cache for example.
        """
        ends, done = np.cumsum([0, *self._hots]), 0
        fields = []
        for number in range(len(self.rows)):
            hot = self._hots[number]
            if number in self.trains:
                cores = tuple(params[f"tables/{number}/core{k}"] for k in range(self.tt_cores))
                own = ids[:, ends[number] : ends[number + 1]]
                fields.append((lookup or self._train)(number, self.trains[number], cores, own))
            else:
                fields.append(gathered[:, done] if hot == 1 else gathered[:, done : done + hot].sum(1))
                done += hot
        return jnp.stack(fields, 1)

    def scored(self, params: Params, dense: jax.Array, vectors: jax.Array) -> jax.Array:
        """Logits from dense features [examples, dense] and vectors [examples, fields, features]."""
        x = _mlp(params, "bottom", dense, len(self.bottom) + 1, last=True)
        z = interacted(jnp.concatenate([x[:, None], vectors], 1), self.interaction)
        return _mlp(params, "top", jnp.concatenate([x, z], 1), len(self.top) + 1, last=False)[:, 0]

    @property
    def _hots(self) -> tuple[int, ...]:
        return self.hots or (1,) * len(self.rows)

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


def _gathered(table: jax.Array, place: jax.Array) -> jax.Array:
    """The rows at these places; NaN at -1."""
    return jnp.where((place >= 0)[..., None], table[jnp.maximum(place, 0)], jnp.nan)


@functools.lru_cache(maxsize=32)
def _dense_columns(model: Dlrm) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the fields with dense tables: their columns of the ids, for each the rows of its table and its first row."""
    ends = np.cumsum([0, *model._hots])
    columns = [np.arange(ends[number], ends[number + 1]) for number in model.dense_rows]
    counts = [len(own) for own in columns]
    begins = np.cumsum([0, *model.dense_rows.values()])[:-1]
    sizes = np.array(list(model.dense_rows.values()), np.int64)
    flat = np.concatenate(columns) if columns else np.zeros(0, np.int64)
    return flat, np.repeat(sizes, counts).astype(np.int32), np.repeat(begins, counts).astype(np.int32)


def _mlp(params: Params, part: str, x: jax.Array, layers: int, last: bool) -> jax.Array:
    for k in range(layers):
        x = x @ params[f"{part}/{k}/kernel"] + params[f"{part}/{k}/bias"]
        x = jax.nn.relu(x) if last or k < layers - 1 else x
    return x


def _uniform(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    return jax.random.uniform(key, shape, minval=-1)


class _Draws:
    """Random numbers, drawn at once and handed out in parts."""

    def __init__(self, draw: Any, key: jax.Array, count: int) -> None:
        self.numbers, self.used = draw(key, (count,)), 0

    def next(self, shape: Sequence[int]) -> jax.Array:
        size = math.prod(shape)
        self.used += size
        return self.numbers[self.used - size : self.used].reshape(shape)
