"""What a shell offers behind TAB, asked as Click's scripts for shells ask."""

import pytest
from click.shell_completion import BashComplete

from multipod.cli.main import cli
from multipod.collectives.build import ALGORITHMS
from multipod.execute.sums import SUMS
from multipod.layout.sync import BUILT_IN_SUMS, COMBINATIONS


def offered(*words):
    """What is offered for the last word."""
    completer = BashComplete(cli, {}, "multipod", "_MULTIPOD_COMPLETE")
    return {item.value: item.type for item in completer.get_completions(list(words[:-1]), words[-1])}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tra",), {"train"}),
        (("train", "dig"), {"digits"}),
        (("show", "st-moe-s"), {"st-moe-small"}),
        (("plan", "ber"), {"bert", "bert-large", "bert-large-phase1"}),
        (("plan", "digits", "--on", "tpu-v3"), {"tpu-v3-pod", "tpu-v3-multipod"}),
        (("simulate", "--on", "me"), {"mesh:"}),
        (("simulate", "all-r"), {"all-reduce"}),
        (("simulate", "--algorithm", "tr"), {"tree-packing"}),
        (("schedule", "all-reduce", "--algorithm", "dou"), {"double-tree"}),
        (("topology", "strength", "--on", "dgx-h1"), {"dgx-h100"}),
    ],
)
def test_names_are_offered(words, expected):
    assert offered(*words).keys() == expected


def test_files_are_offered_where_no_recipe_begins_so():
    assert offered("train", "./my") == {"./my": "file"}


def test_every_way_of_summing_is_offered():
    assert offered("train", "digits", "--gradient-sum", "").keys() == {*BUILT_IN_SUMS, *COMBINATIONS, *ALGORITHMS}
    assert {*SUMS, *COMBINATIONS} <= offered("train", "digits", "--gradient-sum", "").keys()
