"""The published recipes read the files that their users have: text, packed rows, pairs, vocabularies of every kind."""

import gzip
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from published_data import documents, packed_rows, pairs, write_packed, write_pairs

from multipod.data.batches import TrainBatches
from multipod.data.files.kept import made_once
from multipod.data.source import training_batch
from multipod.data.text.kept_tokens import keep_tokens
from multipod.data.text.pretraining import PACKED
from multipod.data.text.sentences import sentences
from multipod.data.text.vocabulary import open_vocabulary
from multipod.errors import DataError
from multipod.recipe.override import override
from multipod.recipes.find import load

pytest.importorskip("tokenizers")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("text")
    (where / "wiki.txt").write_text("\n\n".join("\n".join(one) for one in documents()))
    (where / "lines.txt").write_text("\n".join(" ".join(one) for one in documents()))
    write_pairs(where, "train", pairs())
    write_pairs(where, "test", pairs(9, 2))
    return where


def bert(where, *changes):
    files = [f"data.train_files={where}", f"data.test_files={where}"]
    return override(load("bert-large"), [*files, "data.vocab=320", "data.length=32", "data.masking.most=5", *changes])


def unmasked(batch):
    """Tokens before they were hidden."""
    token = batch["token"].copy()
    row, place = np.nonzero(batch["weight"])
    token[row, batch["masked"][row, place]] = batch["label"][row, place]
    return token


@pytest.mark.parametrize("kind", ["blank", "record"])
def test_text_becomes_two_sentences_and_what_follows_follows(folder, kind):
    recipe = bert(folder / ("wiki.txt" if kind == "blank" else "lines.txt"), f"data.documents={kind}")
    source, example = recipe.data.train(), recipe.data.example()
    vocabulary = source.vocabulary
    batch = training_batch(source, np.arange(len(source)), np.arange(len(source)), np.random.default_rng(0))
    assert {name: array.shape[1:] for name, array in batch.items()} == {n: a.shape[1:] for n, a in example.items()}
    token = unmasked(batch)
    texts = [" ".join(one) for one in documents()]
    for row, (kinds, mask) in enumerate(zip(batch["type"], batch["segment"], strict=True)):
        first = vocabulary.decode(token[row][(kinds == 0) & (mask == 1)][1:])
        second = vocabulary.decode(token[row][kinds == 1])
        own = [k for k, text in enumerate(texts) if compact(first) in compact(text)]
        assert own
        if batch["next"][row] == 0:
            assert any(compact(first + second) in compact(texts[k]) for k in own)
    assert 0.2 < batch["next"].mean() < 0.9
    assert (token[:, 0] == vocabulary.start).all()
    marks = np.isin(batch["label"], [vocabulary.start, vocabulary.end]) & (batch["weight"] != 0)
    assert not marks.any()


def compact(text):
    return text.replace(" ", "")


def test_rows_are_the_same_for_all_readers_and_sent_to_another_process(folder):
    source = bert(folder / "wiki.txt").data.train()
    whole = TrainBatches(source, 12, 0, np.arange(12))[1]
    copied = pickle.loads(pickle.dumps(source.tokens))
    np.testing.assert_array_equal(copied[5], source.tokens[5])
    for rows in np.array_split(np.arange(12), 3):
        part = TrainBatches(source, 12, 0, rows)[1]
        for name in whole:
            np.testing.assert_array_equal(part[name], whole[name][rows])
    again = source.read(np.arange(6))
    for name, array in source.read(np.arange(6)).items():
        np.testing.assert_array_equal(array, again[name])


def test_one_document_and_no_files_are_refused(folder, tmp_path):
    (tmp_path / "one.txt").write_text("One sentence.\nAnother.\n")
    with pytest.raises(DataError, match=r"put an empty line behind each, or set data.documents=record"):
        bert(tmp_path / "one.txt").data.train()
    with pytest.raises(DataError, match=r"Give --set data.train_files=FILES: text, one sentence a line"):
        load("bert-large").data.train()
    with pytest.raises(DataError, match=r"Give --set data.train_files=wmt/train.\{en,de\}"):
        load("transformer-big").data.train()


def test_packed_rows_are_taken_as_they_are(tmp_path):
    pytest.importorskip("google_crc32c")
    path = write_packed(tmp_path / "part-00000-of-00001", 12, 32, 5)
    source = bert(path).data.train()
    batch, records = source.read(np.arange(12)), packed_rows(12, 32, 5)
    for name, field in PACKED.items():
        np.testing.assert_array_equal(batch[name], [record[field] for record in records])
        assert batch[name].dtype == np.int32
    with pytest.raises(DataError, match=r"input_ids has 32 numbers, .* Set data.length"):
        bert(path, "data.length=64").data.test().read(np.arange(2))


def wmt(folder, *changes, train="train.{en,de}", test="test.{en,de}"):
    files = [f"data.train_files={folder}/{train}", f"data.test_files={folder}/{test}"]
    return override(load("transformer-big"), [*files, "data.vocab=320", "data.length=64", *changes])


def test_every_pair_is_in_one_row_and_begins_and_ends(folder):
    data = wmt(folder).data
    source, (start, end) = data.train(), data.marks()
    rows = source.read(np.arange(len(source)))
    assert {name: array.shape[1:] for name, array in rows.items()} == {
        n: a.shape[1:] for n, a in data.example().items()
    }
    found = []
    for row in range(len(source)):
        for segment in range(1, rows["source_segment"][row].max() + 1):
            given = rows["source"][row][rows["source_segment"][row] == segment]
            told = rows["label"][row][rows["target_segment"][row] == segment]
            read = rows["target"][row][rows["target_segment"][row] == segment]
            assert (read[0], told[-1]) == (start, end)
            np.testing.assert_array_equal(read[1:], told[:-1])
            found.append((data.decode(given), data.decode(told)))
    assert sorted(found) == sorted(pairs())
    assert source.identity().startswith(f"60 pairs in {len(source)} rows, 0 left out")
    assert "left out" in wmt(folder, "data.length=16").data.train().identity()
    test = data.test().read(np.arange(9))
    assert [data.reference(k) for k in test["number"]] == [told for _, told in pairs(9, 2)]
    assert [data.decode(label) for label in test["label"]] == [told for _, told in pairs(9, 2)]


def test_pairs_of_like_lengths_are_one_a_row(folder):
    """Every pair that fits is read once, in a batch of the least size that holds it; a host reads its own rows."""
    sizes = "data.length=16", "data.buckets=8,12,16"
    data = wmt(folder, *sizes).data
    source = data.train()
    found, widths = [], set()
    order = source.epoch_order(0, 0, 4)
    for numbers in np.array_split(order, range(4, len(order), 4)):
        sized = source.sized_for(numbers)  # by the whole batch, whichever rows a host reads
        rows = sized.read(numbers)
        assert {name: array.ndim for name, array in rows.items()} == dict.fromkeys(data.example(), 2)
        width = rows["source"].shape[1]
        widths.add(width)
        assert max((rows["source"] != 0).sum(1).max(), rows["weight"].sum(1).max()) <= width
        found += [tuple(map(data.decode, row)) for row in zip(rows["source"], rows["label"], strict=True)]
    assert len(widths) > 1
    assert sorted(found) == sorted(pairs())
    fewer = wmt(folder, "data.length=12", "data.buckets=8,12").data.train()
    assert len(fewer) == len(wmt(folder, "data.length=12").data.train().plan.pairs) < len(pairs())
    with pytest.raises(DataError, match=r"buckets=\(8, 12\) do not grow to length=16"):
        wmt(folder, "data.length=16", "data.buckets=8,12")
    with pytest.raises(DataError, match="none of 60 pairs has text on both sides of at most 2 tokens"):
        wmt(folder, "data.length=2", "data.buckets=2,").data.train()


def test_parquet_and_packed_lines_give_the_same_pairs(folder, tmp_path):
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    column = [{"en": one, "de": other} for one, other in pairs()]
    parquet.write_table(arrow.table({"translation": column}), tmp_path / "train.parquet")
    for language in ("en", "de"):
        packed = gzip.compress((folder / f"train.{language}").read_bytes())
        (tmp_path / f"train.{language}.gz").write_bytes(packed)
    plain = wmt(folder).data.train()
    rows = plain.read(np.arange(3))
    for train in ("train.parquet", "train.{en,de}.gz"):
        same = wmt(tmp_path, train=train).data.train()
        for name, array in same.read(np.arange(3)).items():
            np.testing.assert_array_equal(array, rows[name])
    other = wmt(tmp_path, "data.languages=en,fr", train="train.parquet")
    with pytest.raises(DataError, match=r"has no text fr; it has en, de. Set data.languages"):
        other.data.train()
    (tmp_path / "short.en").write_text("one\ntwo\n")
    (tmp_path / "short.de").write_text("eins\n")
    with pytest.raises(DataError, match=r"short.en has 2 and .*short.de has 1 texts"):
        wmt(tmp_path, train="short.{en,de}").data.train()


def word_pieces(folder):
    letters = sorted({letter for one in documents() for text in one for letter in text.lower() if letter.isalnum()})
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join([*pieces, "the", "house", "##er"]) + "\n")
    return folder / "vocab.txt"


def merges(folder):
    (folder / "wmt.codes").write_text("#version: 0.2\nt h\nth e</w>\no u\nh ou\ns e</w>\n" + letters_of_merges())
    return folder / "wmt.codes"


def letters_of_merges():
    letters = sorted({letter for one in documents() for text in one for letter in text if letter != " "})
    return "".join(f"q {letter}\n{letter} q</w>\nq {letter}</w>\n" for letter in letters)


def sentence_piece(folder):
    trainer = pytest.importorskip("sentencepiece").SentencePieceTrainer
    text = iter(text for one in documents() for text in one)
    prefix = str(folder / "spm")
    trainer.train(sentence_iterator=text, model_prefix=prefix, vocab_size=64, minloglevel=2, num_threads=1)
    return folder / "spm.model"


def of_hub(folder):
    import tokenizers

    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator([text for one in documents() for text in one], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("make", [word_pieces, merges, sentence_piece, of_hub])
def test_vocabularies_of_every_kind_spell_a_text_and_leave_0_to_padding(make, tmp_path):
    vocabulary = open_vocabulary(make(tmp_path))
    texts = [text for one in documents(3) for text in one]
    lower = make is word_pieces
    for text, tokens in zip(texts, vocabulary.encode(texts), strict=True):
        assert compact(vocabulary.decode(tokens)) == compact(text.lower() if lower else text)
        marked = np.array([vocabulary.start, *tokens, vocabulary.end, 0, 0])
        assert vocabulary.decode(marked) == vocabulary.decode(tokens)
        assert tokens.min() > 0
        assert tokens.max() < vocabulary.size
    special = {0, vocabulary.mask, vocabulary.start, vocabulary.end}
    assert len(special) == 4
    assert not special & set(np.concatenate(vocabulary.encode(texts)).tolist())
    assert (vocabulary.mask, vocabulary.start, vocabulary.end) == (4, 2, 3) or not lower


def test_a_vocabulary_that_cannot_be_used_is_refused(folder, tmp_path):
    for name, content, message in (
        ("a.vocab", "", "files of this name are not known"),
        ("a.json", "{}", "cannot be read"),
        ("a.codes", "t h\n", "does not begin with '#version: 0.2'"),
    ):
        (tmp_path / name).write_text(content)
        with pytest.raises(DataError, match=message):
            open_vocabulary(tmp_path / name)
    with pytest.raises(DataError, match=r"has 122 entries .* say vocab=100. Set data.vocab=122"):
        bert(folder / "wiki.txt", "data.vocab=100", f"data.vocabulary={of_hub(tmp_path)}").data.train()


def test_sentences_end_where_they_do():
    assert sentences('It is 3.5 m. "Really?" Dr. who? No.\nYes') == [
        "It is 3.5 m.",
        '"Really?',
        "Dr. who?",
        "No.",
        "Yes",
    ]


def test_what_is_made_once_is_made_by_one(tmp_path):
    made = []

    def make(part: Path) -> None:
        made.append(part)
        part.write_text("whole")

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(lambda _: made_once(tmp_path / "a" / "kept", make).read_text(), range(8)))
    assert (results, len(made)) == (["whole"] * 8, 1)

    def fail(part: Path) -> None:
        part.write_text("a part")
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match=r"No space left on device. Make room there, or set XDG_CACHE_HOME"):
        made_once(tmp_path / "a" / "other", fail)
    assert [path.name for path in (tmp_path / "a").iterdir() if not path.name.startswith(".")] == ["kept"]


def test_tokens_of_large_vocabularies_are_kept_whole(tmp_path):
    sequences = [np.array([1, 70_000]), np.zeros(0, np.int64), np.array([5])]
    for vocab, name in ((80_000, "large"), (2**16, "small")):
        tokens = keep_tokens(name, [one % vocab for one in sequences], vocab)
        assert [tokens[k].tolist() for k in range(3)] == [[1, 70_000 % vocab], [], [5]]
    assert len(keep_tokens("none", [], 9)) == 0


MEMORY = """
import sys
from pathlib import Path
import numpy as np
from multipod.data.text.files import TextFiles
def peak():  # of this program, unlike ru_maxrss, which a child has of its parent
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1024
how = {"vocabulary": sys.argv[2], "vocab": 3000, "length": 128}
TextFiles(sys.argv[3], sys.argv[3], **how).train().read(np.arange(2))
before = peak()
source = TextFiles(sys.argv[1], sys.argv[1], **how).train()
source.read(np.arange(8))
print(len(source), peak() - before)
"""


def test_a_text_is_never_held_whole(tmp_path):
    import tokenizers

    words = [f"word{k}" for k in range(2000)]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: k for k, w in enumerate(["?", *words])}, "?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "words.json"))
    block = "\n".join(" ".join(words[k : k + 400]) for k in range(0, 1600, 4)) + "\n"
    (tmp_path / "small.txt").write_text(block)
    (tmp_path / "large.txt").write_text(block * 10)
    size = (tmp_path / "large.txt").stat().st_size / 2**20
    arguments = [tmp_path / "large.txt", tmp_path / "words.json", tmp_path / "small.txt"]
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, *map(str, arguments)],
        env=os.environ | {"TOKENIZERS_PARALLELISM": "false"},
        capture_output=True,
        text=True,
        check=True,
    )
    rows, grown = map(float, done.stdout.split())
    assert rows * 128 > 1.5e6
    assert size > 12
    assert grown < size / 1.5
