"""Who may attend to whom, told by the segments of a row: as arrays that a fused kernel reads, or as a mask."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Segments:
    """Tokens attend to those of their own segment, and (causal) to none that comes later. Segment 0 is padding.

    Attributes:
      queries: int32 [n, q].
      keys: int32 [n, k].
      causal: whether later keys are hidden.
    """

    queries: jax.Array
    keys: jax.Array
    causal: bool = field(default=False, metadata={"static": True})

    def mask(self) -> jax.Array:
        """Who may attend to whom as bool [n, 1, q, k]."""
        return segment_mask(self.queries, self.keys, causal=self.causal)


def segment_mask(queries: jax.Array, keys: jax.Array, *, causal: bool = False) -> jax.Array:
    """Who may attend to whom, bool [n, 1, q, k]: tokens of one segment, and (causal) none that comes later.

    `queries` [n, q] and `keys` [n, k] number the segments; 0 is padding, which nobody attends to. A query that is
    padding attends to nothing; what attention gives for it is finite and means nothing.
    """
    mask = (queries[:, :, None] == keys[:, None, :]) & (keys[:, None, :] != 0)
    if causal:
        mask &= jnp.arange(queries.shape[1])[:, None] >= jnp.arange(keys.shape[1])
    return mask[:, None]
