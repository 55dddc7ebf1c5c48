"""Writes an outcome: `NAME.md` to read, `NAME.json` to compute with, and a file for each figure."""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import matplotlib as mpl

from multipod.experiments.outcome import Claim, Outcome, Section

PACKAGES = ("multipod", "jax", "jaxlib", "flax", "optax", "numpy", "torch")


def facts() -> dict[str, Any]:
    """Hardware, date, commit and versions: what a measured number means nothing without."""
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), **_versions()},
    }


def hardware() -> str:
    """The processor and the number of cores."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def commit() -> str:
    """The short name of the commit of the source tree that this package lies in; `unknown` outside one."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty= with changes", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def write(name: str, outcome: Outcome, folder: Path, seconds: float) -> list[Path]:
    """The files of an experiment called `name`, written to `folder`, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    about = facts()
    # The commit is that of the code: asked before the files of the page change the tree.
    pictures = {figure: f"{name}_{figure}.svg" for figure in outcome.figures}
    for figure, file in pictures.items():
        # No date and no random ids: the same outcome gives the same file.
        with _fixed_ids(name):
            outcome.figures[figure].savefig(folder / file, bbox_inches="tight", metadata={"Date": None})
    page, values = folder / f"{name}.md", folder / f"{name}.json"
    page.write_text(markdown(name, outcome, about, seconds, pictures), encoding="utf-8")
    entry = {"name": name, **about, "claims": [dataclasses.asdict(claim) for claim in outcome.claims], **outcome.data}
    values.write_text(json.dumps(entry, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [page, values, *(folder / file for file in pictures.values())]


def markdown(name: str, outcome: Outcome, about: Mapping[str, Any], seconds: float, pictures: Mapping[str, str]) -> str:
    """The page as Markdown."""
    versions = ", ".join(f"{package} {number}" for package, number in about["versions"].items())
    parts = [
        f"# {outcome.title}",
        f"`multipod reproduce {name}`, {seconds / 60:.1f} minutes on {about['hardware']}; {about['date']}, "
        f"commit {about['commit']}, {versions}.",
        claims_table(outcome.claims),
        *(part for section in outcome.sections for part in _section(section, pictures)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def claims_table(claims: Sequence[Claim]) -> str:
    """The table of claims that a page begins with."""
    return table(("claim", "source", "measured", "threshold", "holds", "fails if"), [_row(claim) for claim in claims])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def _row(claim: Claim) -> tuple[str, ...]:
    spread = "" if claim.spread is None else f" (spread {_number(claim.spread)})"
    count = len(claim.seeds)
    seeds = f", {count} seed{'s' if count > 1 else ''}" if count else ""
    holds = "yes" if claim.holds else "**no**"
    return (
        claim.claim,
        claim.source,
        f"{_number(claim.measured)}{spread}{seeds}",
        _number(claim.threshold),
        holds,
        claim.fails_if,
    )


def _number(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _section(section: Section, pictures: Mapping[str, str]) -> list[str]:
    picture = f"![{section.heading}]({pictures[section.figure]})" if section.figure else ""
    return [
        f"## {section.heading}",
        section.text,
        table(section.head, section.rows) if section.head else "",
        picture,
    ]


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _fixed_ids(salt: str) -> Any:
    return mpl.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"})
