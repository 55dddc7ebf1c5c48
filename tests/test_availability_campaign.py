"""The campaign of faults: how it is cut, what is kept of it, and what its page says; no process is started."""

import json
from statistics import quantiles

import pytest

from multipod.errors import RecipeError
from multipod.experiments.availability import campaign
from multipod.experiments.availability import run as availability
from multipod.experiments.availability.campaign import SERIES, carry_out, claims, cut, figure, recovery, runs, spread
from multipod.experiments.experiments import EXPERIMENTS
from multipod.experiments.outcome import Claim, Section


def piece(survives: bool, *faults: tuple[str, float | None], difference: float = 0.0, **changes) -> dict:
    return {
        "survives": survives,
        "faults": [{"kind": kind, "recovered_s": seconds, "repeated": 1} for kind, seconds in faults],
        "difference": difference,
        "examples": {"updates": 9, "used": 90, "same": True, "uneven": 0},
        "left_behind": [],
        "lost_s": {"start": 4.0, "regroup": 1.0},
        "run_s": 10.0,
        "goodput": 0.5,
        "starts": 1,
        "worlds": 2,
        "repeated": 1,
        "not_saved": 0,
        "undisturbed_s": 7.0,
        "disturbed_s": 11.0,
        **changes,
    }


def test_a_longer_campaign_begins_as_a_shorter_one():
    assert cut(25) == [10, 10, 5]
    assert cut(200)[:2] == cut(20)
    assert sum(cut(200)) == 200


def test_a_piece_that_is_there_is_not_done_again(tmp_path, monkeypatch):
    done = []

    def run(series, faults, seed, folder, file):
        done.append((series, faults, seed))
        file.write_text(json.dumps(piece(series.survives, ("kill", 2.0))))

    monkeypatch.setattr(campaign, "_run", run)
    carry_out(lambda line: None, 15, tmp_path)
    found = carry_out(lambda line: None, 25, tmp_path)  # the second piece had 5 faults, and now has 10
    assert done == [(SERIES[0], 10, 0), (SERIES[1], 5, 1), (SERIES[1], 10, 1), (SERIES[2], 5, 2)]
    assert list(found) == [0, 1, 2]


def test_the_page_says_what_does_not_hold():
    good = {0: piece(True, ("kill", 4.0), ("kill", 6.0), difference=1e-6), 1: piece(False, ("stop", 1.0))}
    assert all(claim.holds for claim in claims(good, 20))
    assert len(runs(good).rows) == 2
    assert [(row[0], row[1], row[4]) for row in recovery(good).rows] == [
        ("kill, survive", "2", "5.0"),
        ("stop, restart", "1", "1.0"),
    ]
    assert figure(good) is not None
    curved = claims({0: piece(True, ("kill", 4.0), losses=3e-4), 1: good[1]}, 20)
    assert [(claim.claim[-14:], claim.holds) for claim in curved if "losses" in claim.claim] == [
        ("in 1 of 2 runs", False)
    ]
    bad = {**good, 4: piece(True, ("cut", None), difference=1e-3, left_behind=["port 4"])}
    bad[4]["examples"]["uneven"] = 3
    assert [claim.holds for claim in claims(bad, 50)] == [True, False, False, False, False, False]
    assert [claim.holds for claim in claims(good, 20, lost=1)] == [True, True, False, True, True, True]
    assert [row[3] for row in runs(bad).rows] == ["3", "1"]  # faults of each series


def test_the_spread_is_that_of_the_standard_library():
    times = [float(k * k) for k in range(1, 30)]
    assert spread(times)[1:4] == tuple(quantiles(times, n=4, method="inclusive"))
    assert spread([3.0]) == (3.0,) * 6


def test_other_parts_are_kept_and_say_of_when_they_are(tmp_path, monkeypatch):
    made = []

    def make(report):
        made.append(1)
        return (
            [Claim("it holds", "us", 1.0, 2.0, True, fails_if="it is off")],
            Section("Part", "Text.", ("a",), [("1",)]),
            [{"x": 1}],
        )

    first = availability.part(tmp_path / "part.json", print, make)
    told = json.loads((tmp_path / "part.json").read_text())
    told["about"] = {"date": "2026-01-02", "commit": "abc"}
    (tmp_path / "part.json").write_text(json.dumps(told))
    claims, section, cells = availability.part(tmp_path / "part.json", print, make)
    assert (len(made), first[1].text) == (1, "Text.")
    assert section.text == "Text. Measured 2026-01-02, commit abc."
    assert (claims, cells) == ([Claim("it holds", "us", 1.0, 2.0, True, fails_if="it is off")], [{"x": 1}])


def test_what_is_not_counted_is_not_kept(tmp_path):
    with pytest.raises(RecipeError, match="nothing to keep: leave out --keep"):
        EXPERIMENTS["planner"].run(print, keep=tmp_path)
