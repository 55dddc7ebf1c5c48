"""Fine-tuning: files of tasks, the recipe behind `multipod finetune`."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from multipod import runs
from multipod.data.tasks import Task, read_pairs
from multipod.data.text.files import TextFiles
from multipod.data.text.vocabulary import open_vocabulary
from multipod.errors import DataError, RecipeError
from multipod.models.st_moe import t5_like
from multipod.nn.experts.routing import Routing
from multipod.optim.adafactor import Adafactor
from multipod.optim.partly import Partly
from multipod.optim.rates import Constant
from multipod.recipe.override import override
from multipod.recipe.text import differences, from_text, to_text
from multipod.recipes.find import load
from multipod.recipes.finetune import FineTuning, make_finetuning
from multipod.runs.evaluation import tell_answers
from multipod.runs.recipes import recorded_recipe
from multipod.runs.request import TrainRequest

PAIRS = [{"input": f"double {n}", "target": str(2 * n)} for n in range(10)]


def written(path, lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def test_every_wrong_line_is_named(tmp_path):
    path = written(tmp_path / "task.jsonl", [PAIRS[0], "{", [1], {"input": "a"}, "", {"inputs": "a", "target": 3}])
    with pytest.raises(RecipeError) as refused:
        read_pairs(path)
    said = str(refused.value)
    assert "4 of 6 lines are no pairs of texts" in said
    for part in (
        "line 2: no JSON",
        "line 3: a list, not an object",
        "line 4: no text 'target' among input",
        "line 6: no text 'input' and no text 'target' among inputs, target",
        'Write each as {"input": "...", "target": "..."}.',
    ):
        assert part in said
    with pytest.raises(RecipeError, match=r"it has 1 pairs. Give at least two"):
        read_pairs(written(path, PAIRS[:1]))
    with pytest.raises(RecipeError, match=r"none.jsonl: it cannot be read"):
        read_pairs(tmp_path / "none.jsonl")


def test_a_task_has_sentinels_and_a_test_part(tmp_path):
    pytest.importorskip("tokenizers")
    data = load("st-moe-small").data
    data = replace(data, text=replace(data.text, files="email/*.py", vocab=300))
    task = Task(str(written(tmp_path / "task.jsonl", PAIRS)), data)
    assert (len(task.test()), len(task.train())) == (2, 8)
    row = {name: array[0] for name, array in task.train().arrays.items()}
    assert row["label"][0] == data.vocab - 1  # the sentinel begins the target and ends the input
    last = (row["source"] != 0).sum() - 1
    assert row["source"][last - 1 : last + 1].tolist() == [data.vocab - 1, 3]
    assert row["target"].tolist() == [2, *row["label"][:-1]]
    plain = replace(task, sentinels=False).train().arrays
    assert plain["label"].shape[1] == row["label"].shape[0] - 1
    with pytest.raises(RecipeError, match=r"10 of 10 texts 'input' need more than 3 tokens, the longest \d+. Cut them"):
        replace(task, longest=3).train()


@pytest.fixture
def any_text(tmp_path):
    """A pre-training by spans on a file of one's own."""
    pytest.importorskip("tokenizers")
    text = written(tmp_path / "text.txt", [f"double {n} is {2 * n}, and the half of {2 * n} is {n}" for n in range(40)])
    return TextFiles(train_files=str(text), test_files=str(text), length=16, vocab=300, spans=True)


def test_a_task_follows_a_pre_training_on_any_text(tmp_path, any_text):
    """Rows end, begin and are marked as in that vocabulary; the recipe is read back from its text."""
    before = load("st-moe-small")
    before = replace(before, data=any_text, model=replace(before.model, vocab=300))
    recipe = make_finetuning(before, FineTuning((str(written(tmp_path / "task.jsonl", PAIRS)),)))
    assert from_text(to_text(recipe)) == recipe
    row = {name: array[0] for name, array in recipe.data.train().arrays.items()}
    shown, told = any_text.train().read(np.arange(1)), recipe.data.text_tokens()
    assert row["label"][0] == shown["label"][0, 0] == told.sentinel == 299
    assert row["target"][0] == shown["target"][0, 0] == told.start
    assert row["source"][(row["source"] != 0).sum() - 1] == told.end
    assert recipe.data.decode(row["source"]).startswith("double 1<299>")
    assert recipe.data.decode(row["label"]).startswith("<299>2")
    with pytest.raises(
        RecipeError, match=r"TextFiles\. Text-to-text tasks need an StMoe that was trained to tell hidden"
    ):
        make_finetuning(replace(before, data=replace(any_text, spans=False)), FineTuning(("t.jsonl",)))


@pytest.mark.parametrize("tasks", ["task.jsonl", ()])
def test_a_fine_tuning_has_names_of_tasks(tasks):
    with pytest.raises(RecipeError, match=r"are not several names. Give FineTuning\(\('FILE',\)\)"):
        FineTuning(tasks)


def test_a_data_set_of_hugging_face_is_a_task(tmp_path, any_text):
    datasets = pytest.importorskip("datasets")
    rows = {"question": [pair["input"] for pair in PAIRS], "answer": [pair["target"] for pair in PAIRS]}
    datasets.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "saved"))
    task = Task(str(tmp_path / "saved"), any_text, input_field="question", target_field="answer")
    lines = Task(str(written(tmp_path / "task.jsonl", PAIRS)), any_text)
    for name, array in lines.train().arrays.items():
        np.testing.assert_array_equal(task.train().arrays[name], array)
    with pytest.raises(DataError, match="input"):
        replace(task, input_field="input").train()


def test_the_recipe_of_a_fine_tuning_is_read_back_from_its_text(tmp_path):
    before = override(load("st-moe-small"), ["model.features=32"])
    recipe = make_finetuning(before, FineTuning((str(tmp_path / "t.jsonl"),), ("dense", "attention"), 5e-4, metrics=()))
    assert recipe.optimizer == Partly(Adafactor(Constant(5e-4)), ("dense", "attention"))
    assert (recipe.model.features, recipe.model.dropout, recipe.model.expert_dropout) == (32, 0.1, 0.2)
    assert recipe.model.routing.evaluation_capacity == 2.0
    assert from_text(to_text(recipe)) == recipe
    old = (Path(__file__).parent / "recorded" / "finetuned.toml").read_text()
    assert differences(old, to_text(recipe)) == [f"data.file: task.jsonl, now {tmp_path}/t.jsonl"]


def test_a_run_whose_name_held_json_is_known_by_its_text():
    facts = {"recipe": 'finetune:{"recipe": "st-moe-small"}', "overrides": []}
    text = Path(__file__).parent / "recorded" / "finetuned.toml"
    recipe = recorded_recipe(SimpleNamespace(recipe=text), facts)
    assert recipe == from_text(text.read_text())


def test_only_sparse_text_models_are_fine_tuned():
    with pytest.raises(
        RecipeError, match=r"fine-tuning digits: it is a SmallResNet on Digits. Text-to-text tasks need"
    ):
        make_finetuning(load("digits"), FineTuning(("t.jsonl",)))


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """A text, T5's vocabulary of it in both forms, 40 pieces and 20 sentinels, and the tokenizer of transformers."""
    pytest.importorskip("torch")
    from torchvision_reference import torchvision  # transformers imports it, and it may not run as it is installed

    assert torchvision
    sentencepiece, transformers = (pytest.importorskip(name) for name in ("sentencepiece", "transformers"))
    folder = tmp_path_factory.mktemp("t5")
    words = [
        "the",
        "of",
        "and",
        "to",
        "that",
        "was",
        "with",
        "they",
        "which",
        "one",
        "you",
        "were",
        "there",
        "who",
        "will",
        "more",
        "when",
        "been",
        "her",
    ]
    rng = np.random.default_rng(0)
    lines = [" ".join(rng.choice(words, 12)) for _ in range(200)]
    (folder / "text.txt").write_text("\n".join(lines))
    special = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(folder / "spiece"), vocab_size=40, minloglevel=2,
        num_threads=1, **special,
    )  # fmt: skip
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spiece.model"))
    pieces = [(processor.id_to_piece(n), processor.get_score(n)) for n in range(40)]
    sentinels = [(f"<extra_id_{n}>", 0.0) for n in reversed(range(20))]
    tokenizer = transformers.T5Tokenizer(vocab=pieces + sentinels, extra_ids=20)
    tokenizer.save_pretrained(folder)
    return folder, tokenizer


def of_t5(folder, name, vocab=60):
    text = str(folder / "text.txt")
    return TextFiles(
        train_files=text, test_files=text, vocabulary=str(folder / name), vocab=vocab, length=12, spans=True
    )


@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json"])
def test_a_vocabulary_of_t5_keeps_its_numbers(t5, name):
    """What its weights were trained with, where spans are hidden; other text has a mask and a start in front."""
    folder, tokenizer = t5
    data = of_t5(folder, name)
    tokens = data.text_tokens()
    assert (tokens.start, tokens.end) == (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokens.sentinel == tokenizer.convert_tokens_to_ids("<extra_id_0>") == 59
    texts = (folder / "text.txt").read_text().splitlines()[:20]
    for text, ours in zip(texts, tokens.encode(texts), strict=True):
        assert [*ours.tolist(), 1] == tokenizer(text).input_ids
        assert tokens.decode(np.array([59, *ours, 1, 5, 0])) == text
    row = {key: array[0] for key, array in data.train().read(np.arange(1)).items()}
    assert (row["target"][0], row["label"][0]) == (0, 59)
    assert 59 in row["source"]
    masked = open_vocabulary(folder / name)
    assert (masked.shift, masked.mask, masked.start, masked.end) == (3, 1, 2, 4)
    assert masked.identity != open_vocabulary(folder / name, spans=True).identity


def test_sentinels_of_a_file_are_those_of_the_data(t5):
    with pytest.raises(DataError, match=r"its sentinels end at 60, and the data say vocab=70, .* Set data.vocab=60"):
        of_t5(t5[0], "tokenizer.json", vocab=70).text_tokens()


@pytest.mark.slow
def test_a_model_of_transformers_is_fine_tuned_on_several_tasks(t5, tmp_path):
    """Imported Switch Transformers with their own vocabulary; text-to-text metrics are told and may be a target."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 60, "d_model": 16, "d_ff": 24, "num_heads": 2, "d_kv": 4, "num_layers": 2}
    sparse = {"num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}
    config = transformers.SwitchTransformersConfig(**sizes, **sparse, num_decoder_layers=2)
    theirs = transformers.SwitchTransformersForConditionalGeneration(config)
    theirs.save_pretrained(tmp_path / "theirs")
    model = t5_like(
        vocab=60, features=16, hidden=24, heads=2, kv=4, layers=2, every=2, gated=False, dense_gated=False,
        activation="relu", tied=True, group_rows=1, routing=Routing(4, chosen=1, dropless=True),
    )  # fmt: skip
    recipe = replace(load("st-moe-small"), model=model, data=of_t5(t5[0], "spiece.model"))
    before = runs.import_run(recipe, tmp_path / "theirs", out=tmp_path / "before")
    tasks = []
    for name, count in (("first", 10), ("second", 5)):
        pairs = [{"input": f"which one was {'there' if n % 2 else 'that'}", "target": "you"} for n in range(count)]
        tasks.append(str(written(tmp_path / f"{name}.jsonl", pairs)))
    asked = FineTuning(tuple(tasks), rate=0.05, batch=8, updates=80, dropout=0.0, expert_dropout=0.0, limit=6)
    request = TrainRequest(out=tmp_path / "after", changes=["target=exact_match/first >= 1"])
    result = runs.finetune(before, asked, request)
    opened = runs.open(result.folder)
    values = runs.evaluate(opened).values
    assert values["exact_match"] == values["exact_match/first"] == values["token_f1/second"] == 1
    assert int(opened.state.update) <= 80
    first, second = tell_answers(opened, 2)
    assert (first.told, first.right, second.right) == ("<59>you[END]", True, True)
