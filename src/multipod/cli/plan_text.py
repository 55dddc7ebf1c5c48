"""What `multipod plan` prints: tables of layouts, a step taken apart, two plans beside each other."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.box import SIMPLE_HEAD
from rich.table import Table

from multipod.plan.mirror import mirroring
from multipod.plan.predict import layout_words, split_words
from multipod.plan.rank import tied
from multipod.plan.saved import read_plan
from multipod.train.observers.text import bytes_text, duration

if TYPE_CHECKING:
    from rich.console import Console

    from multipod.plan.calibration.fit import Fit
    from multipod.plan.machine import Machine
    from multipod.plan.predict import Prediction
    from multipod.plan.run import RunPrediction
    from multipod.plan.saved import SavedPlan
    from multipod.plan.search import Found

    Run = Callable[[Prediction], RunPrediction] | None


def table(console: "Console", found: "Found", machine: "Machine", top: int, run: "Run") -> None:
    """The quickest layouts, then the quickest of each split that is not among them, and what was searched."""
    best = found.best
    console.print(f"{best.workload}, batch {best.batch:,}, on {machine}: {machine.devices:,} devices")
    console.print(f"[dim]constants: {machine.calibration.source}[/]", highlight=False)
    layouts = shown(found, top)
    waits = [
        name for name in ("input", "evaluation", "copies", "idle") if any(step.split()[name] for _, step in layouts)
    ]
    columns = ["split", "sum by", "step ms", "compute", "sums", "update", *waits, "GiB"]
    columns += [*(["run"] if run else []), *(["price"] if run and machine.price else []), "slower by"]
    rows = []
    for number, step in layouts:
        names = (_split_of(step), _sum_of(step))
        why = _why(best, step, machine) if number > 1 else ""
        rows.append((str(number), *names, *_cells(step, waits), *_run_cells(step, machine, run), why))
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for k, column in enumerate(["", *columns]):
        words = k in (1, 2, len(columns))  # these may wrap on a narrow terminal, numbers are never cut
        widest = max(len(column), *(len(re.sub(r"\[/?\w*\]", "", row[k])) for row in rows))
        table.add_column(
            column, justify="left" if words else "right", min_width=None if words else widest, overflow="fold"
        )
    for row in rows:
        table.add_row(*row)
    console.print(table)
    said = [f"{found.tried} layouts priced"]
    said += [] if all(step.layout.sync.shards_update for _, step in layouts) else ["whole: the update is not sharded"]
    said += [f"{len(found.refused)} cannot be"] if found.refused else []
    said += [f"left out {'; '.join(found.left_out)}"] if found.left_out else ["none left out"]
    limit = f"{best.examples_per_s:,.0f} examples/s, limited by {best.limit}"
    console.print(f"[dim]{'; '.join(said)}. The best: {limit}.[/]", highlight=False)
    if run is not None and machine.chip_failures_per_hour:
        console.print(_failing(run(best), machine), highlight=False)


SHARDINGS = {"none": ", whole", "zero1": "", "fsdp": ", fsdp"}
"""What a table says of the update behind the sum: most are sharded."""

OTHERS = 6
"""Splits that are shown beyond the quickest layouts."""


def shown(found: "Found", top: int) -> "list[tuple[int, Prediction]]":
    """With their numbers: the first `top`, and the first of other splits."""
    numbered = list(enumerate(found.predictions, 1))
    seen = {_split_of(step) for _, step in numbered[:top]}
    others = []
    for number, step in numbered[top:]:
        if step.fits and _split_of(step) not in seen:
            seen.add(_split_of(step))
            others.append((number, step))
    return [*numbered[:top], *others[:OTHERS]]


def _sum_of(step: "Prediction") -> str:
    sync = step.layout.sync
    buckets = f", {sync.bucket_bytes / 2**20:g} MiB" if sync.bucket_bytes else ""
    return sync.gradient_sum + buckets + SHARDINGS[sync.sharding]


def _split_of(step: "Prediction") -> str:
    return ", ".join(word for word in (split_words(step.layout), step.dtype) if word)


def _failing(run: "RunPrediction", machine: "Machine") -> str:
    """What failures do to the best layout's run."""
    between_s = 3600 / (machine.chips * machine.chip_failures_per_hour)
    saves = f"a checkpoint after each {duration(run.every_s)} of work" if run.every_s else "no checkpoints"
    return (
        f"failures: one in {duration(between_s)} on {machine.chips:,} chips; {saves}; goodput {run.goodput:.1%}: "
        f"{duration(run.checkpoints_s)} to save, {duration(run.failures_s)} lost, of {duration(run.seconds)}"
    )


def short_name(step: "Prediction") -> str:
    """How a layout splits a replica and sums, as the table has it."""
    return " | ".join(word for word in (_split_of(step), _sum_of(step)) if word)


def name_of(step: "Prediction") -> str:
    """A layout in words, without its batch."""
    return step.words.partition(", ")[2]


def _cells(step: "Prediction", waits: list[str]) -> tuple[str, ...]:
    parts = (step.step_s, step.compute_s, step.collectives_s, step.update_s, *(step.split()[name] for name in waits))
    memory = f"{step.memory.total / 2**30:.2f}" if step.fits else f"[red]{step.memory.total / 2**30:.1f}![/]"
    return (*(f"{1e3 * s:.2f}" for s in parts), memory)


def _run_cells(step: "Prediction", machine: "Machine", run: "Run") -> tuple[str, ...]:
    if run is None:
        return ()

    found = run(step)
    return (duration(found.seconds), *((f"{found.price:,.2f}",) if machine.price else ()))


def _why(best: "Prediction", step: "Prediction", machine: "Machine") -> str:
    """The part in which a layout loses most to the best, or, where it is quicker, gains most; or that it is a tie."""
    if not step.fits:
        return "memory"
    sign = 1 if step.step_s >= best.step_s else -1
    lost = {name: theirs - best.split()[name] for name, theirs in step.split().items()}
    part = max(lost, key=lambda name: sign * lost[name])
    why = f"{WORDS.get(part, part)} {1e3 * lost[part]:+.2f} ms"
    return f"tie ({why})" if sign < 0 or tied(best, step, machine) else why


WORDS = {"collectives": "sums"}
"""Parts whose column has another name."""


def explain(console: "Console", step: "Prediction", number: int, spelled: str) -> None:
    """The parts of a step, its memory, and its share of the peak. Number 0: it is none of the table's."""
    table = Table(box=SIMPLE_HEAD, title=f"layout {number or 'asked for'}: {name_of(step)}")
    for column in ("part", "ms", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for name, seconds in step.parts:
        table.add_row(name, f"{1e3 * seconds:.3f}", f"{seconds / step.step_s:.1%}")
    console.print(table)
    memory = step.memory
    kept = {"weights": memory.parameters, "optimizer": memory.optimizer, "gradients": memory.gradients}
    kept |= {"kept for the backward pass": memory.activations, "batch": memory.batch}
    told = [f"{name} {bytes_text(round(n))}" for name, n in kept.items() if n >= 1]
    console.print("memory: " + ", ".join(told), highlight=False)
    if step.sum_sent:
        console.print(f"gradient sum: each chip sends {bytes_text(round(step.sum_sent))}", highlight=False)
    console.print(f"--layout {spelled}", soft_wrap=True, highlight=False)
    console.print(f"{step.flops / 1e12:,.2f} TFLOP a step, {step.utilisation:.1%} of the peak")


def survival(console: "Console", step: "Prediction", machine: "Machine") -> None:
    """What it costs to survive a lost host."""
    copy = mirroring(step, machine)
    copied, sent, kept = (f"{nbytes / 2**30:.2f} GiB" for nbytes in (copy.copied, copy.sent, copy.kept))
    console.print(
        f"to survive a lost host: {copied} copied to each host's memory in {1e3 * copy.copy_s:.1f} ms, of them {sent} "
        f"to its neighbour too in {1e3 * copy.send_s:.1f} ms, each --mirror-every updates; {kept} kept",
        soft_wrap=True,
    )


def compare(console: "Console", files: tuple[str, ...]) -> None:
    """Two saved plans side by side, with ratios."""
    one, other = _two_plans(files)
    table = Table(box=SIMPLE_HEAD)
    for column in ("", *files, "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    for title, left, right in (
        ("recipe", one.name, other.name),
        ("machine", one.machine, other.machine),
        ("layout", *(layout_words(plan.layout, plan.batch) for plan in (one, other))),
        ("recipe set to", *("\n".join(plan.settings) for plan in (one, other))),
    ):
        table.add_row(title, left, right, "")
    for key, (a, b) in _common_figures(one, other).items():
        table.add_row(key, f"{a:.6g}", f"{b:.6g}", f"{b / a:.3f}" if a else "")
    console.print(table)


def compared(files: tuple[str, ...]) -> dict[str, Any]:
    """What `plan compare --json` prints: both plans, and each figure that both have, with their ratio."""
    one, other = _two_plans(files)
    plans = [
        {"file": file, "recipe": plan.name, "machine": plan.machine, "layout": layout_words(plan.layout, plan.batch),
         "settings": list(plan.settings)}
        for file, plan in zip(files, (one, other), strict=True)
    ]  # fmt: skip
    figures = {
        key: {"values": [a, b], "ratio": b / a if a else None} for key, (a, b) in _common_figures(one, other).items()
    }
    return {"plans": plans, "figures": figures}


def _two_plans(files: tuple[str, ...]) -> tuple["SavedPlan", "SavedPlan"]:
    if len(files) != 2:
        raise click.UsageError("compare takes two plans, as `multipod plan compare a.json b.json`.")
    one, other = (read_plan(Path(file)) for file in files)
    return one, other


def _common_figures(one: "SavedPlan", other: "SavedPlan") -> dict[str, tuple[float, float]]:
    pairs = {key: (one.prediction[key], other.prediction[key]) for key in one.prediction if key in other.prediction}
    return {key: (a, b) for key, (a, b) in pairs.items() if isinstance(a, int | float) and isinstance(b, int | float)}


def fitted(console: "Console", fit: "Fit", measured: dict[str, float]) -> None:
    """What a calibration found: its errors, its constants, and what the data cannot tell apart."""
    for name, seconds in measured.items():
        console.print(f"{name:36} {1e3 * seconds:8.2f} ms measured, {fit.errors[name]:+.0%} predicted", highlight=False)
    for name, (value, spread) in fit.constants.items():
        remark = "  not fixed by these measurements" if name in fit.loose else ""
        console.print(f"{name:12} {value:.3g} +- {spread:.0%}{remark}", highlight=False)
    for one, other, together in fit.twins:
        console.print(f"{one} and {other} cannot be told apart ({together:+.2f})", highlight=False)
