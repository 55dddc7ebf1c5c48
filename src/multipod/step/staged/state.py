"""The state of a run in stages: what a pipeline keeps beside its weights."""

from typing import NamedTuple

import jax

from multipod.execute.pipeline.in_flight import PipeState
from multipod.pytrees import OptState, Pytree
from multipod.step.state import State


class Piped(NamedTuple):
    """What a pipeline keeps beside its weights: `State.optimizer` of a run in stages.

    Attributes:
      states: the optimizers' states, as `PipeState.optimizer`.
      flight: what is under way between updates; () of a synchronous pipeline, which drains in every update.
      tick, started: as in `PipeState`.
    """

    states: OptState
    flight: Pytree
    tick: jax.Array
    started: jax.Array


def pipe_state(state: State) -> PipeState:
    """The pipeline's part of a state."""
    piped: Piped = state.optimizer
    return PipeState(state.params, piped.states, piped.flight, piped.tick, piped.started, state.update)


def with_pipe_state(state: State, inner: PipeState) -> State:
    """`state` with the pipeline's part in it."""
    piped = Piped(inner.optimizer, inner.flight, inner.tick, inner.started)
    return state._replace(params=inner.weights, optimizer=piped)
