"""The standard library as text: repeatable, split by file, nothing lost, masked as published."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.data.batches import TrainBatches
from multipod.data.global_arrays import owned_rows, to_mesh
from multipod.data.stdlib_text import (
    END,
    MASK,
    PAD,
    SPECIAL,
    START,
    MaskedRows,
    Masking,
    StdlibText,
    encode,
    is_test_file,
    pieces,
    read_files,
    train_tokenizer,
)
from multipod.errors import RecipeError
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_sharding, make_mesh
from multipod.metrics.objective import TokenClassification
from multipod.recipes.find import load
from multipod.step.program import program_of

SMALL = StdlibText(length=32, vocab=300, files="[h-l]*.py", masking=Masking(most=6))


@pytest.fixture(scope="module")
def tokenizers():
    return pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def small(tokenizers, tmp_path_factory):
    spec = replace(SMALL, cache=str(tmp_path_factory.mktemp("tokens")))
    return spec, spec.train(), spec.test()


def test_files_are_the_library_without_its_tests():
    texts = read_files("json/*.py")
    assert texts["json/decoder.py"] == Path(json.decoder.__file__).read_text(encoding="utf-8")
    assert list(texts) == sorted(texts)
    assert not [name for name in read_files("**/*.py") if "/test/" in f"/{name}" or "site-packages" in name]


def test_a_file_stays_on_its_side():
    # Checksums known from elsewhere: CRC-32 of "123456789" is 0xCBF43926, 0.797 of 2^32 (RFC 3720's check value).
    assert is_test_file("123456789", 0.8)
    assert not is_test_file("123456789", 0.79)
    names = read_files("**/*.py")
    share = sum(is_test_file(name, 0.2) for name in names) / len(names)
    assert 0.1 < share < 0.3


@pytest.mark.parametrize("pattern", ["[a-f]*.py", "email/*.py"])
def test_pieces_joined_are_the_file(pattern):
    for text in read_files(pattern).values():
        assert "".join(pieces(text)) == text


def test_a_definition_keeps_its_decorators():
    text = "import a\n\n@one\n@two(\n    3)\ndef f():\n    pass\n\n\nclass C:\n    def g(self): ...\n"
    assert pieces(text) == [
        "import a\n\n",
        "@one\n@two(\n    3)\ndef f():\n    pass\n\n\n",
        "class C:\n    def g(self): ...\n",
    ]


def test_tokens_give_back_the_text_and_are_the_same_each_time(tokenizers):
    texts = list(read_files("json/*.py").values())
    one, other = (train_tokenizer(texts, 400) for _ in range(2))
    assert one.to_str() == other.to_str()
    hard = [*texts, "[MASK] is text here, and so are [PAD] äöü 語 \t\r\n\x00", ""]
    for text, tokens in zip(hard, encode(one, hard), strict=True):
        assert one.decode(tokens.tolist(), skip_special_tokens=False) == text
        assert tokens.dtype == np.int32
        assert not set(tokens) & {PAD, MASK, START, END}
    assert [one.token_to_id(name) for name in SPECIAL] == [PAD, MASK, START, END]
    assert one.get_vocab_size() == 400


def test_the_cache_holds_the_same_tokens(small, tokenizers):
    spec, train, test = small
    (kept,) = Path(spec.cache).iterdir()
    before = kept.stat().st_mtime_ns
    for again in (replace(spec, split_seed=1), replace(spec, cache="")):
        for one, other in ((again.train(), train), (again.test(), test)):
            for name, array in one.rows.items():
                np.testing.assert_array_equal(array, other.rows[name])
    assert [path.stat().st_mtime_ns for path in Path(spec.cache).iterdir()] == [before]


def test_rows_hold_all_tokens_of_all_files(small):
    spec, train, test = small
    texts = read_files(spec.files)
    parts = [[t for name, t in texts.items() if is_test_file(name, spec.test_share) == side] for side in (False, True)]
    tokenizer = train_tokenizer(parts[0], spec.vocab)
    for part, source in zip(parts, (train, test), strict=True):
        expected = np.sort(np.concatenate(encode(tokenizer, [piece for text in part for piece in pieces(text)])))
        found = source.rows["token"][source.rows["segment"] != 0]
        np.testing.assert_array_equal(np.sort(found), expected)
    assert (train.rows["segment"] != 0).mean() > 0.95


def masked_rows(seed=0, rows=40, length=30, vocab=300, masking=SMALL.masking):
    rng = np.random.default_rng(seed)
    size = rng.integers(0, length + 1, rows)
    segment = (np.arange(length) < size[:, None]).astype(np.int32)
    token = (rng.integers(len(SPECIAL), vocab, (rows, length)) * segment).astype(np.int32)
    return MaskedRows({"token": token, "segment": segment}, masking, vocab, seed)


@given(seed=st.integers(0, 10**6), share=st.sampled_from([0.0, 0.15, 0.5, 1.0]), most=st.integers(1, 40))
@settings(max_examples=40, deadline=None)
def test_masked_tokens_can_be_put_back(seed, share, most):
    source = masked_rows(seed, masking=Masking(share, most))
    numbers = np.arange(len(source))
    batch = source.read(numbers)
    again = source.augment(batch, numbers, np.random.default_rng(seed))
    for one in (batch, again):
        put_back = one["token"].copy()
        row, place = np.nonzero(one["weight"])
        assert one["segment"][row, one["masked"][row, place]].all()
        assert len({*zip(row, one["masked"][row, place], strict=True)}) == len(row)
        put_back[row, one["masked"][row, place]] = one["label"][row, place]
        np.testing.assert_array_equal(put_back, source.rows["token"])
        sizes = source.rows["segment"].sum(1)
        told = np.clip(np.round(share * sizes), sizes > 0, min(most, 30))
        np.testing.assert_array_equal(one["weight"].sum(1), np.minimum(told, sizes))
        assert not one["label"][one["weight"] == 0].any()
        assert one["masked"].shape == (40, min(most, 30))


def test_masks_are_80_10_10_and_all_places_are_as_likely():
    length, vocab = 100, 1000
    token = np.full((3000, length), 500, np.int32)
    source = MaskedRows({"token": token, "segment": np.ones_like(token)}, Masking(0.15, 20), vocab, 0)
    batch = source.augment(source.read(np.arange(3000)), np.arange(3000), np.random.default_rng(1))
    assert (batch["weight"].sum(1) == 15).all()
    places = batch["masked"][:, :15].ravel()
    seen = np.take_along_axis(batch["token"], batch["masked"][:, :15], 1).ravel()
    shares = [(seen == MASK).mean(), (seen == 500).mean(), ((seen != MASK) & (seen != 500)).mean()]
    np.testing.assert_allclose(shares, [0.8, 0.1, 0.1], atol=0.01)
    others = seen[(seen != MASK) & (seen != 500)]
    assert others.min() >= len(SPECIAL)
    assert others.max() > 990
    assert np.abs(np.bincount(places, minlength=length) / 3000 - 0.15).max() < 0.04


@given(parts=st.integers(1, 4), position=st.integers(0, 9))
@settings(max_examples=15, deadline=None)
def test_who_reads_which_rows_changes_no_mask(parts, position):
    source = masked_rows()
    whole = TrainBatches(source, 12, 3, np.arange(12))[position]
    shares = [TrainBatches(source, 12, 3, rows)[position] for rows in np.array_split(np.arange(12), parts)]
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([share[name] for share in shares]), array)


def test_test_rows_are_masked_the_same_way_each_time(small):
    _, _, test = small
    numbers = np.arange(len(test))
    whole = test.read(numbers)
    for name, array in test.read(numbers[3:7]).items():
        np.testing.assert_array_equal(array, whole[name][3:7])


def test_what_cannot_be_read_says_so(tokenizers):
    with pytest.raises(RecipeError, match=r"no file of .* matches 'nothing\*'. Take \*\.py"):
        read_files("nothing*")
    with pytest.raises(RecipeError, match=r"vocab=100 has no room for all bytes\. Take 260 or more"):
        StdlibText(vocab=100)
    with pytest.raises(RecipeError, match=r"none of the \d+ files of 'json/\*\.py' is test text at test_share=0\.0"):
        StdlibText(files="json/*.py", test_share=0.0).train()


def test_the_recipe_trains_on_a_mesh(tokenizers, small):
    """The recipe on less text and a smaller model, twelve updates on 2 x 2 devices."""
    recipe = load("stdlib-lm")
    assert recipe.model.vocab == recipe.data.vocab
    assert recipe.model.positions == recipe.data.length
    assert recipe.objective.tokens_per_example == recipe.data.masking.most
    spec, _, _ = small
    recipe = replace(
        recipe,
        data=spec,
        model=replace(recipe.model, vocab=spec.vocab, positions=spec.length, features=32, hidden=64, layers=1),
        objective=TokenClassification(tokens_per_example=6),
        batch=16,
        updates=12,
        layout=Layout((2, 2)),
    )
    losses = several_updates(recipe)
    assert losses[0] == pytest.approx(np.log(300), abs=0.05)  # at first all tokens are as likely
    assert losses[-1] < losses[0] - 0.15


def several_updates(recipe):
    program = program_of(recipe, make_mesh(recipe.layout))
    sharding = batch_sharding(program.mesh)
    rows = owned_rows(sharding, recipe.batch)
    batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, rows)
    update, state, go = program.compile_update(), program.init(), program.controls()
    nats = []
    for position in range(recipe.updates):
        state, sums = update(state, to_mesh(batches[position], rows, recipe.batch, sharding), go)
        nats.append(float(sums["nats"]) / int(sums["tokens"]))
    return nats
