"""The part of an update that looks at its own numbers, and undoes it on the devices if they are bad."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax


class Asked(NamedTuple):
    """What the host asks of a watched update, beside the batch.

    Attributes:
      stop: int32 [devices], 1 to ask for a stop.
      limits: float32 [2], the highest loss and gradient norm of a good update; infinite for no limit.
      flip: int32 [devices], 1 + the number of a bit to flip in a gradient of that device, 0 for none; None in
        programs that cannot do that, which are all but those made to inject faults.
    """

    stop: jax.Array
    limits: jax.Array
    flip: jax.Array | None = None


def parts_of(asked: "Asked | jax.Array") -> Asked:
    """What was asked, from flags alone too: then without limits."""
    if isinstance(asked, Asked):
        return asked
    return Asked(asked, jnp.full(2, jnp.inf, jnp.float32))


def judged(
    sums: dict[str, jax.Array], gradients: Any, limits: jax.Array, minds: bool = True
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Whether the update is good, on every device the same, and the sums with `bad` and `gradient_norm` added.

    Unless it `minds`, every update is.

    Costs one pass over the gradients, and a message of one number where they are split.
    """
    norm = optax.tree.norm(jax.tree.map(lambda leaf: leaf.astype(jnp.float32), gradients))
    loss = sums["loss"] / sums["count"]
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    good = finite & (loss <= limits[0]) & (norm <= limits[1]) | (not minds)
    counted = norm * sums["count"]  # like every sum: divided by the count on the host
    return good, sums | {"bad": 1 - good.astype(jnp.int32), "gradient_norm": counted}


def chosen(good: jax.Array, new: Any, old: Any) -> Any:
    """`new` after a good update, `old` after a bad one, without a copy of either."""
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), new, old)


def flipped(gradients: Any, flip: jax.Array | None) -> Any:
    """The gradients of one device with a bit of the first number of the largest tensor flipped, if `flip` says so.

    Args:
      gradients: any tree of floats.
      flip: int32 [1], as in `Asked`.
    """
    if flip is None:
        return gradients
    leaves = jax.tree.leaves(gradients)
    structure: Any = jax.tree.structure(gradients)
    at = max(range(len(leaves)), key=lambda place: leaves[place].size)
    bits = jnp.uint32 if leaves[at].dtype.itemsize == 4 else jnp.uint16
    flat = leaves[at].reshape(-1)
    word = lax.bitcast_convert_type(flat[:1], bits)
    mask = jnp.where(flip > 0, jnp.left_shift(1, jnp.maximum(flip - 1, 0)), 0).astype(bits)
    leaves[at] = flat.at[:1].set(lax.bitcast_convert_type(word ^ mask, flat.dtype)).reshape(leaves[at].shape)
    return structure.unflatten(leaves)
