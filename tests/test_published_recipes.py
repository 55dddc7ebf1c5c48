"""The published recipes train and are judged, narrow and short, on made-up files; BLEU is an objective of a recipe."""

import jax
import numpy as np
import pytest
from published_data import documents, pairs, write_packed, write_pairs

from multipod.errors import MetricError, RecipeError
from multipod.layout.mesh import make_mesh
from multipod.metrics.bleu import bleu
from multipod.metrics.objective import TokenClassification, report_of
from multipod.metrics.translation import Bleu
from multipod.models.bert import tiny_bert
from multipod.recipe.override import override
from multipod.recipes.digits import digits
from multipod.recipes.find import load
from multipod.step.program import program_of
from multipod.step.staged.pipe import layers_of
from multipod.train.context import RunContext
from multipod.train.evaluation import evaluate
from multipod.train.events import Evaluated
from multipod.train.loop import train

pytest.importorskip("tokenizers")

NARROW = ("model.features=16", "model.hidden=32", "model.heads=2", "model.dropout=0", "model.dtype=float32")
SHORT = (
    "target=",
    "batch=8",
    "updates=2",
    "evaluation_batch=8",
    "evaluate_every=0",
    "checkpoint_every=0",
    "layout.mesh=1x2",
)


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def run(recipe):
    events = []
    program = program_of(recipe, make_mesh(recipe.layout))
    state, _ = train(program, RunContext(observers=[events.append]))
    return program, state, next(event for event in events if isinstance(event, Evaluated))


@pytest.mark.slow
def test_bert_trains_on_packed_rows_and_is_judged_by_text(tmp_path):
    """One program for both kinds of files: they give the same arrays."""
    pytest.importorskip("google_crc32c")
    (tmp_path / "wiki.txt").write_text("\n\n".join("\n".join(one) for one in documents()))
    packed = write_packed(tmp_path / "part-00000-of-00001", 12, 32, 5)
    small = ["model.layers=1", "model.vocab=320", "data.vocab=320", "data.length=32", "data.masking.most=5"]
    changes = [*NARROW, *SHORT, *small, "layout.mesh=1x1"]
    recipe = override(load("bert-large"), [f"data.train_files={packed}", f"data.test_files={packed}", *changes])
    program, state, evaluated = run(recipe)
    assert evaluated.count == 12
    assert {"loss", "accuracy", "next_accuracy"} <= set(evaluated.values)
    text = override(recipe, [f"data.train_files={tmp_path}/wiki.txt", f"data.test_files={tmp_path}/wiki.txt"])
    sums = evaluate(program, state, text.data.test())
    assert sums["count"] == len(text.data.test())
    assert np.isfinite(report_of(recipe.objective, sums)["loss"])


@pytest.fixture(scope="module")
def translated(tmp_path_factory):
    """A small Transformer after two updates, judged over two devices on nine pairs."""
    pytest.importorskip("sacrebleu")
    folder = tmp_path_factory.mktemp("wmt")
    files = [f"data.{part}_files={write_pairs(folder, part, pairs(9, 2))}" for part in ("train", "test")]
    small = ["model.encoder_layers=1", "model.decoder_layers=1", "model.vocab=320", "data.vocab=320", "data.length=32"]
    search = ["objective.beam=2", "objective.extra=4", "optimizer.rate=0.02"]
    return run(override(load("transformer-big"), [*files, *NARROW, *SHORT, *small, *search]))


def test_a_run_reports_bleu_by_beam_search_of_true_examples_alone(translated):
    program, state, evaluated = translated
    recipe, data = program.recipe, program.recipe.data
    batch = data.test().read(np.arange(9))
    start, end = data.marks()
    length = batch["source"].shape[1] + 4
    params = jax.device_get(state.params)
    search = jax.jit(
        lambda source: recipe.model.translate(params, {"source": source}, start=start, end=end, length=length, beam=2)
    )
    told = [data.decode(tokens) for tokens in np.asarray(search(batch["source"]).tokens[:, 0])]
    wanted = [other for _, other in pairs(9, 2)]
    assert len(set(told)) > 1
    assert evaluated.count == 9
    assert evaluated.values["bleu"] == pytest.approx(bleu(told, [wanted]), rel=1e-12)
    assert evaluated.sums["bleu_sentences"] == 9
    assert evaluated.values.keys() == {"loss", "accuracy", "perplexity", "bleu"}


def test_perfect_translations_have_100(translated):
    program, _, _ = translated
    data = program.recipe.data
    batch = data.test().read(np.arange(9))
    objective = Bleu()
    tokens = {"loss": 1.0, "nats": 1.0, "right": 1, "tokens": 2, "count": 9}
    for mask, same in ((np.ones(9, bool), True), (np.arange(9) < 7, True), (np.arange(9) < 7, False)):
        label = batch["label"] if same else np.roll(batch["label"], 1, 0)
        answers = [
            (label, label, batch["number"], mask),
            (label[:2], label[:2], batch["number"][:2], np.zeros(2, bool)),
        ]
        sums = tokens | objective.judge(answers, data, Hosts())
        assert sums["bleu_sentences"] == mask.sum()
        values = objective.finish(sums)
        assert (values["bleu"] == pytest.approx(100)) == same
    assert "bleu" not in objective.finish(tokens)


class Hosts:
    index, count = 0, 1

    def gather(self, message):
        return [message]


def test_an_objective_is_chosen_by_name_and_keeps_what_it_has():
    recipe = load("stdlib-docs")
    changed = override(recipe, ["objective=bleu", "objective.beam=3"])
    assert changed.objective == Bleu(tokens_per_example=32, label_smoothing=0.1, beam=3)
    assert override(changed, ["objective=tokens"]).objective == recipe.objective
    assert isinstance(override(digits(), ["objective=tokens"]).objective, TokenClassification)
    with pytest.raises(RecipeError, match=r"none is called 'blue'. Nearest: bleu"):
        override(recipe, ["objective=blue"])
    with pytest.raises(MetricError, match="beam=0"):
        override(changed, ["objective.beam=0"])


def test_what_cannot_translate_is_refused():
    model, data = tiny_bert(), load("stdlib-lm").data
    batch = {"source": np.zeros((1, 4), np.int32), "source_segment": np.zeros((1, 4), np.int32)}
    with pytest.raises(MetricError, match=r"Bert has no method .*; StdlibText has no methods .*several sentences"):
        Bleu().answer(model, {}, None, batch, data)
    with pytest.raises(RecipeError, match="Bleu has the whole model answer, and a stage has a part of it"):
        layers_of(load("transformer-big"))
