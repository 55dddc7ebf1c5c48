"""A small fixed computation that each process times on its own device, for `multipod.elastic.straggling`."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

EVERY_S = 1.0
SIZE, TIMES = 192, 8


class Probe:
    """Times the computation: `TIMES` products of square matrices, a few milliseconds on a CPU."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        def work(x: jax.Array) -> jax.Array:
            for _ in range(TIMES):
                x = jnp.tanh(x @ x)
            return x

        device = jax.local_devices()[0]
        self._x = jax.device_put(jnp.full((SIZE, SIZE), 0.01), device)
        self._work = jax.jit(work)
        jax.block_until_ready(self._work(self._x))
        self._clock, self._last_s = clock, clock()

    def __call__(self) -> float:
        """Seconds of the computation; 0 if it is not yet time for the next."""
        if self._clock() - self._last_s < EVERY_S:
            return 0.0
        start = self._clock()
        jax.block_until_ready(self._work(self._x))
        self._last_s = self._clock()
        return self._last_s - start
