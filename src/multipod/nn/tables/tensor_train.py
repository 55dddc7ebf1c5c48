"""Tables of vectors as tensor trains: shapes, factors, and the way from a table to its cores and back.

A table of `rows` x `features` numbers is written as d small tensors, its *cores*. Row i has mixed-radix digits
(i_1 .. i_d), the most significant first, over `row_factors` (m_1 .. m_d); feature j likewise over `column_factors`
(n_1 .. n_d). With G_k of shape [m_k, R_{k-1}, n_k, R_k] and R_0 = R_d = 1,

    W[i, j] = G_1[i_1, :, j_1, :] G_2[i_2, :, j_2, :] ... G_d[i_d, :, j_d, :]

a product of d matrices. Rows beyond `rows`, up to m_1 .. m_d, are padding and are never looked up.

Source: Yin et al., 2021, arXiv:2101.11714 (TT-Rec), section 3; Oseledets, 2011, doi:10.1137/090752286. Their
core is [R_{k-1}, m_k, n_k, R_k]; here the row digit comes first, so that one digit picks one contiguous matrix.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from multipod.errors import RecipeError

Cores = tuple[jax.Array, ...]
"""d arrays of shape [m_k, R_{k-1}, n_k, R_k]: the parameters."""

LARGEST = 2**31 - 1


@dataclass(frozen=True)
class TensorTrain:
    """The shape of a table in tensor-train form. `tensor_train` makes one from fewer words.

    Attributes:
      rows: of the table; ids are 0 to rows - 1.
      features: of a row; exactly the product of `column_factors`.
      row_factors: m_1 .. m_d; their product is at least `rows`.
      column_factors: n_1 .. n_d.
      ranks: R_1 .. R_{d-1}.
    """

    rows: int
    features: int
    row_factors: tuple[int, ...]
    column_factors: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        wrong = list(_wrong_shape(self))
        if wrong:
            raise RecipeError(
                f"tensor train of {self.rows:,} x {self.features}: {'; '.join(wrong)}. "
                "Give other factors or ranks, or leave them out to have them chosen."
            )

    @property
    def padded_rows(self) -> int:
        """Rows that the cores can hold, those never looked up included."""
        return math.prod(self.row_factors)

    @property
    def shapes(self) -> tuple[tuple[int, int, int, int], ...]:
        """The shapes of the cores."""
        ranks = (1, *self.ranks, 1)
        return tuple(
            (m, before, n, after)
            for m, n, before, after in zip(self.row_factors, self.column_factors, ranks, ranks[1:], strict=False)
        )

    @property
    def parameters(self) -> int:
        """Numbers in the cores."""
        return sum(map(math.prod, self.shapes))

    @property
    def compression(self) -> float:
        """Numbers of the table over numbers in the cores."""
        return self.rows * self.features / self.parameters

    def digits(self, ids: jax.Array) -> list[jax.Array]:
        """The mixed-radix digits of `ids`, the most significant first."""
        found = []
        for m in reversed(self.row_factors[1:]):
            found.append(ids % m)
            ids = ids // m
        return [ids, *reversed(found)]


def tensor_train(
    rows: int,
    features: int,
    rank: int | Sequence[int],
    *,
    cores: int = 3,
    row_factors: Sequence[int] = (),
    column_factors: Sequence[int] = (),
) -> TensorTrain:
    """A tensor train of balanced factors, or of those given.

    Args:
      rows: of the table.
      features: of a row.
      rank: R of every bond, cut to the largest that a bond can have; or one for each of the d - 1 bonds, as they are.
      cores: d, where no factors are given.
      row_factors: m_1 .. m_d; by default `covering_factors`.
      column_factors: n_1 .. n_d; by default `exact_factors`.

    Raises:
      RecipeError: factors that do not cover the rows or do not multiply to the features, or a rank that cannot be; all
        that is wrong is listed.
    """
    count = len(row_factors) or len(column_factors) or cores
    if rows < 1 or features < 1 or count < 2:
        raise RecipeError(
            f"tensor train of {rows:,} x {features} with {count} cores: rows and features must be positive, and there "
            "must be at least 2 cores. Give larger numbers."
        )
    m = tuple(row_factors) or covering_factors(rows, count)
    n = tuple(column_factors) or exact_factors(features, count)
    ranks = tuple(rank) if isinstance(rank, Sequence) else tuple(min(rank, most) for most in _largest_ranks(m, n))
    return TensorTrain(rows, features, m, n, ranks)


def covering_factors(rows: int, count: int) -> tuple[int, ...]:
    """`count` nearly equal factors, increasing, whose product is at least `rows`: 10,131,227 gives (216, 217, 217).

    Each is the least that, with equal ones after it, still covers what is left; the padding is at most a few factors'
    worth, below 1 % from about a million rows on.
    """
    factors, left = [], rows
    for remaining in range(count, 0, -1):
        m = round(left ** (1 / remaining))
        m = next(candidate for candidate in range(max(m - 1, 1), m + 3) if candidate**remaining >= left)
        factors.append(m)
        left = -(-left // m)
    return tuple(sorted(factors))


def exact_factors(features: int, count: int) -> tuple[int, ...]:
    """`count` factors, increasing, whose product is `features`, with the least sum: 16 gives (2, 2, 4)."""
    if count == 1:
        return (features,)
    divisors = [n for n in range(1, features + 1) if features % n == 0]
    found = {tuple(sorted((n, *exact_factors(features // n, count - 1)))) for n in divisors}
    return min(found, key=lambda factors: (sum(factors), factors))


def materialize(tt: TensorTrain, cores: Cores) -> jax.Array:
    """The table [rows, features] that the cores stand for. Takes its memory: for tests and small tables."""
    table = jnp.ones((1, 1, 1), cores[0].dtype)
    for core in cores:
        table = jnp.einsum("Iar,irbs->Iiabs", table, core)
        table = table.reshape(table.shape[0] * table.shape[1], -1, table.shape[-1])
    return table[: tt.rows, :, 0]


def look_up(tt: TensorTrain, cores: Cores, ids: jax.Array) -> jax.Array:
    """The rows with these numbers, [ids, features], each computed for itself. The plain version; nothing is checked.

    A row costs 2 sum_k (n_1 .. n_k) R_{k-1} R_k floating-point operations.
    """
    rows = jnp.ones((len(ids), 1, 1), cores[0].dtype)
    for core, digit in zip(cores, tt.digits(ids), strict=True):
        rows = jnp.einsum("xar,xrbs->xabs", rows, core[digit])
        rows = rows.reshape(len(ids), -1, rows.shape[-1])
    return rows[:, :, 0]


def decompose(table: np.ndarray, tt: TensorTrain) -> tuple[tuple[np.ndarray, ...], float]:
    """Cores that come near `table`, and how near: |W - table| / |table|, Frobenius, over the rows of the table.

    TT-SVD: the table as a tensor with dims m_k n_k, cut by one singular value decomposition for each bond, in float64.
    The error is at most sqrt(d - 1) times that of the best cores with these ranks, and zero where the table
    has these ranks. The norm is spread evenly over the cores. Takes several times the memory of the table.

    Source: Oseledets, 2011, doi:10.1137/090752286, algorithm 1.

    Raises:
      RecipeError: the table has another shape.
    """
    if table.shape != (tt.rows, tt.features):
        raise RecipeError(
            f"TT-SVD: the table is {' x '.join(map(str, table.shape))}, and the tensor train {tt.rows} x "
            f"{tt.features}. Make the tensor train of the table's own shape."
        )
    padded = np.zeros((tt.padded_rows, tt.features))
    padded[: tt.rows] = table
    count = len(tt.row_factors)
    rest = padded.reshape(*tt.row_factors, *tt.column_factors)
    rest = rest.transpose([axis for k in range(count) for axis in (k, count + k)])
    cores = []
    for m, before, n, after in tt.shapes[:-1]:
        u, s, v = np.linalg.svd(rest.reshape(before * m * n, -1), full_matrices=False)
        cores.append(u[:, :after].reshape(before, m, n, after))
        rest = s[:after, None] * v[:after]
    m, before, n, after = tt.shapes[-1]
    cores.append(rest.reshape(before, m, n, after))
    evened = _evened([core.transpose(1, 0, 2, 3) for core in cores])
    found = _materialized_numpy(evened)[: tt.rows]
    scale = float(np.linalg.norm(table))
    error = float(np.linalg.norm(found - table))
    return tuple(evened), error / scale if scale else error


def _materialized_numpy(cores: Sequence[np.ndarray]) -> np.ndarray:
    table = np.ones((1, 1, 1))
    for core in cores:
        table = np.einsum("Iar,irbs->Iiabs", table, core, optimize=True)
        table = table.reshape(table.shape[0] * table.shape[1], -1, table.shape[-1])
    return table[:, :, 0]


def _evened(cores: list[np.ndarray]) -> list[np.ndarray]:
    """Cores of equal root mean square for the table of these: no core then learns much faster than another."""
    sizes = [float(np.sqrt(np.mean(np.square(core)))) for core in cores]
    if min(sizes) == 0:
        return cores
    even = math.exp(sum(map(math.log, sizes)) / len(sizes))
    return [core * (even / size) for core, size in zip(cores, sizes, strict=True)]


def _largest_ranks(row_factors: Sequence[int], column_factors: Sequence[int]) -> list[int]:
    """What each bond's rank can be at most: the numbers on its smaller side."""
    sizes = [m * n for m, n in zip(row_factors, column_factors, strict=False)]
    return [min(math.prod(sizes[:k]), math.prod(sizes[k:])) for k in range(1, len(sizes))]


def _wrong_shape(tt: TensorTrain) -> list[str]:
    """All that is wrong with a shape."""
    m, n, ranks = tt.row_factors, tt.column_factors, tt.ranks
    if not 2 <= len(m) == len(n) == len(ranks) + 1:
        return [f"{len(m)} row factors, {len(n)} column factors and {len(ranks)} ranks, not d, d and d - 1 with d >= 2"]
    small = [f"{name} {values} has {min(values)}" for name, values in _named(tt) if min(values) < 1]
    if small or tt.rows < 1:
        return small or [f"{tt.rows} rows"]
    wrong = []
    if tt.padded_rows < tt.rows:
        wrong.append(f"the row factors {_product(m)} cover {tt.padded_rows:,} rows of {tt.rows:,}")
    if tt.padded_rows > LARGEST:
        wrong.append(f"the row factors {_product(m)} make {tt.padded_rows:,} rows, and ids are int32")
    if math.prod(n) != tt.features:
        wrong.append(f"the column factors {_product(n)} make {math.prod(n)} features, not {tt.features}")
    most = _largest_ranks(m, n)
    for k, (rank, limit) in enumerate(zip(ranks, most, strict=True), 1):
        if rank > limit:
            wrong.append(f"rank {rank} of bond {k} is larger than it can be, {limit}")
    return wrong


def _named(tt: TensorTrain) -> list[tuple[str, tuple[int, ...]]]:
    return [("row factors", tt.row_factors), ("column factors", tt.column_factors), ("ranks", tt.ranks)]


def _product(factors: Sequence[int]) -> str:
    return " x ".join(map(str, factors))
