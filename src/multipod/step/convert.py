"""Checkpoint conversion: a run's state out of one layout's form into another's, as other stages, or none."""

from multipod.step.checks import check_recipe
from multipod.step.program import Program
from multipod.step.state import State


def convert(program: Program, state: State, other: Program) -> State:
    """`state` of `program` in the form of `other`; inside `jax.jit`, for arrays of other processes.

    Every number is carried over as it is. Of an asynchronous pipeline the state must be drained
    (`Conversion.drain`). A pipeline that goes on is empty at first, T2's velocities are those that there were, or
    0; T1 counts the updates of the whole run. The two recipes may differ in their layout, `accumulate` and `pipemare`.

    Raises:
      LayoutError: every device has an optimizer state of its own (Adasum).
    """
    for recipe in (program.recipe, other.recipe):
        check_recipe(recipe, converts=True)
    return other.conversion.from_portable(program.conversion.to_portable(state))
