"""A run's state out of one layout's form into another's: other stages, another schedule, or none."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multipod.errors import LayoutError
from multipod.optim.pipemare import RescheduleState, VelocityState
from multipod.step.pipeline import join_params, split_params
from multipod.step.program import Program
from multipod.step.programs import AnyProgram
from multipod.step.staged import StagedProgram
from multipod.step.state import State


class WholeState(NamedTuple):
    """What a run has learnt, whatever its layout.

    Attributes:
      params, optimizer: of the whole model, tensors by their names.
      velocity: (PipeMare's T2) delta of each tensor that has one.
      statistics, key, update, position: as of `State`.
    """

    params: dict[str, jax.Array]
    optimizer: Any
    velocity: dict[str, jax.Array]
    statistics: Any
    key: jax.Array
    update: jax.Array
    position: jax.Array


def relaid(program: AnyProgram, state: State, other: AnyProgram) -> State:
    """`state` of `program` in the form of `other`; inside `jax.jit`, for arrays of other processes.

    Every number is carried over as it is. Of an asynchronous pipeline the state must be drained
    (`StagedProgram.drained`). A pipeline that goes on is empty at first, T2's velocities are those that there were, or
    0; T1 counts the updates of the whole run. The two recipes may differ in their layout, `accumulate` and `pipemare`.

    Raises:
      LayoutError: every device has an optimizer state of its own (Adasum).
    """
    for one in (program, other):
        if one.recipe.layout.local_state:
            raise LayoutError(
                f"layout.gradient_sum={one.recipe.layout.gradient_sum}: each device has an optimizer state of its own, "
                "which no other layout can take over. Go on in the layout that it has."
            )
    return laid_of(other, whole_of(program, state))


def whole_of(program: AnyProgram, state: State) -> WholeState:
    """What `state` holds, in names of the whole model."""
    aside = state.statistics, state.key, state.update, state.position
    if isinstance(program, Program):
        return WholeState(state.params, state.optimizer, {}, *aside)
    pipe, piped = program.pipe, state.optimizer
    states = pipe.unpack_states(piped.states)
    velocity: dict[str, jax.Array] = {}
    if program.recipe.layout.asynchronous:
        for part in states:
            velocity |= next((more.velocity for more in part[1:] if isinstance(more, VelocityState)), {})
        states = [part[0] for part in states]
    params = join_params(pipe.unpack(state.params))
    held = [_by_path(tree) for tree in states]
    # What is of no tensor, such as a count of updates, is the same in all parts; a tied tensor's in those that hold it.
    optimizer = jax.tree_util.tree_map_with_path(
        lambda path, _: next(own[path] for own in held if path in own), _fresh_optimizer(program, params)
    )
    return WholeState(params, optimizer, velocity, *aside)


def laid_of(program: AnyProgram, whole: WholeState) -> State:
    """`whole` as a state of `program`, before its next update."""
    plain = State(whole.params, whole.statistics, whole.optimizer, whole.key, whole.update, whole.position)
    if isinstance(program, Program):
        return plain
    pipe, held = program.pipe, _by_path(whole.optimizer)
    weights = split_params(program.recipe, pipe, whole.params)
    states = []
    for part, own in zip(pipe.setup.parts, weights, strict=True):
        fresh = part.optimizer.init(own)
        if program.recipe.layout.asynchronous:
            states.append((_taken(fresh[0], held), *(_begun(more, whole) for more in fresh[1:])))
        else:
            states.append(_taken(fresh, held))
    return program.outer(pipe.fresh(weights, states)._replace(updates=whole.update), plain)


def _fresh_optimizer(program: StagedProgram, params: Any) -> Any:
    return jax.eval_shape(program.recipe.optimizer.build(program.recipe.updates).init, params)


def _by_path(tree: Any) -> dict[Any, jax.Array]:
    return dict(jax.tree_util.tree_flatten_with_path(tree)[0])


def _taken(fresh: Any, held: dict[Any, jax.Array]) -> Any:
    """A part's own of the whole optimizer's state."""
    return jax.tree_util.tree_map_with_path(lambda path, _: held[path], fresh)


def _begun(fresh: Any, whole: WholeState) -> Any:
    """What PipeMare keeps of a part besides."""
    if isinstance(fresh, RescheduleState):
        return RescheduleState(whole.update)
    return VelocityState({name: whole.velocity.get(name, jnp.zeros_like(own)) for name, own in fresh.velocity.items()})
