"""Names for the pytrees that rooms hand to each other.

JAX takes any nesting of containers, so no type is closer than `Any`; the name says what the leaves are. Where more is
known, as of the flat dictionaries of Flax models, a signature says it with `dict[str, jax.Array]`.
"""

from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import jax  # the data's processes read this file without it

Pytree = Any
"""Any nesting of containers; the function that takes it asks nothing of its leaves but what its docstring says."""
Params = Any
"""Arrays that are differentiated and updated."""
Grads = Any
"""The structure and shapes of `Params`: gradients, or changes on their way to becoming an update."""
Statistics = Any
"""Arrays that a forward pass in training replaces (batch norm's moving moments); may be empty."""
OptState = Any
"""What an optimizer keeps between updates: moments in the structure of `Params`, counts."""
Outputs = Any
"""What a model makes of a batch and an objective reads, first dim examples."""
Shapes = Any
"""A `jax.ShapeDtypeStruct` for each array: a tree that takes no memory."""
Specs = Any
"""A `jax.sharding.PartitionSpec` for each array."""
Shardings = Any
"""A `jax.sharding.Sharding` for each array."""
KeyPath = tuple[Any, ...]
"""The way to one leaf, as `jax.tree_util.tree_map_with_path` gives it."""
Batch: TypeAlias = "dict[str, jax.Array]"
"""Named arrays whose first dim counts examples."""


class IdRange(NamedTuple):
    """Whole numbers from 0 that an entry of a batch holds or is looked up with.

    Attributes:
      counts: how many there are: one number for the whole entry, or one for each of its columns.
      field: the field that says so, as `vocab`; empty: none does.
      hots: columns of each of `counts`, where a field of that name says them; empty: one each.
    """

    counts: tuple[int, ...]
    field: str
    hots: tuple[int, ...] = ()

    def by_column(self) -> tuple[int, ...]:
        """How many there are in each column."""
        repeated = zip(self.counts, self.hots or (1,) * len(self.counts), strict=True)
        return tuple(count for count, hot in repeated for _ in range(hot))
