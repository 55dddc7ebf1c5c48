"""JAX's coordination service, as this process sees it. JAX does not publish it."""

from typing import Any


def service() -> Any:
    """Returns this process's client of JAX's coordination service; None where the process is alone."""
    from jax._src import distributed

    return distributed.global_state.client
