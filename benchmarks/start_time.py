"""The time of a run from its start to the end of its first update, in its parts, by number of virtual CPU devices.

    python benchmarks/start_time.py [--recipe digits] [--devices 1,8,64] [--rounds 3] [--cache] [--out FILE.md]

Each run is a process of its own, `multipod train RECIPE --set updates=1`, with its compiled programs kept nowhere, or,
with --cache, found in a folder that a run before filled. Runs of all numbers of devices follow each other, and the
median over rounds is printed: other load on the machine then meets all of them.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import machine

PARTS = ("import", "devices", "trace", "folder", "state", "data", "compile", "update")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="digits")
    parser.add_argument("--devices", default="1,8,64", help="numbers of virtual CPU devices, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache", action="store_true", help="find the programs in a cache that was filled before")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table there")
    options = parser.parse_args()
    counts = [int(number) for number in options.devices.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        warm = [start(options.recipe, count, Path(folder), "warm", True) for count in counts if options.cache]
        runs: dict[int, list[dict[str, float]]] = {count: [] for count in counts}
        for number in range(options.rounds):
            for count in counts:
                runs[count].append(start(options.recipe, count, Path(folder), f"{number}", options.cache))
                print(count, runs[count][-1], file=sys.stderr, flush=True)
    rows = [row_of(count, found) for count, found in runs.items()]
    cached = ", programs cached" if warm else ""
    text = "\n".join(
        [
            machine.headline(machine.facts()),
            f"\nSeconds, medians of {options.rounds} runs of `{options.recipe}`{cached}.\n",
            machine.table(["devices", "first update after", *PARTS], rows),
        ]
    )
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


def row_of(count: int, found: list[dict[str, float]]) -> list[str]:
    totals = statistics.median(sum(parts.values()) for parts in found)
    medians = [statistics.median(parts.get(part, 0.0) for parts in found) for part in PARTS]
    return [str(count), f"{totals:.1f}", *(f"{seconds:.2f}" for seconds in medians)]


def start(recipe: str, devices: int, folder: Path, name: str, cached: bool) -> dict[str, float]:
    """One run; returns the seconds of each part."""
    run = folder / f"{devices}-{name}"
    words = ["train", recipe, "--cpu-devices", str(devices), "--out", str(run), "--quiet"]
    words += ["--cache", str(folder / "cache") if cached else "off"]
    changes = [f"batch={max(64, devices)}", "updates=1", "evaluate_every=0", "checkpoint_every=0"]
    command = [sys.executable, "-m", "multipod", *words, *(word for change in changes for word in ("--set", change))]
    subprocess.run(command, check=True)
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return next(line["start_s"] for line in lines if line["event"] == "ended")


if __name__ == "__main__":
    sys.exit(main())
