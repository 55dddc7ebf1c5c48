"""Every claim of every experiment can fail: a made-up bad result of its kind makes it fail, and its page says how."""

import json
from pathlib import Path

import pytest
from claim_cases import CASES, ClaimCase

from multipod.experiments.experiments import EXPERIMENTS
from multipod.experiments.outcome import Claim
from multipod.experiments.page import markdown_of

RESULTS = Path(__file__).parents[1] / "docs" / "results"
PAGES = {name: RESULTS / f"{name}.json" for name in EXPERIMENTS}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.experiment}: {case.words.strip()}")
def test_a_claim_holds_and_fails(case: ClaimCase):
    good, bad = case.claims(case.good), case.claims(case.bad)
    assert [claim.holds for claim in good] == [True] * max(1, len(good)), good
    assert [claim.holds for claim in bad] == [False] * max(1, len(bad)), bad
    assert all(claim.fails_if for claim in good + bad)


def test_every_experiment_has_cases():
    assert {case.experiment for case in CASES} == set(EXPERIMENTS)


@pytest.mark.parametrize("name", PAGES)
def test_every_claim_of_a_page_is_of_one_kind(name: str):
    for claim in json.loads(PAGES[name].read_text())["claims"]:
        kinds = [case.words for case in CASES if case.experiment == name and case.words in claim["claim"]]
        assert len(kinds) == 1, (claim["claim"], kinds)
        assert claim["fails_if"].strip(), claim["claim"]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_made_of_its_record(name: str):
    assert markdown_of(json.loads(PAGES[name].read_text())) == PAGES[name].with_suffix(".md").read_text()


def test_a_claim_must_say_what_would_make_it_fail():
    with pytest.raises(ValueError, match="fails_if is empty"):
        Claim("it is so", "we", 1, 1, True, fails_if=" ")
