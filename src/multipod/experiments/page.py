"""Writes an outcome: `NAME.json`, the record; `NAME.md`, the page made of it; and a file for each figure."""

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
    # The commit is that of the code: asked before the files of the page change the tree.
    record = record_of(name, outcome, facts(), seconds)
    pictures = [folder / _picture(name, figure) for figure in outcome.figures]
    for figure, file in zip(outcome.figures.values(), pictures, strict=True):
        # No date and no random ids: the same outcome gives the same file.
        with _fixed_ids(name):
            figure.savefig(file, bbox_inches="tight", metadata={"Date": None})
    page, values = folder / f"{name}.md", folder / f"{name}.json"
    page.write_text(markdown_of(record), encoding="utf-8")
    values.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    return [page, values, *pictures]


def record_of(name: str, outcome: Outcome, about: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """All that the page of a run of the experiment says, as plain data; `note` is there to be filled in by hand."""
    return {
        "name": name,
        "title": outcome.title,
        "command": f"multipod reproduce {name}",
        "seconds": seconds,
        **about,
        "note": "",
        "claims": [dataclasses.asdict(claim) for claim in outcome.claims],
        "sections": [dataclasses.asdict(section) for section in outcome.sections],
        **outcome.data,
    }


def markdown_of(record: Mapping[str, Any]) -> str:
    """The page as Markdown, from its record."""
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    sections = [Section(**section) for section in record["sections"]]
    parts = [
        f"# {record['title']}",
        f"`{record['command']}`, {record['seconds'] / 60:.1f} minutes on {record['hardware']}; {record['date']}, "
        f"commit {record['commit']}, {versions}.",
        record["note"],
        claims_table([Claim(**claim) for claim in record["claims"]]),
        *(part for section in sections for part in _section(section, record["name"])),
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


def _section(section: Section, name: str) -> list[str]:
    picture = f"![{section.heading}]({_picture(name, section.figure)})" if section.figure else ""
    return [
        f"## {section.heading}",
        section.text,
        table(section.head, section.rows) if section.head else "",
        picture,
    ]


def _picture(name: str, figure: str) -> str:
    return f"{name}_{figure}.svg"


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
