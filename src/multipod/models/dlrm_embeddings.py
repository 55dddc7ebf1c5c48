"""The embeddings of a DLRM: its tables, dense, hashed or as tensor trains, and how ids become vectors."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from multipod.errors import DataError, RecipeError
from multipod.models import dlrm_tables
from multipod.models.dlrm_tables import TableArray, TablePlacement
from multipod.nn.model import rows_name
from multipod.nn.tables import sharded_tables
from multipod.nn.tables.tensor_train import Cores, TensorTrain, tensor_train
from multipod.nn.tables.tensor_train_bag import Way, bag
from multipod.nn.tables.tensor_train_init import Distribution, Scale, initial_cores
from multipod.pytrees import Params

Lookup = Callable[[int, TensorTrain, Cores, jax.Array], jax.Array]
"""From a table's number, its tensor train, cores and ids [examples, hots] to vectors [examples, features]."""


@dataclass(frozen=True)
class Embeddings:
    """The tables of a model, one for each field of ids. The attributes are those of `multipod.models.dlrm.Dlrm`."""

    rows: tuple[int, ...]
    features: int
    hots: tuple[int, ...]
    tt_rows: int
    tt_rank: int
    tt_cores: int
    tt_init: Distribution
    tt_scale: Scale
    hash_rows: int
    lookup: Way
    tables: TablePlacement

    @cached_property
    def trains(self) -> dict[int, TensorTrain]:
        """The tables that are tensor trains, by their number."""
        large = {number: n for number, n in enumerate(self.rows) if self.tt_rows and n >= self.tt_rows}
        return {
            number: tensor_train(n, self.features, self.tt_rank, cores=self.tt_cores) for number, n in large.items()
        }

    @cached_property
    def dense_rows(self) -> dict[int, int]:
        """Rows of the tables that are not, by their number."""
        dense = {number: n for number, n in enumerate(self.rows) if number not in self.trains}
        return {number: min(n, self.hash_rows) if self.hash_rows else n for number, n in dense.items()}

    @cached_property
    def arrays(self) -> dict[str, TableArray]:
        """The arrays of dense tables, by name."""
        return dlrm_tables.pack_tables(self.dense_rows, self.features, self.tables) if self.dense_rows else {}

    @property
    def parameters(self) -> int:
        """Numbers in all tables and cores."""
        return sum(tt.parameters for tt in self.trains.values()) + self.features * sum(self.dense_rows.values())

    @property
    def compression(self) -> float:
        """Numbers of dense tables over those of these."""
        return self.features * sum(self.rows) / self.parameters

    @property
    def ids_per_field(self) -> tuple[int, ...]:
        """Ids of each field in an example."""
        return self.hots or (1,) * len(self.rows)

    def impossible_ranks(self) -> list[str]:
        """The tables of which a bond cannot have `tt_rank`, and what all could have; empty if all can."""
        most = {number: min(tt.ranks) for number, tt in self.trains.items() if min(tt.ranks) < self.tt_rank}
        if not most:
            return []
        named = [f"table {number} of {self.rows[number]:,} rows {rank}" for number, rank in most.items()]
        return [
            f"tt_rank={self.tt_rank} (larger than {', '.join(named)} can have; at most {min(most.values())}, or "
            f"tt_rows={max(self.rows[number] for number in most) + 1} to leave them dense)"
        ]

    def init(self, tables_key: jax.Array, cores_key: jax.Array) -> dict[str, jax.Array]:
        """Fresh tables, uniform in +-1 / sqrt(rows), and cores that stand for such."""
        begins = dict(zip(self.dense_rows, itertools.accumulate(self.dense_rows.values(), initial=0), strict=False))
        params = {name: _initial_rows(tables_key, array, begins, self.features) for name, array in self.arrays.items()}
        for number, tt in self.trains.items():
            cores = initial_cores(tt, jax.random.fold_in(cores_key, number), self.tt_init, self.tt_scale)
            params |= {f"tables/{number}/core{k}": core for k, core in enumerate(cores)}
        return params

    def check_ids(self, ids: np.ndarray) -> None:
        """Refuses ids [examples, sum of hots] outside their tables.

        Raises:
          DataError: with the first such id, its table and its place.
        """
        if ids.shape[-1] != sum(self.ids_per_field):
            return  # `embed` says that
        limits = np.repeat(np.array(self.rows), self.ids_per_field)
        outside = (ids < 0) | (ids >= limits)
        if outside.any():
            example, column = map(int, np.argwhere(outside)[0])
            number = int(np.searchsorted(np.cumsum(self.ids_per_field), column, side="right"))
            raise DataError(
                f"table {number}: id {ids[example, column]} in row {example} of a batch is outside its "
                f"{self.rows[number]:,} rows, the first of {np.count_nonzero(outside):,} such ids. Give the model "
                "the rows that the data have (model.rows), or mend the data."
            )

    def ids_of(self, number: int, ids: jax.Array) -> jax.Array:
        """The ids of a field."""
        end = sum(self.ids_per_field[: number + 1])
        return ids[:, end - self.ids_per_field[number] : end]

    def places(self, name: str, ids: jax.Array) -> jax.Array:
        """Where the ids of the fields of an array of tables lie in it, [examples, number]; -1: nowhere."""
        columns, limits, sizes, begins = _columns(self, name)
        ids = ids[:, columns]
        return jnp.where((ids >= 0) & (ids < limits), (ids % sizes if self.hash_rows else ids) + begins, -1)

    def embed(self, params: Params, ids: jax.Array, lookup: Lookup | None = None) -> jax.Array:
        """The vectors of the ids [examples, sum of hots], those of one field added up: [examples, fields, features].

        `lookup` gives the vectors of a tensor train in another way than this, with a cache for example.
        """
        if ids.shape[-1] != sum(self.ids_per_field):
            raise RecipeError(
                f"Dlrm: ids of shape {ids.shape}, and {len(self.rows)} fields take {sum(self.ids_per_field)} a row. "
                "Give rows and hots as the data have them."
            )
        dense: dict[int, jax.Array] = {}
        for name, array in self.arrays.items():
            fields, shape = array.fields(self.ids_per_field), (array.rows, self.features)
            read, places = params.get(rows_name(name)), self.places(name, ids)
            if read is None:
                vectors = dlrm_tables.look_up(name, params[name], places, fields, shape)
            else:
                vectors = sharded_tables.pool_fields(read, places, fields)
            dense |= {number: vectors[:, k] for k, number in enumerate(array.numbers)}
        return self._stack(params, dense, ids, lookup)

    def embed_rows(self, params: Params, rows: jax.Array, ids: jax.Array, lookup: Lookup | None = None) -> jax.Array:
        """What `embed` gives, from the rows [examples, places, features] that were gathered at `tables/dense`'s places.

        The rows can then be differentiated in place of the whole table.
        """
        dense, done = {}, 0
        for number in self.dense_rows:
            hot = self.ids_per_field[number]
            dense[number] = rows[:, done] if hot == 1 else rows[:, done : done + hot].sum(1)
            done += hot
        return self._stack(params, dense, ids, lookup)

    def _stack(self, params: Params, dense: dict[int, jax.Array], ids: jax.Array, lookup: Lookup | None) -> jax.Array:
        """The vectors of all fields in their order: of dense tables as given, of tensor trains looked up."""
        vectors = dict(dense)
        for number, tt in self.trains.items():
            cores = tuple(params[f"tables/{number}/core{k}"] for k in range(self.tt_cores))
            vectors[number] = (lookup or self._look_up)(number, tt, cores, self.ids_of(number, ids))
        return jnp.stack([vectors[number] for number in range(len(self.rows))], 1)

    def _look_up(self, number: int, tt: TensorTrain, cores: Cores, ids: jax.Array) -> jax.Array:
        offsets = jnp.arange(0, ids.size + 1, ids.shape[1], dtype=jnp.int32)
        return bag(tt, cores, ids.reshape(-1), offsets, way=self.lookup, table=f"table {number}")


@lru_cache(maxsize=64)
def _columns(tables: Embeddings, name: str) -> tuple[np.ndarray, ...]:
    """The columns of the ids of an array's fields; for each its limit, the rows of its table and its first row."""
    array, ends = tables.arrays[name], np.cumsum([0, *tables.ids_per_field])
    columns = [np.arange(ends[number], ends[number + 1]) for number in array.numbers]
    counts = [len(own) for own in columns]
    limits = [tables.rows[number] for number in array.numbers]
    repeated = [np.repeat(np.array(given, np.int32), counts) for given in (limits, array.sizes, array.begins)]
    return np.concatenate(columns), *repeated


def _initial_rows(key: jax.Array, array: TableArray, begins: dict[int, int], features: int) -> jax.Array:
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
