"""Sequences: one length a batch on all hosts, and spans that lose no token."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.data.batches import TrainBatches
from multipod.data.order import ByLength
from multipod.data.sequences import Sequences, SpanCorruptor, SpanRows, TokenFile, token_file
from multipod.data.stdlib_text import Masking
from multipod.data.text.files import TextFiles
from multipod.errors import DataError


def corpus(count=60, longest=30, seed=0):
    rng = np.random.default_rng(seed)
    return token_file([np.arange(n) + 100 * k for k, n in enumerate(rng.integers(1, longest + 1, count))])


def test_all_hosts_choose_one_length_for_a_batch():
    source = Sequences(corpus(), ByLength((8, 16, 30)))
    lengths = set()
    for k in range(12):
        whole = TrainBatches(source, 6, 0, np.arange(6))[k]
        for rows in np.array_split(np.arange(6), 3):
            part = TrainBatches(source, 6, 0, rows)[k]
            np.testing.assert_array_equal(part["token"], whole["token"][rows])
        longest = whole["weight"].sum(1).max()
        assert whole["token"].shape[1] == next(bound for bound in (8, 16, 30) if bound >= longest)
        lengths.add(whole["token"].shape[1])
    assert lengths == {8, 16, 30}


def test_sequences_are_padded_and_come_back():
    file = corpus()
    source = Sequences(file, pad=9)
    batch = source.read(np.array([3, 0]))
    for row, number in enumerate((3, 0)):
        np.testing.assert_array_equal(batch["token"][row][batch["weight"][row] == 1], file[number])
        assert (batch["token"][row][batch["weight"][row] == 0] == 9).all()
    assert source.identity() == Sequences(corpus()).identity() != Sequences(corpus(seed=1)).identity()
    with pytest.raises(DataError, match=r"has \d+ tokens, and the longest batch 8"):
        Sequences(file, ByLength((4, 8)))
    with pytest.raises(DataError, match=r"has \d+ tokens, the batch 2"):
        Sequences(file, length=2).read(np.arange(9))
    with pytest.raises(DataError, match="do not cut 5 tokens"):
        TokenFile(np.arange(5), np.array([2, 4]))


@given(length=st.integers(2, 200), seed=st.integers(0, 20), density=st.floats(0.05, 0.9), mean=st.floats(1, 8))
@settings(max_examples=100, deadline=None)
def test_spans_hide_and_tell_every_token_once(length, seed, density, mean):
    corruption = SpanCorruptor(9999, density, mean)
    tokens = np.arange(length)
    given_, told = corruption.apply(tokens, np.random.default_rng(seed))
    assert (len(given_), len(told)) == corruption.sizes(length)
    spans = np.split(told, np.flatnonzero(told > 5000))[1:]  # each begins with its sentinel
    assert [int(span[0]) for span in spans] == [9999 - k for k in range(len(spans))]
    filled = [spans[9999 - int(token)][1:] if token > 5000 else [token] for token in given_]
    np.testing.assert_array_equal(np.concatenate(filled), tokens)
    assert len(spans[-1]) == 1


def test_bert_predicts_76_of_512():
    rows = {"token": np.full((2, 512), 7, np.int32), "segment": np.ones((2, 512), np.int32)}
    masked = Masking(most=76).apply(rows, np.random.default_rng(0).random((2, 512, 3)), 1000)
    assert masked["weight"].shape == (2, 76)
    assert (masked["weight"] == 1).all()


def test_spans_are_as_long_and_as_many_as_published():
    """T5 of 512 tokens: 15 % in spans of 3 are 77 tokens in 26 spans."""
    corruption = SpanCorruptor(32099)
    assert corruption.sizes(512) == (512 - 77 + 26, 77 + 26 + 1)
    places = np.zeros(40)
    for seed in range(400):
        given_, _ = SpanCorruptor(9999, 0.3).apply(np.arange(40), np.random.default_rng(seed))
        places[given_[given_ < 5000]] += 1
    assert places[0] > places[6:-6].max()  # it begins with tokens that stay, and ends with a span
    assert places[-1] == 0
    assert np.abs(places[6:-6] / 400 - 0.7).max() < 0.1
    with pytest.raises(DataError, match="a sequence of 1 tokens has none to hide"):
        corruption.sizes(1)
    with pytest.raises(DataError, match="spans have a token or more"):
        SpanCorruptor(5, 1.5)


def test_rows_of_spans_are_hidden_anew_in_training_and_belong_to_their_rows():
    source = SpanRows(corpus(longest=40), SpanCorruptor(9999), 30)
    first = source.read(np.arange(20))
    for name, array in source.read(np.arange(20)).items():
        np.testing.assert_array_equal(array, first[name])
    assert (first["source"].shape[1], first["label"].shape[1]) == SpanCorruptor(9999).sizes(30)
    np.testing.assert_array_equal(first["target"][first["weight"].any(1), 0], 2)
    follows = first["weight"][:, 1:] == 1
    np.testing.assert_array_equal(first["target"][:, 1:][follows], first["label"][:, :-1][follows])
    whole = TrainBatches(source, 12, 0, np.arange(12))[2]
    for rows in np.array_split(np.arange(12), 5):
        part = TrainBatches(source, 12, 0, rows)[2]
        for name in whole:
            np.testing.assert_array_equal(part[name], whole[name][rows])
    for row in range(20):  # what is given and what is told are the sequence
        own = source.file[row][:30]
        if len(own) < 2:
            assert not first["weight"][row].any()
            continue
        told = first["label"][row][first["weight"][row] == 1]
        seen = np.concatenate([first["source"][row], told])
        assert set(own) <= set(seen)


def test_text_files_for_both_tasks(tmp_path):
    pytest.importorskip("tokenizers")
    lines = [f"the number {k} is {'even' if k % 2 == 0 else 'odd'} and follows {k - 1}" for k in range(300)]
    (tmp_path / "train.txt").write_text("\n".join(lines[:250]))
    (tmp_path / "test.txt").write_bytes("\n".join(lines[250:]).encode() + b"\n\xff\xfe not text\n\n")
    masked = TextFiles(str(tmp_path / "train.txt"), str(tmp_path / "test.txt"), length=32, vocab=300)
    rows = masked.train().read(np.arange(4))
    assert rows["token"].shape == (4, 32)
    assert rows["weight"].any(1).all()
    rows = masked.train().read(np.arange(len(masked.train())))
    told = [rows["weight"] != 0, rows["masked"], rows["label"]]
    for row, counts, places, labels in zip(rows["token"], *told, strict=True):
        row[places[counts]] = labels[counts]
    whole = rows["token"][rows["segment"] != 0]
    begins = np.flatnonzero((rows["position"] == 0)[rows["segment"] != 0])
    pieces = [masked.decode(piece) for piece in np.split(whole, begins[1:])]
    assert "".join(pieces) == "".join(lines[:250])  # a row may begin inside a line
    spans = TextFiles(str(tmp_path / "train.txt"), str(tmp_path / "test.txt"), length=24, vocab=320, spans=True)
    batch = spans.train().read(np.arange(8))
    assert "<319>" in spans.decode(batch["source"][0])
    assert spans.decode(np.array([0, 1, 3, 0])) == "[MASK][END]"
    assert batch["source"].max() == 319
    assert len(spans.test()) == 50
    with pytest.raises(DataError, match="vocab=200 has no room"):
        TextFiles(vocab=200)
    with pytest.raises(DataError, match=r"Give --set data.train_files=FILES, one document a line"):
        TextFiles().train()
