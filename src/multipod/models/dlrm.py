"""DLRM, the recommendation model of MLPerf: dense features and ids in, one logit out.

    x_0 = bottom MLP(dense)                                 ReLU after every layer, the last too
    x_f = the sum of the vectors of field f's ids           f = 1 .. 26, from a table each
    z   = x_0, and x_i . x_j for all pairs i > j            the dot interaction, or a cross network's (DCN-v2)
    y   = top MLP(z)                                        ReLU between layers; a logit

A table is dense, or a tensor train (TT-Rec), or hashed into fewer rows, chosen by its size.

Source: Naumov et al., 2019, arXiv:1906.00091, and the authors' code; interactions: `dlrm_interactions.py`; tensor
trains: arXiv:2101.11714. The loss is one of logits; theirs has a sigmoid in the model.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

from multipod.errors import RecipeError
from multipod.models import dlrm_hot, dlrm_tables
from multipod.models.dlrm_embeddings import Embeddings
from multipod.models.dlrm_hot import Hot
from multipod.models.dlrm_interactions import DotInteraction, Interaction
from multipod.models.dlrm_tables import TablePlacement
from multipod.nn.dims import Dims
from multipod.nn.model import Moved
from multipod.nn.tables.tensor_train_bag import Way
from multipod.nn.tables.tensor_train_init import Distribution, Scale
from multipod.pytrees import Batch, IdRange, Params, Statistics


@dataclass(frozen=True)
class Dlrm:
    """A DLRM; `dlrm_published.py` has the published ones.

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
      interaction: what brings the vectors together (`multipod.models.dlrm_interactions`).
      tt_rows: tables with at least so many rows are tensor trains; 0 leaves all dense.
      tt_rank: of every bond; no larger than any bond of these tables can have.
      tt_cores: cores of a tensor train.
      tt_init: distribution of the cores' entries.
      tt_scale: of the cores, see `multipod.nn.tables.tensor_train_init`.
      hash_rows: larger tables have so many rows, and ids are taken modulo that; 0 leaves them. Not with tensor trains.
      lookup: how tensor trains are looked up, see `multipod.nn.tables.tensor_train_bag`.
      tables: how dense tables lie; with `--layout expert=N` over N devices.
      hot: the cache of hot rows beside tensor trains.
    """

    rows: tuple[int, ...]
    features: int = 16
    dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 256)
    hots: tuple[int, ...] = ()
    interaction: Interaction = field(default_factory=DotInteraction)
    tt_rows: int = 0
    tt_rank: int = 16
    tt_cores: int = 3
    tt_init: Distribution = "sampled-gaussian"
    tt_scale: Scale = "exact"
    hash_rows: int = 0
    lookup: Way = "auto"
    tables: TablePlacement = field(default_factory=TablePlacement)
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
        wrong += [*self.interaction.wrong(), *self.hot.wrong(), *self.tables.wrong()]
        if self.hot.share and not self.tt_rows:
            wrong.append(f"hot.share={self.hot.share} with tt_rows=0 (rows are cached of tensor trains)")
        wrong += [] if wrong else self.embeddings.impossible_ranks()
        if wrong:
            raise RecipeError(f"Dlrm: {', '.join(wrong)}. Change it in the recipe or with --set.")

    @property
    def embeddings(self) -> Embeddings:
        """The tables, and how ids are looked up in them."""
        return _embeddings(self)

    @property
    def layers(self) -> dict[str, tuple[int, int]]:
        """The sizes, (in, out), of all layers by name."""
        below = (self.dense, *self.bottom, self.features)
        above = (self.interaction.outputs(*self.vectors), *self.top, 1)
        named = {f"bottom/{k}": size for k, size in enumerate(itertools.pairwise(below))}
        return named | {f"top/{k}": size for k, size in enumerate(itertools.pairwise(above))}

    @property
    def vectors(self) -> tuple[int, int]:
        """How many vectors the interaction takes, and the features of each."""
        return len(self.rows) + 1, self.features

    @property
    def layer_parameters(self) -> dict[str, int]:
        """Numbers in the `bottom` and in the `top` MLP, and in the `cross` network if there is one."""
        sizes = {name: (m + 1) * n for name, (m, n) in self.layers.items()}
        sizes |= {name: math.prod(shape) for name, shape in self.interaction.shapes(*self.vectors).items()}
        counts: dict[str, int] = {}
        for name, size in sizes.items():
            part = name.partition("/")[0]
            counts[part] = counts.get(part, 0) + size
        return counts

    def dims(self) -> dict[str, Dims]:
        """Names of the dims that a layout may split (`multipod.nn.dims`)."""
        return {name: dlrm_tables.DIMS[name] for name in self.embeddings.arrays if name in dlrm_tables.DIMS}

    def notes(self, statistics: Statistics) -> dict[str, str]:
        """What a run says of the tables at its end."""
        tables, trains = self.embeddings, len(self.embeddings.trains)
        mib = 4 * tables.parameters / 2**20
        small = f", {tables.compression:.1f} times smaller than dense" if tables.compression > 1 else ""
        kinds = f"{trains} of {len(self.rows)} as tensor trains" if trains else f"{len(self.rows)}"
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
            fan_in = self.interaction.fan_in(*self.vectors) if name == "top/0" else m
            params[f"{name}/kernel"] = math.sqrt(2 / (fan_in + n)) * normal.next((m, n))
            params[f"{name}/bias"] = math.sqrt(1 / n) * normal.next((n,))
        params |= self.interaction.init(normal.next, *self.vectors)
        params |= self.embeddings.init(tables_key, cores_key)
        cached, statistics = dlrm_hot.empty_caches(self.embeddings.trains, self.hot) if self.hot.share else ({}, {})
        return params | cached, statistics

    def apply(
        self, params: Params, statistics: Statistics, batch: Batch, *, train: bool, key: jax.Array
    ) -> tuple[jax.Array, Statistics]:
        """Logits [examples]; see `Model`."""
        tables, ids = self.embeddings, batch["ids"]
        if not self.hot.share:
            return self.logits(params, batch["dense"], tables.embed(params, ids)), statistics
        lookup = dlrm_hot.lookup(params, statistics, self.lookup)
        logits = self.logits(params, batch["dense"], tables.embed(params, ids, lookup))
        if train:
            statistics = dlrm_hot.count_ids(self.hot, statistics, {n: tables.ids_of(n, ids) for n in tables.trains})
        return logits, statistics

    def ids_taken(self) -> dict[str, IdRange]:
        """The rows of the tables, one for each id of an example."""
        return {"ids": IdRange(self.rows, "rows", self.hots)}

    def check_batch(self, host: Mapping[str, np.ndarray]) -> None:
        """Refuses ids outside their tables, before a batch goes to the devices.

        Raises:
          DataError: with the first such id, its table and its place.
        """
        self.embeddings.check_ids(host["ids"])

    def row_tables(self) -> tuple[str, ...]:
        """The array of replicated tables; what a layout may split has gradients of its size (`ReadsRows`)."""
        return tuple(name for name in self.embeddings.arrays if name not in dlrm_tables.DIMS)

    def rows_read(self, table: str, batch: Batch) -> jax.Array:
        """Which rows of it a batch reads; see `multipod.nn.model.ReadsRows`."""
        return self.embeddings.places(table, batch["ids"])

    def rearranged_params(self) -> tuple[str, ...]:
        """The cores and cached rows, if there is a cache; see `multipod.nn.model.Rearranging`."""
        if not self.hot.share:
            return ()
        cores = [f"tables/{number}/core{k}" for number in self.embeddings.trains for k in range(self.tt_cores)]
        return (*cores, *map(dlrm_hot.name_of, self.embeddings.trains))

    def is_due(self, update: jax.Array) -> jax.Array:
        """Whether the cache is filled or refreshed after this update."""
        return dlrm_hot.is_due(self.hot, update)

    def rearrange(self, params: Params, statistics: Statistics) -> tuple[Params, Statistics, dict[str, Moved]]:
        """The most counted rows cached; see `multipod.models.dlrm_hot`."""
        return dlrm_hot.refresh(self.hot, self.embeddings.trains, params, statistics)

    def logits(self, params: Params, dense: jax.Array, vectors: jax.Array) -> jax.Array:
        """Logits from dense features [examples, dense] and vectors [examples, fields, features]."""
        x = _mlp(params, "bottom", dense, len(self.bottom) + 1, last=True)
        z = self.interaction(params, jnp.concatenate([x[:, None], vectors], 1))
        return _mlp(params, "top", z, len(self.top) + 1, last=False)[:, 0]


@functools.lru_cache(maxsize=32)
def _embeddings(model: Dlrm) -> Embeddings:
    return Embeddings(
        rows=model.rows,
        features=model.features,
        hots=model.hots,
        tt_rows=model.tt_rows,
        tt_rank=model.tt_rank,
        tt_cores=model.tt_cores,
        tt_init=model.tt_init,
        tt_scale=model.tt_scale,
        hash_rows=model.hash_rows,
        lookup=model.lookup,
        tables=model.tables,
    )


def _mlp(params: Params, part: str, x: jax.Array, layers: int, last: bool) -> jax.Array:
    for k in range(layers):
        x = x @ params[f"{part}/{k}/kernel"] + params[f"{part}/{k}/bias"]
        x = jax.nn.relu(x) if last or k < layers - 1 else x
    return x


class _Draws:
    """Random numbers, drawn at once and handed out in parts."""

    def __init__(self, draw: Callable[..., jax.Array], key: jax.Array, count: int) -> None:
        self.numbers, self.used = draw(key, (count,)), 0

    def next(self, shape: Sequence[int]) -> jax.Array:
        size = math.prod(shape)
        self.used += size
        return self.numbers[self.used - size : self.used].reshape(shape)
