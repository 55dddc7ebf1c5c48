"""Halos: rows of the neighbours, for programs that split a dim over devices in `jax.shard_map`."""

import jax
import jax.numpy as jnp
from jax import lax

from multipod.errors import LayoutError


def halo(x: jax.Array, axis: str, width: int | tuple[int, int], *, dim: int = 0, wrap: bool = False) -> jax.Array:
    """x with `width` rows of the device before and of the device after on its sides, along dim `dim`.

    One message to each neighbour; differentiable: gradients of halo rows go back to the device that they came from. A
    convolution of an odd kernel k on the result, without padding, with `width=k // 2`, equals the one of the whole
    array with zeros around it.

    Args:
      x: this device's part, the parts lying in the order of the devices.
      axis: the mesh axis that the dim is split over.
      width: rows from each side, or (from before, from after).
      dim: the dim that is split.
      wrap: whether the last device is the neighbour of the first; otherwise zeros lie beyond the ends.

    Raises:
      LayoutError: a width below 0 or above the rows of a device.
    """
    before, after = (width, width) if isinstance(width, int) else width
    size, devices = x.shape[dim], lax.axis_size(axis)
    if not (0 <= before <= size and 0 <= after <= size):
        raise LayoutError(
            f"halo of {before} and {after} rows over {axis}={devices}: a device has {size} rows, and gets rows of its "
            f"neighbours alone. Take a width of 0 to {size}, or fewer devices."
        )
    last = devices if wrap else devices - 1
    up = [(k, (k + 1) % devices) for k in range(last)]
    tail = lax.slice_in_dim(x, size - before, size, axis=dim)
    head = lax.slice_in_dim(x, 0, after, axis=dim)
    # A device that receives nothing gets zeros.
    sides = lax.ppermute(tail, axis, up), lax.ppermute(head, axis, [(to, of) for of, to in up])
    return jnp.concatenate([sides[0], x, sides[1]], axis=dim)
