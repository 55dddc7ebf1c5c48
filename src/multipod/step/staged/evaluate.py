"""Evaluation of a model in pipeline stages, forward only."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from multipod.execute.pipeline.forward import run_forward
from multipod.execute.pipeline.in_flight import PipeState
from multipod.pytrees import Batch, Params
from multipod.step.evaluate import ScoredLabels
from multipod.step.staged.micro_batches import cut_rows
from multipod.step.staged.pipe import evaluations
from multipod.step.staged.placement import StagePlacement
from multipod.step.staged.state import Piped
from multipod.step.state import State, Sums


@dataclass(frozen=True)
class StagedEvaluation:
    """`program.Evaluator` of a model in stages."""

    placement: StagePlacement

    def rows(self, examples: int) -> int:
        """The rows of a batch in evaluation, of a test set of `examples`."""
        pieces = self.placement.devices * self.placement.micro_batches
        return -(-min(self.placement.recipe.evaluation_batch, examples) // pieces) * pieces

    def prepare(self, state: State) -> State:
        """`state` without the optimizer's; of an asynchronous pipeline a drained copy, all parts after all updates."""
        if state.optimizer is None or not self.placement.recipe.layout.asynchronous:
            return state._replace(optimizer=None)
        return state._replace(params=self._drained(state.params, state.optimizer, state.update), optimizer=None)

    def run(self, state: State, batch: Batch) -> tuple[Sums, ScoredLabels]:
        """The sums of the values of those examples of `batch` where batch["mask"] is true, and scores."""
        return self.compiled(state.params, batch)

    @cached_property
    def compiled(self) -> Any:
        """From packed weights and a batch to sums and scores, jitted."""
        placement = self.placement
        functions = evaluations(placement.recipe, placement.proof.schedule.parts, placement.mesh, placement.splits)

        def forward(params: Params, batch: Batch) -> Any:
            rows = cut_rows(batch, placement.mesh, placement.micro_batches)
            return run_forward(placement.pipe.slots, functions, params, rows)

        return jax.jit(forward)

    @cached_property
    def _drained(self) -> Callable[..., Any]:
        def drained(params: Params, piped: Piped, update: jax.Array) -> Params:
            state = PipeState(params, piped.states, piped.flight, piped.tick, piped.started, update)
            return self.placement.pipe.drain(state)[0].weights

        return jax.jit(drained, out_shardings=self.placement.shardings.params)
