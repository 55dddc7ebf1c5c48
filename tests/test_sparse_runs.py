"""Sparse models through the trainer: experts split over devices, and a fine-tuning from end to end."""

import json
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest
from layout_recipes import VOCAB, words

from multipod.cli.main import main
from multipod.data.batches import TrainBatches
from multipod.data.text.files import TextFiles
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.metrics.objective import report_of
from multipod.metrics.sparse import SparseTokens
from multipod.models.st_moe import small_st_moe
from multipod.nn.experts.routing import Routing
from multipod.optim.adafactor import Adafactor
from multipod.optim.rates import Rsqrt, WarmUp
from multipod.recipes.finetune import FineTuning, make_finetuning
from multipod.step.program import program_of
from multipod.step.state import device_bytes
from multipod.train.evaluation import evaluate

TINY = {"features": 16, "hidden": 16, "heads": 2, "kv": 8, "layers": 1, "every": 1, "group_rows": 2}


def sparse(layout):
    """Nothing is drawn, and a group is two rows: what is learnt then depends on no mesh."""
    model = small_st_moe(VOCAB, **TINY, routing=Routing(4, capacity=0.5, second="all"))
    return words(
        layout,
        model=model,
        objective=SparseTokens(),
        optimizer=Adafactor(WarmUp(Rsqrt(0.05), updates=2), factored_from=8),
    )


def learnt(recipe, updates=3):
    program = program_of(recipe, make_mesh(recipe.layout))
    update, state, told = program.compile_update(), program.init(), []
    incoming = TrainBatches(recipe.data.train(), recipe.batch, 0, np.arange(program.rows)).start(0)
    for _ in range(updates):
        batch = program.place_batch(next(incoming), np.arange(program.rows), program.rows)
        state, sums = jax.block_until_ready(update(state, batch, program.controls()))
        sums.pop("stop")
        told.append(report_of(recipe.objective, jax.device_get(sums)))
    told.append(report_of(recipe.objective, evaluate(program, state, recipe.data.test())))
    return program, told, jax.device_get(state.params)


@pytest.mark.slow
def test_experts_split_over_devices_learn_as_in_one():
    """Losses, loads and dropped shares, and every weight; the rest of the optimizer split over the data axes."""
    _, known, weights = learnt(sparse(Layout((1, 1))))
    program, told, found = learnt(sparse(Layout((1, 2), split=ModelSplit(expert=4), sync=Sync(sharding="zero1"))))
    assert 0 < known[0]["dropped/encoder/0"] < 1
    assert {"load/decoder/0/3", "entropy/encoder/0"} <= set(known[0])
    for one, other in zip(told, known, strict=True):
        assert one == pytest.approx(other, rel=2e-4, abs=1e-5)
    for name, right in weights.items():
        np.testing.assert_allclose(found[name], right, rtol=2e-3, atol=2e-5, err_msg=name)
    experts = {name: leaf for name, leaf in program.shapes.params.items() if "/experts/" in name}
    assert device_bytes(experts) * 4 == sum(leaf.size * 4 for leaf in experts.values())


@pytest.mark.slow
def test_answers_told_by_experts_of_several_devices_are_those_of_one(tmp_path):
    """Rows end at different tokens: a device that is done still takes its part in the steps of the others."""
    pytest.importorskip("tokenizers")
    pairs = [{"input": f"double {n}", "target": "ten " * (n % 4 + 1) + str(2 * n)} for n in range(20)]
    text = "\n".join(pair["input"] + " is " + pair["target"] for pair in pairs)
    files = [tmp_path / name for name in ("text.txt", "task.jsonl")]
    for file, lines in zip(files, (text, "\n".join(map(json.dumps, pairs))), strict=True):
        file.write_text(lines)
    data = TextFiles(train_files=str(files[0]), test_files=str(files[0]), length=16, vocab=300, spans=True)
    base = replace(sparse(Layout((1, 1))), data=data)
    base = replace(base, model=replace(base.model, vocab=300))

    def told(layout, token=None):
        recipe = make_finetuning(replace(base, layout=layout), FineTuning((str(files[1]),), capacity=4.0))
        program = program_of(recipe, make_mesh(recipe.layout))
        state = program.init()
        # Weights that are large make answers that differ.
        params = jax.tree.map(lambda leaf: leaf * 3, state.params)
        if token is not None:  # what told `token` ends an answer now
            head, end = params["head/kernel"], recipe.data.marks()[1]
            params["head/kernel"] = head.at[:, [token, end]].set(head[:, [end, token]])
        rows = np.arange(4)
        batch = recipe.data.test().read(rows) | {"mask": rows < 4}
        placed = program.place_batch(batch, rows, 4)
        state = program.evaluation.prepare(state._replace(params=params))
        return np.asarray(program.evaluation.run(state, placed)[1][0])

    whole = told(Layout((1, 1)))
    split = Layout((1, 1), split=ModelSplit(expert=4))
    token = int(whole[0, 1])
    ended = told(split, token)
    np.testing.assert_array_equal(ended, told(Layout((1, 1)), token))
    lengths = (ended != 0).sum(1)
    assert lengths[0] <= 2 < lengths.max()


@pytest.mark.slow
def test_a_fine_tuning_from_end_to_end(tmp_path, monkeypatch, capsys):
    """Pre-trains two updates, fine-tunes the experts alone for two, evaluates; the rest stays as it was."""
    pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    pairs = [{"input": f"double {n}", "target": str(2 * n)} for n in range(16)]
    (tmp_path / "task.jsonl").write_text("\n".join(map(json.dumps, pairs)))

    def multipod(*args):
        monkeypatch.setattr(sys, "argv", ["multipod", *args])
        with pytest.raises(SystemExit) as done:
            main()
        said = capsys.readouterr()
        assert done.value.code == 0, said.err
        return said.out

    sizes = [f"model.{name}={value}" for name, value in TINY.items()]
    data = ["data.length=24", "data.text.vocab=300", "data.text.files=email/*.py", "model.vocab=316"]
    short = ["updates=2", "batch=16", "evaluation_batch=16", "evaluate_every=0", "checkpoint_every=0"]
    changes = [word for change in (*sizes, *data, *short) for word in ("--set", change)]
    multipod("train", "st-moe-small", *changes, "--out", "before", "--quiet", "--mesh", "1x2")
    (tmp_path / "more.jsonl").write_text("\n".join(map(json.dumps, pairs[:6])))
    tuned = [
        "--task",
        "task.jsonl",
        "--task",
        "more.jsonl",
        "--limit",
        "5",
        "--train",
        "experts",
        "--updates",
        "2",
        "--batch",
        "4",
        "--out",
        "after",
    ]
    multipod("finetune", "before", *tuned, "--quiet", "--mesh", "1x2")
    answers = multipod("eval", "after", "--mesh", "1x2", "--tell", "3")
    assert "after 2 updates" in answers
    assert "exact" in answers
    assert "told by itself: 0 of 3 right" in answers  # after two updates
    assert "double 5<1>" in answers.replace(" ", "").replace("double", "double ")
    events = [json.loads(line) for line in (tmp_path / "after" / "metrics.jsonl").read_text().splitlines()]
    values = next(event["values"] for event in events if event["event"] == "evaluated")
    assert {"exact", "accuracy", "dropped/encoder/0", "load/decoder/0/7"} <= set(values)
    assert values["exact_match"] == values["exact_match/task"] == values["exact_match/more"] == 0
    assert 0 <= values["token_f1"] == (values["token_f1/task"] + values["token_f1/more"]) / 2
    report = (tmp_path / "after" / "report.html").read_text()
    assert "decoder/0/7" in report  # a row of the heat map of loads
    first, second = (_weights(tmp_path / run) for run in ("before", "after"))
    moved = {name for name in first if not np.array_equal(first[name], second[name])}
    assert moved
    assert all("/experts/" in name for name in moved)


def _weights(run):
    import orbax.checkpoint as ocp

    tree = ocp.StandardCheckpointer().restore((run / "checkpoints" / "2" / "default").absolute())
    return {name: np.asarray(leaf) for name, leaf in tree["params"].items()}
