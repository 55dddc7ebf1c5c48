"""Batch norm over a fixed number of examples, for programs of one's own: a drop-in for `nnx.BatchNorm`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from multipod.errors import LayoutError
from multipod.execute.sums import mean_in_order


class SpanBatchNorm(nnx.Module):
    """`nnx.BatchNorm` whose statistics span `span` neighbouring examples of the batch, on any number of devices.

    In training each group of `span` examples is normalised by its own mean and variance, E[x^2] - E[x]^2 in float32.
    Outside of `jax.shard_map` the first dim of x is the whole batch. Inside, name its axes by `axis_name`: a device
    that holds fewer examples than `span` shares statistics with its neighbours, one that holds more has several
    groups. So a model's outputs do not depend on how many devices there are. The moving moments, of which evaluation
    takes its own, are those of the whole batch.

    In the trainer take `TileBatchNorm`, which knows the trainer's mesh and leaves padding out.

    Args:
      num_features: channels, the last dim of x.
      span: examples that share statistics; None: all.
      axis_name: the mesh axes that the examples are split over, in row-major order.
      use_running_average: evaluate; `module.eval()` sets it.
      momentum: of the moving moments.
      epsilon: added to the variance.
      use_bias: whether to add a learnt bias.
      use_scale: whether to multiply by a learnt scale.
      rngs: not used.

    Raises:
      LayoutError: when called, if `span` neither divides nor is a multiple of a device's examples, or the batch.

    Source: arXiv:1811.06992 (statistics of a group of devices); see `TileBatchNorm`.
    """

    def __init__(
        self,
        num_features: int,
        *,
        span: int | None = None,
        axis_name: str | tuple[str, ...] = (),
        use_running_average: bool = False,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        use_bias: bool = True,
        use_scale: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        del rngs
        self.scale = nnx.Param(jnp.ones(num_features)) if use_scale else None
        self.bias = nnx.Param(jnp.zeros(num_features)) if use_bias else None
        self.mean = nnx.BatchStat(jnp.zeros(num_features))
        self.var = nnx.BatchStat(jnp.ones(num_features))
        self.span = span
        self.axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
        self.use_running_average, self.momentum, self.epsilon = use_running_average, momentum, epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises x, [examples, ..., num_features], in x's dtype."""
        if self.use_running_average:
            mean, var = self.mean[...], self.var[...]
        else:
            moments = self._group_moments(x.astype(jnp.float32))
            self._follow(lax.stop_gradient(moments))
            groups, shape = moments.shape[1], (-1, *[1] * (x.ndim - 2), x.shape[-1])
            mean, square = (jnp.repeat(one, len(x) // groups, axis=0).reshape(shape) for one in moments)
            var = square - mean * mean
        factor = lax.rsqrt(var + self.epsilon)
        factor = factor if self.scale is None else factor * self.scale[...]
        y = (x.astype(jnp.float32) - mean) * factor
        return (y if self.bias is None else y + self.bias[...]).astype(x.dtype)

    def _group_moments(self, x: jax.Array) -> jax.Array:
        """E[x] and E[x^2] of each group that this device has examples of, [2, groups, num_features]."""
        devices = lax.axis_size(self.axes) if self.axes else 1
        span = self.span or len(x) * devices
        inside, over = divmod(len(x), span)
        wide, uneven = divmod(span, len(x))
        if (over and uneven) or (inside < 1 and devices % max(wide, 1)):
            raise LayoutError(
                f"batch norm with span={span}: {devices} devices hold {len(x)} examples each. Take a span that "
                f"divides {len(x)}, or a multiple of it that divides {len(x) * devices}."
            )
        groups = max(inside, 1)
        x = x.reshape(groups, -1, x.shape[-1])
        moments = jnp.stack([x.mean(1), jnp.square(x).mean(1)])
        if wide < 2:
            return moments
        members = tuple(tuple(range(first, first + wide)) for first in range(0, devices, wide))
        return mean_in_order(moments, self.axes, None if wide == devices else members)

    def _follow(self, moments: jax.Array) -> None:
        mean, square = moments.mean(1)
        if self.axes:
            mean, square = mean_in_order(jnp.stack([mean, square]), self.axes)
        self.mean[...] = self.momentum * self.mean[...] + (1 - self.momentum) * mean
        self.var[...] = self.momentum * self.var[...] + (1 - self.momentum) * (square - mean * mean)
