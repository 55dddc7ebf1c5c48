"""What each update should have made: the recipe on one device in float64, and how far float32 may be from it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.recipe.recipe import Recipe
from multipod.step.program import program_of
from multipod.step.state import PortableState, State, Sums
from multipod.verify.moving import HostStates
from multipod.verify.rounding import EPS, Errors, UpdateResult, errors_of, shaken
from multipod.verify.widened import widened

SHAKEN = 2
"""Updates from parameters each of which is rounded once more, beside the plain one: samples of what rounding does."""


@dataclass(frozen=True)
class Walk:
    """The first updates of the recipe on one device.

    Attributes:
      losses: the mean loss of each update.
      noise: the largest error of each thing against float64, over all updates and samples; at least `EPS`.
      first, last: the states before the first and after the last update.
    """

    losses: tuple[float, ...]
    noise: Errors
    first: PortableState
    last: PortableState


class Reference:
    """A recipe on one device, an update at a time, from any state that a layout came to."""

    def __init__(self, recipe: Recipe, updates: int) -> None:
        self.recipe = replace(recipe, layout=Layout((1, 1)), accumulate=1)
        self.updates = updates
        self.states = HostStates(program_of(self.recipe, make_mesh(self.recipe.layout)))
        self.source = recipe.data.train()
        self._rng = np.random.default_rng(0)
        self._traced: dict[tuple[Any, ...], Callable[..., tuple[State, Sums]]] = {}

    def exact(self, before: PortableState, update: int) -> UpdateResult:
        """The update of this number, the first being 0, of the state `before`, in float64."""
        program = self.states.program
        state = self.states.write(before)
        arguments = state, self.states.batch(self.source, update), program.controls()
        new, sums = self._widened_for(arguments)(*arguments)
        return UpdateResult(program.conversion.to_portable(new), jax.device_get(sums))

    @cached_property
    def walk(self) -> Walk:
        """The first updates, in the types that the recipe says, and how far they are from float64."""
        state = self.states.first
        losses: list[float] = []
        noise: Errors = {}
        for update in range(self.updates):
            exact = self.exact(state, update)
            plain, *shaken = (
                self._rounded(one, update) for one in (state, *(self.shaken(state) for _ in range(SHAKEN)))
            )
            for made in (plain, *shaken):
                for name, error in errors_of(made, exact, state).items():
                    noise[name] = max(noise.get(name, EPS), error)
            losses.append(float(plain.sums["loss"]) / float(plain.sums["count"]))
            state = plain.state
        return Walk(tuple(losses), noise, self.states.first, state)

    def shaken(self, state: PortableState) -> PortableState:
        """`state` with each parameter up to half a unit in the last place of float32 larger or smaller."""
        return state._replace(params=shaken(state.params, self._rng))

    def _rounded(self, before: PortableState, update: int) -> UpdateResult:
        return self.states.made(self.states.write(before), self.states.batch(self.source, update))[1]

    def _widened_for(self, arguments: tuple[Any, ...]) -> Callable[..., tuple[State, Sums]]:
        """The update in float64, traced once for each shape of a batch: texts come in lengths of buckets."""
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), arguments)
        key = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes))
        if key not in self._traced:
            self._traced[key] = widened(self.states.program.update, *shapes)
        return self._traced[key]
