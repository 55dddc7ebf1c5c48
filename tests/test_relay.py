"""A run's state in another number of stages, or in none: number by number, drained if it was asynchronous."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from test_staged import LATE, T123, dense, fed, unsplit

from multipod.errors import LayoutError, RunFolderError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import PipelineSplit
from multipod.layout.sync import Sync
from multipod.optim.pipemare import PipeMare, RescheduleState, VelocityState
from multipod.optim.rates import Cosine
from multipod.optim.sgd import Sgd
from multipod.runs.converting import check_convertible, convert_checkpoint
from multipod.step.convert import convert
from multipod.step.program import program_of
from multipod.train.checkpoints.checkpoint import Checkpoints
from multipod.train.run_folder import create


def program(layout, **changes):
    recipe = dense(layout, **changes)
    return program_of(recipe, make_mesh(layout))


def advanced(program, state, hosts):
    """The state after the updates of these batches, and their mean losses."""
    update, losses = program.compile_update(), []
    for host in hosts:
        batch = program.place_batch(host, np.arange(program.rows), program.rows)
        state, sums = jax.block_until_ready(update(state, batch, program.controls()))
        losses.append(float(sums["loss"]) / max(int(sums["count"]), 1))
    return state, losses


def moved(before, state, after):
    shardings = jax.tree.map(lambda leaf: leaf.sharding, after.shapes)
    return jax.jit(lambda given: convert(before, given, after), out_shardings=shardings)(jax.device_get(state))


def saved(folder, program, state):
    opened = create(folder, program.recipe, {"mesh": dict(program.mesh.shape), "recipe": program.recipe.name})
    checkpoints = Checkpoints(opened.checkpoints, 1)
    checkpoints.save(state, int(state.update))
    checkpoints.wait()
    checkpoints.close()
    return opened, {"mesh": dict(program.mesh.shape)}


@pytest.mark.slow
def test_a_synchronous_run_goes_on_in_other_stages_and_in_none(tmp_path):
    """Two updates in stages; the third in other stages, and unsplit: that of a run that was never split."""
    first = program(Layout((1, 1), pipeline=PipelineSplit(2, schedule="interleaved", micro_batches=2)))
    hosts = fed(first, 3)
    state, losses = advanced(first, first.init(), hosts[:2])
    known = jax.device_get(jax.jit(lambda s: first.conversion.to_portable(s))(state))
    folder, facts = saved(tmp_path / "run", first, state)
    for layout in (Layout((2, 1), pipeline=PipelineSplit(4, schedule="gpipe", micro_batches=3)), Layout((1, 1))):
        other = program(layout)
        check_convertible(folder, facts, first.recipe, other.recipe)
        taken = convert_checkpoint(other, folder, facts, first.recipe, None)
        jax.tree.map(
            np.testing.assert_array_equal, jax.jit(lambda s, o=other: o.conversion.to_portable(s))(taken), known
        )
        _, third = advanced(other, taken, hosts[2:])
        np.testing.assert_allclose([*losses, *third], unsplit()[0], rtol=1e-5)


@pytest.mark.slow
def test_an_asynchronous_run_is_drained_and_goes_on_with_its_velocities(tmp_path):
    before = program(LATE, pipemare=T123)
    hosts = fed(before, 6)
    state, _ = advanced(before, before.init(), hosts[:5])
    folder, facts = saved(tmp_path / "run", before, state)
    after = program(Layout((1, 1), pipeline=PipelineSplit(2, schedule="pipemare", micro_batches=2)), pipemare=T123)
    taken = convert_checkpoint(after, folder, facts, before.recipe, None)
    params = jax.device_get(after.full_params(taken))
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(before.full_params(state)))
    drained = jax.block_until_ready(jax.jit(before.conversion.drain)(state))
    velocity, found = (
        jax.device_get(jax.jit(lambda s, p=p: p.conversion.to_portable(s))(s).velocity)
        for p, s in ((before, drained), (after, taken))
    )
    assert any(np.any(delta) for delta in found.values())
    jax.tree.map(np.testing.assert_array_equal, found, velocity)
    _, reschedule, tracked = after.placement.pipe.unpack_states(jax.device_get(taken.optimizer.states))[0]
    assert isinstance(reschedule, RescheduleState)
    assert isinstance(tracked, VelocityState)
    assert int(reschedule.taken) == 5
    assert int(taken.optimizer.started) == int(taken.optimizer.tick) == 0
    goes_on, _ = advanced(after, taken, hosts[5:])
    assert int(goes_on.update) == 6
    whole = program(Layout((1, 1)))  # synchronous from here on: PipeMare's own numbers are left behind
    unsplit_state = moved(before, drained, whole)
    np.testing.assert_array_equal(unsplit_state.params["last/bias"], params["last/bias"])


def test_what_cannot_go_on_is_said(tmp_path, monkeypatch):
    before = program(LATE, pipemare=T123)
    folder, facts = saved(tmp_path / "run", before, before.init())
    other = dense(Layout((1, 1), pipeline=PipelineSplit(2)), optimizer=Sgd(Cosine(0.2), momentum=0.9))
    with pytest.raises(RunFolderError, match=r"differ in more than how it lies:\n  optimizer.rate: 0.1, now 0.2\nUndo"):
        check_convertible(folder, facts, before.recipe, other)
    monkeypatch.setattr(jax, "device_count", lambda: 2)
    with pytest.raises(LayoutError, match=r"under way in its pipemare pipeline on 6 devices, and there are 2 to"):
        check_convertible(folder, facts, before.recipe, replace(dense(LATE), pipemare=PipeMare()))
    monkeypatch.undo()
    adasum = program(Layout((1, 2), sync=Sync("adasum")))
    with pytest.raises(
        LayoutError,
        match=r"layout.gradient_sum=adasum with another layout: each device has an optimizer state of its own",
    ):
        convert(adasum, adasum.shapes, before)
