"""Availability: random faults in real runs, goodput with failures, and what a hole in the mesh costs."""

import json
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from multipod.experiments.availability import campaign, goodput, holes
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.experiments.page import facts

FAULTS = 20
"""Unless asked otherwise: about ten minutes, most of them starts of Python."""

Report = Callable[[str], None]
Part = tuple[list[Claim], Section, list[dict[str, Any]]]
"""Claims, a section of the page, and what its figure is drawn from."""


def _goodput(report: Report) -> Part:
    claims, section, cells = goodput.measured(report)
    return claims, section, [asdict(cell) for cell in cells]


PARTS: dict[str, Callable[[Report], Part]] = {
    "goodput": _goodput,
    "saving": lambda report: (*goodput.held_up(report), []),
    "holes-measured": lambda report: (*holes.measured(report), []),
    "holes-simulated": lambda report: (*holes.simulated(report)[1:], []),
}
"""All but the campaign."""


def run(report: Report, count: int = FAULTS, keep: Path | None = None) -> Outcome:
    """The campaign of `count` faults, then the other parts.

    With `keep`, what is done is kept in that folder and not done again: the campaign in pieces of a few minutes, the
    other parts each as a whole. So it may be broken off at any time, and gone on with.
    """
    with ExitStack() as stack:
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        found = campaign.carry_out(report, count, folder)
        lost = campaign.lost_runs(folder)
        parts = {name: part(folder / f"{name}.json", report, make) for name, make in PARTS.items()}
    claims = [claim for name in parts for claim in parts[name][0]]
    cells = goodput.cells_of(parts["goodput"][2])
    return Outcome(
        "Availability",
        (*campaign.claims(found, count, lost), *claims),
        (campaign.runs(found), campaign.recovery(found), *(parts[name][1] for name in parts)),
        {
            "goodput": goodput.figure(cells),
            "recovery": campaign.figure(found),
        },
        {"campaign": list(found.values())},
    )


def part(file: Path, report: Report, make: Callable[[Report], Part]) -> Part:
    """What `make` returns, or what `file` holds of an earlier run; the text then says when and with what that was."""
    about = {name: facts()[name] for name in ("date", "commit")}
    if not (file.exists() and all("fails_if" in claim for claim in json.loads(file.read_text())["claims"])):
        claims, section, cells = make(report)
        told = {"claims": [asdict(one) for one in claims], "section": asdict(section), "cells": cells, "about": about}
        file.write_text(json.dumps(told, indent=1) + "\n")
    told = json.loads(file.read_text())
    section, then = Section(**told["section"]), told["about"]
    if then != about:
        section = replace(section, text=f"{section.text} Measured {then['date']}, commit {then['commit']}.")
    return [Claim(**claim) for claim in told["claims"]], section, told["cells"]
