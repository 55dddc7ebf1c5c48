"""Faults of models, pipelines, batch norm, dropout and evaluations: `verify` finds each of them.

Those of sums, batches and saved states are in test_verify_layouts.py.
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from layout_recipes import VOCAB, Pictures, words

from multipod.execute.pipeline import loop as pipelines
from multipod.execute.sums import SUMS, VectorSum, xla
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.layout.sync import Sync
from multipod.metrics.objective import Classification
from multipod.models.resnet import SmallResNet
from multipod.models.transformer import small_transformer
from multipod.nn.images import batch_norm
from multipod.step import accumulate, loss, unstaged
from multipod.step import update as whole_update
from multipod.step.program import program_of
from multipod.step.staged import program as staged
from multipod.verify import checks
from multipod.verify.recording import recording
from multipod.verify.reference import Reference
from multipod.verify.verify import LayoutResult, hold

pytestmark = pytest.mark.slow

Change = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def texts() -> Reference:
    model = small_transformer(VOCAB, features=16, hidden=32, heads=4, encoder_layers=1, decoder_layers=1, dropout=0.2)
    return walked(Reference(recording(replace(words(), model=model)), 1))


@pytest.fixture(scope="module")
def images() -> Reference:
    model = SmallResNet(channels=2, classes=4, width=4, blocks=(1,))
    recipe = replace(words(), name="pictures", model=model, data=Pictures(), objective=Classification())
    return walked(Reference(recording(recipe), 1))


def walked(reference: Reference) -> Reference:
    assert reference.walk
    return reference


def held(reference: Reference, layout: Layout, times: int = 1) -> LayoutResult:
    recipe = replace(reference.recipe, layout=layout, accumulate=times)
    return hold(program_of(recipe, make_mesh(layout)), reference)


def a_mask_by_device(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def own(numbers: jax.Array, key: jax.Array) -> Any:
        with numbered(numbers - numbers[0], key) as mine:
            yield mine

    numbered = loss.numbered_examples
    patch.setattr(loss, "numbered_examples", own)


def the_first_part_twice(patch: pytest.MonkeyPatch) -> None:
    def in_turn(step: Any, times: int, params: Any, statistics: Any, key: Any, batch: Any) -> Any:
        first = jax.tree.map(lambda rows: jnp.tile(rows[: len(rows) // times], (times, *[1] * (rows.ndim - 1))), batch)
        return true(step, times, params, statistics, key, first)

    true = accumulate._in_turn
    patch.setattr(accumulate, "_in_turn", in_turn)


def a_micro_batch_in_the_place_of_all(patch: pytest.MonkeyPatch) -> None:
    def cut(batch: Any, mesh: Any, count: int) -> Any:
        return jax.tree.map(lambda rows: jnp.broadcast_to(rows[:1], rows.shape), true(batch, mesh, count))

    true = staged.cut_rows
    patch.setattr(staged, "cut_rows", cut)


def stages_that_do_not_add_over_data(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipelines, "sum_over_data", lambda slots, gradients: gradients)


def tied_weights_that_are_not_added(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pipelines, "sum_tied", lambda slots, gradients, stage: gradients)


def shares_gathered_in_another_order(patch: pytest.MonkeyPatch) -> None:
    def made(axes: Any) -> VectorSum:
        total, count = xla(axes), lax.axis_size(tuple(axes))
        turned = [(n, (n + 1) % count) for n in range(count)]
        gather = lambda share: total.all_gather(lax.ppermute(share, tuple(axes), turned))  # noqa: E731
        return VectorSum(total.all_reduce, total.reduce_scatter, gather, total.alone_bytes)

    patch.setitem(SUMS, "direct", made)


def a_variance_that_is_corrected_by_device(patch: pytest.MonkeyPatch) -> None:
    def moved(self: Any, moments: Any, tile: Any) -> Any:
        mean, var = true(self, moments, tile)
        return mean, var * 1.01

    true = batch_norm.TileBatchNorm._moved_by
    patch.setattr(batch_norm.TileBatchNorm, "_moved_by", moved)


def sums_of_one_device(patch: pytest.MonkeyPatch) -> None:
    def reduced(mesh: Any, statistics: Any, sums: Any) -> Any:
        means, _ = true(mesh, statistics, sums)
        return means, jax.tree.map(lambda one: one * mesh.size, sums)

    true = whole_update.reduce_metrics
    patch.setattr(whole_update, "reduce_metrics", reduced)


def a_loss_over_the_examples_of_a_device(patch: pytest.MonkeyPatch) -> None:
    def mean(values: Any, mask: Any = None) -> Any:
        sums = true(values, mask)
        rows = values["loss"].shape[0]
        return sums | {"loss": sums["loss"] * rows / jnp.maximum(sums["count"], 1)}

    true = loss.masked_sums
    patch.setattr(loss, "masked_sums", mean)


def moments_of_one_device(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(batch_norm, "tile_mean", lambda x, tile: x)


def a_mean_of_variances(patch: pytest.MonkeyPatch) -> None:
    def moments(x: jax.Array, mask: Any) -> jax.Array:
        mean, square = true(x, mask)[:2]
        return jnp.stack([tile(mean, "all"), square - jnp.square(mean) + jnp.square(tile(mean, "all"))])

    true, tile = batch_norm._moments, batch_norm.tile_mean
    patch.setattr(batch_norm, "_moments", moments)


def a_last_batch_that_is_dropped(patch: pytest.MonkeyPatch) -> None:
    def short(program: Any, state: Any, test: Any) -> Any:
        if program.mesh.size > 1:
            test = replace(test, count=test.count - 1)
        return true(program, state, test)

    true = checks.evaluate
    patch.setattr(checks, "evaluate", short)


def an_update_done_twice(patch: pytest.MonkeyPatch) -> None:
    def twice(self: Any, state: Any, batch: Any, controls: Any) -> Any:
        new, sums = true(self, state, batch, controls)
        return true(self, new._replace(update=state.update, position=state.position), batch, controls)[0], sums

    true = unstaged.UnstagedProgram.update
    patch.setattr(unstaged.UnstagedProgram, "update", twice)


DATA, STAGES = Layout((1, 2)), Layout((1, 2), pipeline=PipelineSplit(2, "1f1b", 2))
ZERO = Layout((1, 4), sync=Sync("direct", sharding="zero1"))
FAULTS: dict[str, tuple[Change, str, Layout, int, str]] = {
    "dropout keyed by device": (a_mask_by_device, "texts", DATA, 1, "the batch or the forward pass"),
    "the first part of a batch twice": (the_first_part_twice, "texts", DATA, 2, "the batch or the forward pass"),
    "a repeated micro-batch": (a_micro_batch_in_the_place_of_all, "texts", STAGES, 1, "the batch or the forward pass"),
    "stages that do not add": (stages_that_do_not_add_over_data, "texts", STAGES, 1, "the sum of gradients"),
    "tied weights not added": (tied_weights_that_are_not_added, "texts", STAGES, 1, "the sum of gradients"),
    "shares in another order": (shares_gathered_in_another_order, "texts", ZERO, 1, "the optimizer"),
    "another variance": (a_variance_that_is_corrected_by_device, "images", DATA, 1, "statistics"),
    "sums of one device": (sums_of_one_device, "texts", DATA, 1, "the batch or the forward pass"),
    "a mean of means": (
        a_loss_over_the_examples_of_a_device, "texts", Layout((2, 2), failed=((0, 1),)), 1, "the batch or the forward",
    ),
    "batch norm of one device": (moments_of_one_device, "images", DATA, 1, "the batch or the forward pass"),
    "a mean of variances": (a_mean_of_variances, "images", DATA, 1, "the batch or the forward pass"),
    "a last batch dropped": (a_last_batch_that_is_dropped, "images", DATA, 1, "the evaluation's count"),
    "an update done twice": (an_update_done_twice, "texts", Layout((1, 2), ModelSplit(model=2)), 1, "the optimizer"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_and_its_stage_named(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    change, which, layout, times, said = FAULTS[name]
    reference: Reference = request.getfixturevalue(which)
    change(monkeypatch)
    result = held(reference, layout, times)
    assert any(said in wrong for wrong in result.wrong), result
    assert np.isfinite(result.curve)


def test_without_a_fault_nothing_is_found(texts: Reference, images: Reference) -> None:
    for reference, layout in ((texts, STAGES), (images, DATA)):
        assert held(reference, layout).wrong == ()
