"""A campaign of `multipod verify`: each recipe in many drawn layouts; runs add up in docs/results/verify.json.

    python benchmarks/verify_layouts.py [NAME ...] [--layouts 10] [--draw SEED] [--limit SECONDS]

Another `--draw` adds other layouts; a draw that is there already is left out. The page docs/results/verify.md is
written anew each time, and the exit code is 1 if any layout learns something else than one device.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import machine

CASES = (
    "mlp-small",
    "digits batch=64",
    "digits batch=64 model.batch_norm_tile=16 ema.decay=0.9",
    "stdlib-lm batch=16",
    "stdlib-lm batch=16 model.dropout=0.1 model.dtype=bfloat16",
    "stdlib-docs batch=16",
    "st-moe-small batch=16",
    "dlrm-small batch=128",
    "dlrm-v2-small batch=128",
    "gnmt-small batch=16",
    "ssd-shapes batch=16",
    "mask-rcnn-shapes batch=8",
)
"""Recipes that need no files, each with what makes its batches small or is to be looked at."""

PAGE = Path(__file__).parents[1] / "docs" / "results" / "verify.json"
UPDATES, DEVICES = 3, 16


def verdict_of(case: str, layouts: int, draw: int, limit: float) -> dict[str, Any]:
    """What `multipod verify` says of a recipe, or `failed` with the end of what it said."""
    name, *changes = case.split()
    options = [f"--set={change}" for change in changes]
    options += [f"--layouts={layouts}", f"--updates={UPDATES}", f"--devices={DEVICES}", f"--draw={draw}", "--json"]
    command = [sys.executable, "-m", "multipod", "verify", name, *options]
    start = time.perf_counter()
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired as error:
        said = error.stderr.decode() if isinstance(error.stderr, bytes) else error.stderr or ""
        return {"failed": f"stopped after {limit:.0f} s; {len(said.splitlines())} lines were said"}
    if run.returncode not in (0, 1) or not run.stdout.startswith("{"):
        return {"failed": run.stderr[-500:]}
    return json.loads(run.stdout) | {"seconds": round(time.perf_counter() - start), "commit": machine.commit()}


def row_of(case: str, draws: dict[str, Any]) -> list[str]:
    """A recipe over all its draws."""
    whole = [one for one in draws.values() if "results" in one]
    results = [result for one in whole for result in one["results"]]
    different = {result["layout"] for result in results}
    wrong = [result for result in results if result["wrong"]]
    worst = max(results, key=lambda result: result["ratio"], default=None)
    refused = sum((Counter(one["refused"]) for one in whole), Counter())
    name, *changes = case.split()
    return [
        f"`{name}`",
        " ".join(changes) or "-",
        str(len(different)),
        str(len(wrong)),
        f"{worst['ratio']:.1f}" if worst else "-",
        f"`{worst['layout']}`: {worst['of']}" if worst else "-",
        str(sum(refused.values())),
        str(sum(one["seconds"] for one in whole)),
    ]


def page_of(known: dict[str, Any]) -> str:
    """docs/results/verify.md."""
    head = ["recipe", "with", "layouts", "that learn otherwise", "largest error", "where", "draws refused", "s"]
    rows = [row_of(case, known["recipes"][case]) for case in CASES if case in known["recipes"]]
    wrong = [
        f"- `{name}`, `{result['layout']}`: {sentence}"
        for name, draws in known["recipes"].items()
        for one in draws.values()
        for result in one.get("results", [])
        for sentence in result["wrong"]
    ]
    failed = [
        f"- `{name}`, draw {draw}: {one['failed'].strip().splitlines()[-1]}"
        for name, draws in known["recipes"].items()
        for draw, one in draws.items()
        if "failed" in one
    ]
    parts = [
        "# Layouts that were held against one device",
        f"`python benchmarks/verify_layouts.py --layouts N --draw SEED`, runs added up; {known['machine']}.",
        f"Of each layout {UPDATES} updates on at most {DEVICES} CPU devices ([what is compared](../verify.md)). "
        "An error is in times of one device's own against float64; above 10 it is another curve.",
        machine.table(head, rows),
        *(["What learns otherwise:", "\n".join(wrong)] if wrong else []),
        *(["Runs that did not end:", "\n".join(failed)] if failed else []),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="recipes; all if none is named")
    parser.add_argument("--layouts", type=int, default=10, help="of each recipe")
    parser.add_argument("--draw", type=int, default=0, help="the seed of the draws")
    parser.add_argument("--limit", type=float, default=3600, help="seconds that a recipe may take")
    options = parser.parse_args()
    known = json.loads(PAGE.read_text()) if PAGE.exists() else {"recipes": {}}
    for case in CASES:
        if options.names and case.split()[0] not in options.names:
            continue
        draws = known["recipes"].setdefault(case, {})
        if "results" in draws.get(str(options.draw), {}):
            continue
        draws[str(options.draw)] = verdict_of(case, options.layouts, options.draw, options.limit)
        known["machine"] = machine.headline(machine.facts())
        part = PAGE.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(known, indent=1) + "\n")
        part.replace(PAGE)
        PAGE.with_suffix(".md").write_text(page_of(known))
        print(" | ".join(row_of(case, draws)), flush=True)
    wrong = [
        result["layout"]
        for draws in known["recipes"].values()
        for one in draws.values()
        for result in one.get("results", [])
        if result["wrong"]
    ]
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
