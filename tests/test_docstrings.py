"""Code and the first line of its docstring, as rows for an encoder-decoder."""

import ast

import numpy as np
import pytest

from multipod.data.docstrings import Docstrings, pairs
from multipod.data.stdlib_text import END, START, library
from multipod.errors import RecipeError
from multipod.recipes.find import RECIPES, load

pytest.importorskip("tokenizers")
SMALL = Docstrings(source_length=64, target_length=24, vocab=300, files="s*.py", test_share=0.3)


def test_a_pair_is_a_function_without_its_docstring_and_the_first_line_of_it():
    documented = 'class A:\n    def f(x):\n        """Says x.\n\n        Twice.\n        """\n        return x\n'
    text = documented + "\ndef g(): pass\n"
    assert list(pairs(text)) == [("def f(x):\n    return x", "Says x.")]
    assert list(pairs("def f(:")) == []


def test_every_documented_function_of_a_real_file_is_found_and_nothing_of_its_docstring_stays():
    text = (library() / "textwrap.py").read_text()
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and ast.get_docstring(n)]
    found = list(pairs(text))
    assert len(found) == len(nodes) > 5
    for code, summary in found:
        assert summary not in code


def test_rows_hold_the_pairs_and_the_decoder_reads_one_place_behind():
    tokenizer, rows = SMALL.tokenizer(), SMALL.test().read(np.arange(len(SMALL.test())))
    first = (rows["target_segment"][0] == 1).sum()
    label, target = rows["label"][0, :first], rows["target"][0, :first]
    assert target[0] == START
    np.testing.assert_array_equal(target[1:], label[:-1])
    assert label[-1] == END
    told = {tokenizer.decode(label[:-1].tolist())}
    assert any(pair.summary.startswith(text) for pair in SMALL.test_pairs() for text in told)
    assert (rows["weight"] == (rows["target_segment"] != 0)).all()
    ends = sum((row == END).sum() for row in rows["label"])
    assert ends == len(SMALL.test_pairs())


def test_the_recipe_is_in_the_table_and_what_cannot_be_is_refused():
    assert load("stdlib-docs").model.vocab == load("stdlib-docs").data.vocab
    assert "stdlib-docs" in RECIPES
    with pytest.raises(RecipeError, match="no room for all bytes"):
        Docstrings(vocab=10)
    with pytest.raises(RecipeError, match="A source needs 1 or more"):
        Docstrings(target_length=1)
