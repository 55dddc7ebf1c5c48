"""Recipes in pipeline stages through the trainer: equal to unsplit ones, to the delay simulator, and to themselves."""

import functools
import subprocess
import sys
from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import psutil
import pytest
from layout_recipes import pictures, words
from processes import clean_environment
from test_cli import wait_for

from multipod.data.batches import TrainBatches
from multipod.errors import LayoutError, RecipeError, RunFolderError, ScheduleError
from multipod.execute.pipeline.delays import begin_simulation, newest_weights, simulate_update
from multipod.layout.fields import from_fields
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.layout.stages import micro_batches
from multipod.layout.sync import Sync
from multipod.layout.text import layout_changes, spelled
from multipod.models.mlp import Mlp
from multipod.models.transformer import small_transformer
from multipod.nn.by_example import NUMBERS
from multipod.optim.adamw import AdamW
from multipod.optim.pipemare import PipeMare
from multipod.optim.rates import Cosine
from multipod.optim.sgd import Sgd
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.recipes.digits import digits
from multipod.recipes.mlp_small import mlp_small
from multipod.step.program import program_of
from multipod.step.staged.pipe import join_params, split_params
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.context import RunContext
from multipod.train.evaluation import evaluate
from multipod.train.events import Evaluated, Updated
from multipod.train.loop import train
from multipod.train.run_folder import RunFolder, check_pipe

T123 = PipeMare(anneal=4, decay=0.2, warmup=2)
LATE = Layout((1, 2), pipeline=PipelineSplit(3, schedule="pipemare", micro_batches=2))


def dense(layout: Layout = Layout((1, 1)), **changes) -> Recipe:  # noqa: B008 (frozen)
    base = replace(mlp_small(), model=Mlp(features=8, layers=2), batch=24, updates=7, layout=layout)
    plain = {"evaluate_every": 0, "checkpoint_every": 0, "optimizer": Sgd(Cosine(0.1), momentum=0.9)}
    return replace(base, **plain | changes)


def dropping(layout: Layout, **changes) -> Recipe:
    """Adam, which shows gradients of another scale, and dropout: draws that differ show as well."""
    model = small_transformer(64, features=8, hidden=8, heads=2, encoder_layers=1, decoder_layers=1, dropout=0.2)
    return words(layout, model=model, optimizer=AdamW(Cosine(0.01)), **changes)


def fed(program, updates):
    batches = TrainBatches(
        program.recipe.data.train(), program.recipe.batch, program.recipe.seed, np.arange(program.rows), program.padded
    )
    incoming = batches.start(0)
    return [next(incoming) for _ in range(updates)]


def learnt(recipe, updates=3):
    """Losses, evaluation and weights."""
    program = program_of(recipe, make_mesh(recipe.layout))
    update, state, losses = program.compile_update(), program.init(), []
    for host in fed(program, updates):
        batch = program.place_batch(host, np.arange(program.rows), program.rows)
        state, sums = jax.block_until_ready(update(state, batch, program.controls()))
        losses.append(float(sums["loss"]) / max(int(sums["count"]), 1))
    return losses, evaluate(program, state, recipe.data.test()), jax.device_get(program.full_params(state))


def assert_same(found, known):
    np.testing.assert_allclose(found[0], known[0], rtol=1e-5)
    assert found[1].keys() == known[1].keys()
    assert found[1]["count"] == known[1]["count"]
    np.testing.assert_allclose(found[1]["loss"], known[1]["loss"], rtol=1e-4)
    assert found[2].keys() == known[2].keys()
    for name, right in known[2].items():
        np.testing.assert_allclose(found[2][name], right, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        Layout((2, 1), pipeline=PipelineSplit(4, schedule="gpipe", micro_batches=3), sync=Sync("ring")),
        Layout((1, 2), pipeline=PipelineSplit(2, schedule="interleaved", micro_batches=4)),
        Layout((1, 3), pipeline=PipelineSplit(2, micro_batches=5), failed=((0, 0),)),  # 24 rows and 6 of padding
        Layout(
            (2, 1),
            split=ModelSplit(model=2, rules=("embed_out=model",)),
            pipeline=PipelineSplit(2, schedule="interleaved", micro_batches=2),
            sync=Sync("ring"),
        ),
    ],
    ids=lambda layout: layout.pipeline.schedule,
)
def test_dense_layers_in_stages_learn_as_the_unsplit_model(layout):
    assert_same(learnt(dense(layout)), unsplit())


@functools.cache
def unsplit():
    return learnt(dense())


@pytest.mark.slow
def test_a_transformer_in_stages_learns_as_the_unsplit_model_with_its_dropout():
    """One table in all stages; the encoder's output beside the decoder's; the draws of accumulated gradients."""
    assert_same(learnt(dropping(Layout((1, 2), pipeline=PipelineSplit(3, micro_batches=2))), 2), unsplit_transformer())


@functools.cache
def unsplit_transformer():
    return learnt(dropping(Layout((1, 2)), accumulate=2), 2)


@pytest.mark.slow
def test_inside_each_stage_a_transformer_is_split_by_heads_hidden_features_and_vocabulary():
    """arXiv:1909.08053, section 3, in every stage."""
    recipe = dropping(Layout((1, 2), split=ModelSplit(model=2), pipeline=PipelineSplit(2, micro_batches=2)))
    program = program_of(recipe, make_mesh(recipe.layout))
    update, state, losses = program.compile_update(), program.init(), []
    for host in fed(program, 2):
        batch = program.place_batch(host, np.arange(program.rows), program.rows)
        state, sums = jax.block_until_ready(update(state, batch, program.controls()))
        losses.append(float(sums["loss"]) / int(sums["count"]))
    np.testing.assert_allclose(losses, unsplit_transformer()[0], rtol=1e-5)


def test_inside_a_stage_the_axis_model_splits_weights_and_optimizer_state():
    layout = Layout(
        (1, 1), split=ModelSplit(model=2, rules=("embed_out=model",)), pipeline=PipelineSplit(2, micro_batches=2)
    )
    program = program_of(dense(layout), make_mesh(layout))
    kernel, moment = (next(a for a in slots if a.shape == (2, 8, 8)) for slots in (
        program.shapes.params[0], program.shapes.optimizer.states[0],
    ))  # fmt: skip
    assert kernel.sharding.shard_shape(kernel.shape) == (1, 8, 4)
    assert moment.sharding.shard_shape(moment.shape) == (1, 8, 4)
    layout = replace(layout, split=replace(layout.split, rules=()))
    with pytest.raises(
        LayoutError, match=r"layout.model=2 splits nothing of this model, whose dims are classes, embed"
    ):
        _ = program_of(dense(layout), make_mesh(layout)).lowered


@pytest.mark.slow
@pytest.mark.parametrize(
    "late",
    [
        LATE,
        Layout(
            (1, 1),
            split=ModelSplit(model=2, rules=("embed_out=model",)),
            pipeline=PipelineSplit(3, schedule="pipemare", micro_batches=2),
        ),
    ],
    ids=["data", "model"],
)
def test_pipemare_through_the_trainer_is_the_delay_simulator(late):
    recipe, devices = dense(late, pipemare=T123), late.mesh[1]
    program = program_of(recipe, make_mesh(recipe.layout))
    update, state, pipe = program.compile_update(), program.init(), program.placement.pipe
    one = replace(LATE, mesh=(1, 1))
    alone = program_of(replace(recipe, layout=one), make_mesh(one)).placement.pipe
    weights = split_params(alone, jax.device_get(program.full_params(state)))
    history = begin_simulation(alone.setup.parts, weights, 8)
    simulate = jax.jit(
        lambda h, b, late: simulate_update(alone.setup.parts, h, b, pipe.setup.tables.delays, delayed=late)
    )
    counts = []
    for k, host in enumerate(fed(program, recipe.updates)):
        batch = program.place_batch(host, np.arange(program.rows), program.rows)
        state, sums = jax.block_until_ready(update(state, batch, program.controls()))
        counts.append(int(sums["count"]))
        # A micro-batch is one of each data device's: its rows are the first and third, or second and fourth, quarter.
        rows = jax.tree.map(
            lambda a: a.reshape(devices, 2, -1, *a.shape[1:]).swapaxes(0, 1).reshape(2, 12, *a.shape[1:]), host
        )
        rows[NUMBERS] = np.arange(24, dtype=np.uint32).reshape(2, 12)
        history, _ = simulate(history, {"batch": rows, "key": np.zeros((2, 2), np.uint32)}, k >= T123.warmup)
    known = join_params(list(newest_weights(history)))
    found = jax.device_get(program.full_params(state))
    for name, right in known.items():
        np.testing.assert_allclose(found[name], right, rtol=2e-4, atol=2e-6, err_msg=name)
    assert counts == [24, 24, 0, 24, 24, 24, 24]  # after the warm-up the pipe fills
    assert evaluate(program, state, recipe.data.test())["count"] == 360


@pytest.mark.slow
def test_stopped_in_mid_pipeline_it_goes_on_with_the_same_bits(tmp_path):
    recipe = dense(LATE, pipemare=T123, evaluate_every=4, checkpoint_every=3)
    program = program_of(recipe, make_mesh(recipe.layout))

    def run(folder, state=None, stop_after=0):
        told = []
        with closing(Checkpoints(folder, keep=3)) as saved:
            around = RunContext(saved, [told.append], stop_after=stop_after, evaluate_beside=bool(stop_after))
            given = saved.restore(program.shapes) if state else None
            end, _ = train(program, around, given)
        return jax.device_get(end), [(e.update, e.values) for e in told if isinstance(e, Updated | Evaluated)]

    straight, said = run(tmp_path / "a")
    _, first = run(tmp_path / "b", stop_after=5)
    ended, second = run(tmp_path / "b", state=True)
    assert sorted([*first, *second], key=str) == sorted(said, key=str)
    assert jax.tree.leaves(ended.optimizer.flight)
    jax.tree.map(np.testing.assert_array_equal, ended, straight)


def test_what_a_pipeline_cannot_do_is_said(tmp_path):
    def refused(recipe, kind=LayoutError):
        with pytest.raises(kind) as error:
            _ = program_of(recipe, make_mesh(recipe.layout)).lowered
        return str(error.value)

    wanted = {"stage": 2, "schedule": "pipemare", "spatial": (2,), "gradient_sum": "ring", "shard_update": True}
    with pytest.raises(LayoutError) as error:
        from_fields(wanted)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [
        "layout.stage=2 with layout.spatial=2",
        "layout.stage=2 with layout.shard_update=true",
        "layout.schedule=pipemare with layout.gradient_sum=ring",
    ]
    for line in ("inside a stage only model splits anything", "which is a share already", "sum at different moments"):
        assert line in str(error.value)
    both = dense(Layout((1, 1), pipeline=PipelineSplit(2)), pipemare=T123, accumulate=2)
    said = refused(both)
    assert "accumulate=2: micro-batches are that already. Set accumulate=1 and layout.micro_batches." in said
    assert "pipemare.warmup=2 with layout.schedule=1f1b: it is synchronous" in said
    said = refused(pictures(Layout((1, 1), pipeline=PipelineSplit(2))), RecipeError)
    assert "recipe pictures: SmallResNet normalises over the batch: in a pipeline that would be a micro-batch" in said
    assert "5 stages for 4 layers" in refused(dense(Layout((1, 1), pipeline=PipelineSplit(5))))
    said = refused(dense(Layout((1, 2), pipeline=PipelineSplit(2, micro_batches=5))))
    assert (
        "5 micro-batches do not divide the 12 rows of a data device. Take 1, 2, 3, 4, 6 micro-batches, or 10 or" in said
    )
    said = refused(
        words(Layout((1, 1), pipeline=PipelineSplit(2, schedule="pipedream", micro_batches=2))), ScheduleError
    )
    assert "they cannot stay equal: embedding/table (parts 0, 1)" in said
    with pytest.raises(LayoutError, match=r"no pipeline is called 'gpip'. Nearest: gpipe"):
        Layout(pipeline=PipelineSplit(2, schedule="gpip"))
    with pytest.raises(
        RunFolderError, match=r"under way in its pipemare pipeline, on a mesh of y=1 x=2 stage=3. Go on"
    ):
        check_pipe(
            RunFolder(tmp_path), {"mesh": {"y": 1, "x": 2, "stage": 3}}, dense(LATE), {"y": 1, "x": 1, "stage": 3}
        )
    with pytest.raises(RecipeError, match=r"Mlp: features=0, layers=-1. Sizes are 1 or more"):
        Mlp(features=0, layers=-1)


def test_the_number_of_micro_batches_follows_the_rows():
    assert micro_batches(0, 2, 24) == 8
    assert micro_batches(0, 4, 7) == 7
    assert micro_batches(0, 3, 24, rounds=True) == 12
    with pytest.raises(
        LayoutError, match=r"3 micro-batches do not divide the 8 rows of a data device. Take 6 or 9 rows"
    ):
        micro_batches(0, 3, 8, rounds=True)


def test_layouts_of_stages_as_text_and_as_tables():
    text = "data=1x2,stage=4,schedule=interleaved,micro=8,chunks=3,cut=1x1x1x1x1x1x1x1x1x1x1x2"
    assert spelled(override(digits(), layout_changes(text)).layout) == f"{text},sum=ordered"
    from multipod.cli.printing.recipe import stage_tables

    layout = Layout((1, 2), pipeline=PipelineSplit(4, schedule="pipemare", micro_batches=4))
    recipe = replace(mlp_small(), layout=layout)
    first, second = stage_tables(program_of(recipe, make_mesh(layout)))
    cells = {column.header: list(column.cells) for column in first.columns}
    assert cells["layers"] == ["first, layer 0", "layer 1, layer 2", "layer 3, layer 4", "layer 5, last"]
    assert cells["parameters"] == ["8,320", "8,320", "8,320", "4,810"]
    assert cells["delay, updates"] == ["1.75", "1.25", "0.75", "0.25"]
    assert cells["micro-batches kept"] == ["7", "5", "3", "1"]
    rows = dict(zip(*(column.cells for column in second.columns), strict=True))
    assert rows["parameters"] == "29,770"
    assert rows["batch"] == "64 of 128 rows, in 4 micro-batches of 16"
    assert int(rows["under way, bytes"].replace(",", "")) > 0


@pytest.mark.slow
@pytest.mark.processes
def test_a_stage_that_dies_is_named_and_nobody_hangs(tmp_path):
    """Two processes, a stage each, in an asynchronous pipeline; one is killed while micro-batches are under way."""
    layout = ["--layout", "data=1x1,stage=2,schedule=pipemare,micro=2", "--cpu-devices", "1"]
    changes = ["--set", "updates=200000", "--set", "evaluate_every=0", "--set", "checkpoint_every=4"]
    command = [sys.executable, "-m", "multipod", "launch", "--processes", "2", "--timeout", "30", "--", "train"]
    launcher = subprocess.Popen(
        [*command, "mlp-small", *layout, *changes, "--out", "run"],
        cwd=tmp_path, env=clean_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    ranks = []
    try:
        wait_for(lambda: (tmp_path / "run" / "checkpoints" / "4" / "checksums.json").is_file(), launcher)
        ranks = psutil.Process(launcher.pid).children()
        next(p for p in ranks if p.environ().get("MULTIPOD_PROCESS_ID") == "1").kill()
        _, err = launcher.communicate(timeout=60)
        assert launcher.returncode == 1
        assert "rank 1" in err
        assert "was killed by SIGKILL" in err
        assert "train --resume" in err
        assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in ranks)
    finally:
        for process in [*ranks, launcher]:
            if process is launcher or process.is_running():
                process.kill()
        launcher.wait()
