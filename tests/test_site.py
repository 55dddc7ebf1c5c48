"""The documentation site: no page is left out, and docstrings come through as they are meant."""

import re
import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture(scope="module")
def conf():
    return runpy.run_path(str(DOCS / "conf.py"))


def marked(conf, text, what="function"):
    lines = text.splitlines()
    conf["mark_literal_blocks"](None, what, "", None, None, lines)
    return "\n".join(lines)


def test_every_page_is_in_the_contents():
    contents = re.findall(r"^   ([\w-]+)$", (DOCS / "index.rst").read_text(), re.MULTILINE)
    assert sorted(contents) == sorted(page.stem for page in DOCS.glob("*.md"))
    for folder in DOCS.iterdir():
        assert not [*folder.glob("*.md")] or (folder / "index.rst").is_file(), folder


def test_every_picture_of_the_results_is_in_the_gallery():
    shown = re.findall(r"^!\[.+\]\(results/(.+)\)$", (DOCS / "gallery.md").read_text(), re.MULTILINE)
    assert sorted(shown) == sorted(picture.name for picture in (DOCS / "results").glob("*.svg"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("|w| of `a|b` and *x*", r"\|w\| of `a|b` and \*x\*"),
        ("some `rank`s", "some `rank`\\ s"),
        ("Run:\n\n    a | b\n\nThen `c`.", "Run:\n\n::\n\n    a | b\n\nThen `c`."),
        ("Run\n\n    a_b\n", "Run\n\n\n::\n\n    a_b"),
        (
            "All.\n\n| a | b |\n| --- | --- |\n| 1 | 2 |",
            "All.\n\n\n::\n\n    | a | b |\n    | --- | --- |\n    | 1 | 2 |",
        ),
        ("Says.\n\n\b\none line\nanother", "Says.\n\n::\n\n    one line\n    another"),
        ("Does.\n\nArgs:\n  x: a * b,\n    and more.", "Does.\n\nArgs:\n  x: a \\* b,\n    and more."),
    ],
)
def test_plain_text_becomes_restructured_text_that_says_the_same(conf, text, expected):
    assert marked(conf, text) == expected


def test_what_stands_before_a_colon_is_no_type(conf):
    assert marked(conf, "The names: two.", "data").startswith("\n")


@pytest.mark.parametrize(
    ("link", "expected"),
    [
        ("[src/multipod/recipes/digits.py](../src/multipod/recipes/digits.py)", "`src/multipod/recipes/digits.py`"),
        ("[the tour](../CONTRIBUTING.md)", "the tour (`CONTRIBUTING.md`)"),
        ("[data](data.md)", "[data](data.md)"),
    ],
)
def test_links_that_leave_the_site_become_paths(conf, link, expected):
    source = [link]
    conf["keep_links_inside"](None, "TOUR", source)
    assert source == [expected]
