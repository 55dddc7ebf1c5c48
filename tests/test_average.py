"""The mean of a run's last checkpoints, as a run of its own."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from tiny_recipe import tiny

from multipod import runs
from multipod.cli.average import average
from multipod.errors import CheckpointError, RunFolderError
from multipod.optim.ema import Ema


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run with checkpoints after 2, 4 and 6 updates, and an average of its weights."""
    recipe = replace(tiny(), updates=6, checkpoint_every=2, evaluate_every=0, ema=Ema(0.5))
    return runs.train(recipe, out=tmp_path_factory.mktemp("average") / "run").folder


def test_weights_statistics_and_averages_are_the_means(trained, tmp_path):
    made = runs.average(trained, last=2, out=tmp_path / "mean")
    assert made.updates == (4, 6)
    mean, parts = runs.open(made.folder).state, [runs.open(trained, at=update).state for update in (4, 6)]
    assert int(mean.update) == 6

    def check(result, *each):
        wanted = np.mean([np.asarray(one, np.float64) for one in each], 0) if result.dtype.kind == "f" else each[-1]
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-7)

    for pick in (
        lambda state: state.params,
        lambda state: state.statistics,
        lambda state: (state.optimizer.params, state.optimizer.statistics),
    ):
        jax.tree.map(check, *jax.device_get([pick(state) for state in (mean, *parts)]))
    inner = [state.optimizer.inner for state in (mean, parts[1])]
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(inner))
    assert runs.evaluate(made.folder).update == 6


def test_one_checkpoint_is_its_own_mean(trained, tmp_path):
    made = runs.average(trained, last=1, out=tmp_path / "mean")
    states = [runs.open(folder).state for folder in (made.folder, trained)]
    jax.tree.map(np.testing.assert_array_equal, *jax.device_get(states))


def test_the_command_says_what_it_made_and_what_it_cannot(trained, tmp_path):
    done = CliRunner().invoke(average, [str(trained), "--last", "3", "--out", str(tmp_path / "mean")])
    assert done.exit_code == 0, done.output
    assert "the mean of the checkpoints after 2, 4, 6 updates. multipod eval" in done.output
    with pytest.raises(CheckpointError, match=r"has 3 checkpoints, after 2, 4, 6 updates, and 4 are .*Take --last 3"):
        runs.average(trained, last=4, out=tmp_path / "more")
    with pytest.raises(RunFolderError, match="is there already"):
        runs.average(trained, last=2, out=tmp_path / "mean")
