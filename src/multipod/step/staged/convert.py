"""The state of a run in stages in the form that all layouts share, and back."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multipod.optim.pipemare import RescheduleState, VelocityState
from multipod.pytrees import OptState, Params, Pytree
from multipod.step.staged.pipe import join_params, split_params
from multipod.step.staged.placement import StagePlacement
from multipod.step.staged.state import pipe_state, with_pipe_state
from multipod.step.state import PortableState, State


@dataclass(frozen=True)
class StagedConversion:
    """`program.Conversion` of a model in stages."""

    placement: StagePlacement

    def drain(self, state: State) -> State:
        """`state` with nothing under way: all parts have had all updates. The run itself goes on undrained."""
        return with_pipe_state(state, self.placement.pipe.drain(pipe_state(state))[0])

    def to_portable(self, state: State) -> PortableState:
        """What `state` holds, in names of the whole model."""
        pipe, piped = self.placement.pipe, state.optimizer
        states = pipe.unpack_states(piped.states)
        velocity: dict[str, jax.Array] = {}
        if self.placement.recipe.layout.asynchronous:
            for part in states:
                velocity |= next((more.velocity for more in part[1:] if isinstance(more, VelocityState)), {})
            states = [part[0] for part in states]
        params = join_params(pipe.unpack(state.params))
        tables = [_by_path(tree) for tree in states]
        # What is of no tensor, such as a count of updates, is the same in all parts; a tied tensor's in those that hold
        # it.
        optimizer = jax.tree_util.tree_map_with_path(
            lambda path, _: next(table[path] for table in tables if path in table), self._fresh_optimizer(params)
        )
        return PortableState(params, optimizer, velocity, state.statistics, state.key, state.update, state.position)

    def from_portable(self, portable: PortableState) -> State:
        """A state of an empty pipeline that goes on from `portable`."""
        pipe, table = self.placement.pipe, _by_path(portable.optimizer)
        weights = split_params(pipe, portable.params)
        states = []
        for part, tensors in zip(pipe.setup.parts, weights, strict=True):
            fresh = part.optimizer.init(tensors)
            if self.placement.recipe.layout.asynchronous:
                states.append((_taken(fresh[0], table), *(_begun(more, portable) for more in fresh[1:])))
            else:
                states.append(_taken(fresh, table))
        aside = portable.key, portable.update, portable.position
        state = State(portable.params, portable.statistics, portable.optimizer, *aside)
        return with_pipe_state(state, pipe.fresh(weights, states)._replace(updates=portable.update))

    def _fresh_optimizer(self, params: Params) -> Any:
        recipe = self.placement.recipe
        return jax.eval_shape(recipe.optimizer.build(recipe.updates).init, params)


def _by_path(tree: Pytree) -> dict[Any, jax.Array]:
    return dict(jax.tree_util.tree_flatten_with_path(tree)[0])


def _taken(fresh: OptState, table: dict[Any, jax.Array]) -> OptState:
    """What belongs to a part of the whole optimizer's state."""
    return jax.tree_util.tree_map_with_path(lambda path, _: table[path], fresh)


def _begun(fresh: Any, portable: PortableState) -> Any:
    """What PipeMare keeps of a part besides."""
    if isinstance(fresh, RescheduleState):
        return RescheduleState(portable.update)
    return VelocityState(
        {name: portable.velocity.get(name, jnp.zeros_like(leaf)) for name, leaf in fresh.velocity.items()}
    )
