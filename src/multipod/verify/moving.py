"""A state between a program's own form and the one that all layouts share, on the host."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import jax
import numpy as np

from multipod.data.batches import TrainBatches
from multipod.data.source import Source
from multipod.pytrees import Batch
from multipod.step.program import Program
from multipod.step.state import PortableState, State
from multipod.verify.rounding import UpdateResult


@dataclass(frozen=True)
class HostStates:
    """The updates of a program, from and to states on the host."""

    program: Program

    @cached_property
    def first(self) -> PortableState:
        """The state before the first update, as the program makes it."""
        return self.read(self.program.init())

    def read(self, state: State) -> PortableState:
        """A state of the program on the host."""
        return jax.device_get(self._to_portable(state))

    def write(self, portable: PortableState) -> State:
        """A state of the host on the program's devices."""
        return self._from_portable(portable)

    def batch(self, source: Source, update: int) -> Batch:
        """The batch of an update on the program's devices."""
        program, recipe = self.program, self.program.recipe
        rows = np.arange(program.rows)
        made = TrainBatches(source, recipe.batch, recipe.seed, rows, program.padded)[update]
        return program.place_batch(made, rows, program.rows)

    def made(self, state: State, batch: Batch) -> tuple[State, UpdateResult]:
        """An update: the new state where it lies, and what it made on the host. Gives `state` up."""
        new, sums = self._update(state, batch, self.program.controls())
        return new, UpdateResult(self.read(new), jax.device_get(sums))

    @cached_property
    def _update(self) -> Callable[..., tuple[State, dict[str, jax.Array]]]:
        return self.program.compile_update()

    @cached_property
    def _to_portable(self) -> Callable[[State], PortableState]:
        conversion = self.program.conversion
        return jax.jit(lambda state: conversion.to_portable(conversion.drain(state)))

    @cached_property
    def _from_portable(self) -> Callable[[PortableState], State]:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self.program.shapes)
        return jax.jit(self.program.conversion.from_portable, out_shardings=shardings)
