"""Evaluation of a whole model on the mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import PartitionSpec

from multipod.execute.bucketing import all_reduce_tree
from multipod.execute.sums import ordered
from multipod.layout.mesh import batch_spec, data_axes, replicated
from multipod.metrics.objective import answers_of, masked_sums
from multipod.nn.by_example import NUMBERS, numbered, numbered_examples
from multipod.nn.logical_axes import logical_axis_rules
from multipod.pytrees import Batch, Params, Statistics
from multipod.step.agreement import refusing_misfits
from multipod.step.averaging import averaged_state
from multipod.step.placement import MeshPlacement
from multipod.step.specs import data_specs, over_data, whole_tensors
from multipod.step.state import State, Sums

ScoredLabels = tuple[jax.Array, ...] | dict[str, jax.Array]
"""Of all examples of a batch, split as the batch is: scores and labels of an objective that `Scores`; answers and the
mask of one that `JudgesAnswers`; what is detected, of one that `Detects`; () of others."""


@dataclass(frozen=True)
class WholeEvaluation:
    """`program.Evaluator` of a model that is not cut into stages."""

    placement: MeshPlacement

    def rows(self, examples: int) -> int:
        """The rows of a batch in evaluation, of a test set of `examples`."""
        devices = self.placement.devices
        return -(-min(self.placement.recipe.evaluation_batch, examples) // devices) * devices

    def prepare(self, state: State) -> State:
        """`state` without the optimizer's; the averages in place of weights and statistics under `ema`."""
        seen = averaged_state(state)
        return seen if seen.statistics is state.statistics else seen._replace(statistics=self._whole(seen.statistics))

    @cached_property
    def _whole(self) -> Callable[[Statistics], Statistics]:
        """Statistics that were split with the optimizer's state, whole on every device."""
        mesh = self.placement.mesh
        return jax.jit(lambda kept: whole_tensors(kept, mesh), out_shardings=replicated(mesh))

    def run(self, state: State, batch: Batch) -> tuple[Sums, ScoredLabels]:
        """The sums of the values of those examples of `batch` where batch["mask"] is true, and scores."""
        return self._compiled(state, batch)

    @cached_property
    def _compiled(self) -> Any:
        return jax.jit(self.sums_and_scores)

    def sums_and_scores(self, state: State, batch: Batch) -> tuple[Sums, ScoredLabels]:
        """`run`, for use inside `jax.jit`."""
        placement, mesh = self.placement, self.placement.mesh
        recipe, batches = placement.recipe, placement.batches

        def local(params: Params, statistics: Statistics, batch: Batch) -> tuple[Sums, ScoredLabels]:
            batch = dict(batch)
            mask, numbers = batch.pop("mask"), batch.pop(NUMBERS)
            rules = logical_axis_rules(mesh, placement.splits)
            with numbered_examples(numbers, jax.random.key(0)) as key, rules:
                rows = batches.images.cut(batch, batches.test_example)
                with refusing_misfits(recipe, recipe.model, rows):
                    outputs, _ = recipe.model.apply(params, statistics, rows, train=False, key=key)
                with refusing_misfits(recipe, recipe.objective, rows):
                    sums = masked_sums(recipe.objective(outputs, rows), mask)
                    asked = recipe.model, params, outputs, rows, mask, recipe.data
                    scores: Any = answers_of(recipe.objective, *asked)
            return all_reduce_tree(sums, ordered(data_axes(mesh)), placement.devices), scores

        specs = data_specs(mesh, placement.base), PartitionSpec(), batch_spec(mesh)
        function = over_data(local, mesh, specs, (PartitionSpec(), batch_spec(mesh)))
        return function(whole_tensors(state.params, mesh), state.statistics, numbered(batch))
