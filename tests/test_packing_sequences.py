"""Packing: nothing is lost, nothing overlaps, rows are few."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.data.packing import first_fit_decreasing, pack_rows, shift_right
from multipod.errors import RecipeError

SIZES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=30)


def tokens(sizes, seed=0):
    """Sequences of these lengths, each of its own tokens, which are never 0."""
    starts = np.cumsum([0, *sizes]) + 1 + 1000 * seed
    return [np.arange(start, start + size) for start, size in zip(starts[:-1], sizes, strict=True)]


def unpacked(rows, name):
    """Every segment of every row: its tokens, by row and number."""
    segment, position = rows[f"{name}_segment"], rows[f"{name}_position"]
    found = {}
    for row in range(len(segment)):
        for number in set(segment[row]) - {0}:
            places = np.flatnonzero(segment[row] == number)
            np.testing.assert_array_equal(places, np.arange(places[0], places[-1] + 1))
            np.testing.assert_array_equal(position[row, places], np.arange(len(places)))
            found[row, number] = tuple(rows[name][row, places])
        assert not rows[name][row, segment[row] == 0].any()
        assert not position[row, segment[row] == 0].any()
    return found


@given(sizes=SIZES)
@settings(max_examples=60, deadline=None)
def test_pairs_come_back_whole_and_together(sizes):
    source, target = tokens([a for a, _ in sizes]), tokens([b for _, b in sizes], seed=1)
    rows = pack_rows({"source": source, "target": target}, {"source": 12, "target": 10})
    assert {name: (array.shape[1], array.dtype) for name, array in rows.items()} == {
        f"{name}{part}": (length, np.dtype("int32"))
        for name, length in (("source", 12), ("target", 10))
        for part in ("", "_segment", "_position")
    }
    a, b = unpacked(rows, "source"), unpacked(rows, "target")
    found = sorted((a.get(key, ()), b.get(key, ())) for key in a.keys() | b.keys())
    given_pairs = [(tuple(s), tuple(t)) for s, t in zip(source, target, strict=True) if len(s) or len(t)]
    assert found == sorted(given_pairs)


@given(sizes=st.lists(st.integers(1, 20), max_size=60))
@settings(max_examples=60, deadline=None)
def test_rows_are_those_of_first_fit_decreasing_one_by_one(sizes):
    free, expected = [], []
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        row = next((row for row, room in enumerate(free) if room >= sizes[number]), len(free))
        if row == len(free):
            free.append(20)
            expected.append([])
        free[row] -= sizes[number]
        expected[row].append(number)
    assert first_fit_decreasing(np.array(sizes).reshape(-1, 1), [20]) == expected
    # The rows of any packing hold all tokens, so 11/9 of that bound plus 6/9 and one row is a law.
    assert sum(room >= 10 for room in free) <= 1


def test_a_perfect_packing_is_found():
    sizes = np.array([6, 5, 4, 4, 3, 2] * 50).reshape(-1, 1)
    assert len(first_fit_decreasing(sizes, [12])) == 100


def test_the_decoder_reads_one_place_behind():
    rows = pack_rows({"target": [np.array([7, 8, 9]), np.array([5, 6])]}, {"target": 7})
    read = shift_right(rows["target"], rows["target_segment"], rows["target_position"], 1)
    assert rows["target"].tolist() == [[7, 8, 9, 5, 6, 0, 0]]
    assert read.tolist() == [[1, 7, 8, 1, 5, 0, 0]]
    assert read.dtype == rows["target"].dtype


def test_the_name_token_has_no_prefix():
    rows = pack_rows({"token": [np.array([3, 4])]}, {"token": 3})
    assert {name: array.tolist() for name, array in rows.items()} == {
        "token": [[3, 4, 0]],
        "segment": [[1, 1, 0]],
        "position": [[0, 1, 0]],
    }


def test_what_does_not_fit_is_named():
    with pytest.raises(RecipeError) as error:
        pack_rows({"source": tokens([3, 9, 9]), "target": tokens([3, 11, 2])}, {"source": 8, "target": 8})
    assert str(error.value) == (
        "packing: 2 of 3 sequences do not fit a row of 8 + 8 tokens; sequence 1 has 9 + 11. "
        "Cut or drop them, or take longer rows."
    )


@pytest.mark.parametrize(
    ("sequences", "found"), [({"a": [], "b": tokens([1])}, "0 of a, 1 of b"), ({}, "no sequences")]
)
def test_pairs_must_be_pairs(sequences, found):
    with pytest.raises(RecipeError, match=f"packing: {found}. Give as many sequences of each name"):
        pack_rows(sequences, {"a": 4, "b": 4})
