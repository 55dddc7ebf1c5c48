"""LSTMs over whole sequences, everything that does not depend on the step before outside of the loop over time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.nn.initializers import Initializer

from multipod.nn.dense import ComputeDtype
from multipod.nn.dims import constant, param


class LstmState(NamedTuple):
    """The state between two steps.

    Attributes:
      hidden: what a step gives out, float32 [rows, features].
      cell: float32 [rows, features].
    """

    hidden: jax.Array
    cell: jax.Array


def zero_state(rows: int, features: int) -> LstmState:
    """Returns the state before the first step."""
    return LstmState(jnp.zeros((rows, features)), jnp.zeros((rows, features)))


class Lstm(nnx.Module):
    """x [n, time, inputs] to [n, time, features], float32. With x_t K + b + h_{t-1} R (+ b') in four parts i, f, g, o:

        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g),  h_t = sigmoid(o) tanh(c_t)

    The parts are in PyTorch's order; there is no constant for the forget gate. x K for all steps is one product before
    the loop, and so are the gradients of K, b and R after it (arXiv:1909.09756 and its code for GNMT): a step of the
    loop multiplies h_{t-1} R, and its gradient's by R transposed, and no more.

    Args:
      inputs: features of x.
      features: of the state.
      init: of K and R.
      two_biases: has b' beside b, as cuDNN and PyTorch do: the same function, with another count of parameters.
      dtype: of the products; states, gates and sums are float32.
      rngs: where the parameters are drawn from.
    """

    def __init__(
        self,
        inputs: int,
        features: int,
        *,
        init: Initializer,
        two_biases: bool = False,
        dtype: ComputeDtype = "float32",
        rngs: nnx.Rngs,
    ) -> None:
        self.kernel = param(init, (inputs, 4 * features), ("embed", "gates"), rngs)
        self.recurrent = param(init, (features, 4 * features), ("embed", "gates"), rngs)
        self.bias = constant(0.0, (4 * features,), ("gates",))
        self.recurrent_bias = constant(0.0, (4 * features,), ("gates",)) if two_biases else None
        self.features, self.dtype = features, dtype

    def __call__(self, x: jax.Array, mask: jax.Array | None = None, *, reverse: bool = False) -> jax.Array:
        """Runs over all steps from a state of zeros, or, with `reverse`, from the last to the first.

        Where `mask` [n, time] is false the state is zeros: a reversed run then begins at each row's own end.
        """
        gates = jnp.moveaxis(self.gates(x), 1, 0)
        steps = jnp.ones(gates.shape[:2], bool) if mask is None else jnp.moveaxis(mask, 1, 0)
        recurrent = self.recurrent[...].astype(self.dtype)
        if reverse:
            gates, steps = gates[::-1], steps[::-1]
        hidden = _run(gates, recurrent, steps[..., None].astype(jnp.float32))
        return jnp.moveaxis(hidden[::-1] if reverse else hidden, 0, 1)

    def gates(self, x: jax.Array) -> jax.Array:
        """Returns what x [..., inputs] adds to the gates, float32 [..., 4 features]."""
        kernel = self.kernel[...].astype(self.dtype)
        bias = self.bias[...] if self.recurrent_bias is None else self.bias[...] + self.recurrent_bias[...]
        return jnp.dot(x.astype(self.dtype), kernel, preferred_element_type=jnp.float32) + bias

    def step(self, x: jax.Array, state: LstmState) -> LstmState:
        """Returns the state after one step on x [rows, inputs]."""
        return _step(self.gates(x), self.recurrent[...].astype(self.dtype), state)


def _step(gates: jax.Array, recurrent: jax.Array, state: LstmState) -> LstmState:
    i, f, g, o = _activated(gates + _times(state.hidden, recurrent))
    cell = f * state.cell + i * g
    return LstmState(o * jnp.tanh(cell), cell)


def _times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.dot(x.astype(kernel.dtype), kernel, preferred_element_type=jnp.float32)


def _activated(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    i, f, g, o = jnp.split(z, 4, -1)
    return jax.nn.sigmoid(i), jax.nn.sigmoid(f), jnp.tanh(g), jax.nn.sigmoid(o)


@jax.custom_vjp
def _run(gates: jax.Array, recurrent: jax.Array, mask: jax.Array) -> jax.Array:
    """The hidden states [time, n, features] of all steps; `mask` [time, n, 1] is 0 or 1."""
    return _forward(gates, recurrent, mask)[0]


def _forward(gates: jax.Array, recurrent: jax.Array, mask: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    def step(state: LstmState, given: tuple[jax.Array, jax.Array]) -> tuple[LstmState, tuple[jax.Array, ...]]:
        gate, keep = given
        z = gate + _times(state.hidden, recurrent)
        i, f, g, o = _activated(z)
        cell = (f * state.cell + i * g) * keep
        after = LstmState(o * jnp.tanh(cell), cell)  # a masked cell is 0, and so is its tanh
        return after, (after.hidden, cell, z)

    first = zero_state(gates.shape[1], gates.shape[2] // 4)
    _, (hidden, cell, z) = lax.scan(step, first, (gates, mask))
    return hidden, (hidden, cell, z, recurrent, mask)


def _backward(kept: tuple[jax.Array, ...], dhidden: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    hidden, cell, z, recurrent, mask = kept
    before = jnp.concatenate([jnp.zeros_like(cell[:1]), cell[:-1]])

    def step(later: LstmState, given: tuple[jax.Array, ...]) -> tuple[LstmState, jax.Array]:
        d, z_t, cell_t, cell_before, keep = given
        i, f, g, o = _activated(z_t)
        dh, tanh = (d + later.hidden) * keep, jnp.tanh(cell_t)
        dc = (later.cell + dh * o * (1 - tanh**2)) * keep
        dz = jnp.concatenate(
            [dc * g * i * (1 - i), dc * cell_before * f * (1 - f), dc * i * (1 - g**2), dh * tanh * o * (1 - o)], -1
        )
        return LstmState(_times(dz, recurrent.T), dc * f), dz

    last = zero_state(z.shape[1], z.shape[2] // 4)
    _, dz = lax.scan(step, last, (dhidden, z, cell, before, mask), reverse=True)
    previous = jnp.concatenate([jnp.zeros_like(hidden[:1]), hidden[:-1]]).astype(recurrent.dtype)
    drecurrent = jnp.einsum("tnh,tnz->hz", previous, dz.astype(recurrent.dtype), preferred_element_type=jnp.float32)
    return dz, drecurrent.astype(recurrent.dtype), jnp.zeros_like(mask)


_run.defvjp(_forward, _backward)
