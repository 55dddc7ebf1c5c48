"""Several updates in one program: the devices go from one to the next without the host."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from multipod.pytrees import Batch
from multipod.step.guard import Controls
from multipod.step.state import State, Sums

Update = Callable[[State, Batch, Controls], tuple[State, Sums]]
SeveralUpdates = Callable[[State, tuple[Batch, ...], Controls], tuple[State, tuple[Sums, ...]]]
"""Updates with one batch after the other, all of one size: the last state, and the sums of each update."""


def several(update: Update) -> SeveralUpdates:
    """`update` with each of some batches in turn, to be compiled as one program.

    All are told the same, but that a bad one halts those behind it (`Controls.halt`), as it would if each had been
    given to the devices by itself. The batches are copied once on the devices, next to each other.
    """

    def updates(state: State, batches: tuple[Batch, ...], controls: Controls) -> tuple[State, tuple[Sums, ...]]:
        def one(before: tuple[State, Any], batch: Batch) -> tuple[tuple[State, Any], Sums]:
            state, halt = before
            state, sums = update(state, batch, controls._replace(halt=halt))
            return (state, sums.get("bad", halt)), sums

        stacked = jax.tree.map(lambda *arrays: jnp.stack(arrays), *batches)
        (state, _), sums = lax.scan(one, (state, controls.halt), stacked)
        return state, tuple({name: value[k] for name, value in sums.items()} for k in range(len(batches)))

    return updates
