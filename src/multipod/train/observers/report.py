"""`report.html`: all of a run folder on one page that needs no network."""

import math
import shlex
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import jinja2
import numpy as np

from multipod.train.events import Ended
from multipod.train.observers import charts, text
from multipod.train.observers.found import read_found
from multipod.train.observers.history import RunDevice, RunFacts, RunHistory, read_facts, read_history, read_recipe
from multipod.train.observers.jsonl import replace_file

LEFT_OUT = 20
"""Most examples that are named as left out."""
PROCESS_COLOURS = 8
"""Colours of processes in the style sheet; process 8 looks like process 0."""


def write(folder: Path) -> Path:
    """Writes `report.html` into a run folder, from its `recipe.toml`, `run.json`, `metrics.jsonl` and `detections/`.

    The page is one file without scripts and without anything from outside; the same folder gives the
    same bytes. It is replaced in one move. A run in any state will do.

    Raises:
      RunFolderError: a file is missing or broken.
      OSError: the page cannot be written.
    """
    recipe, facts, history = read_recipe(folder), read_facts(folder), read_history(folder)
    found = read_found(folder)
    page = _template().render(
        facts=facts,
        recipe=recipe,
        history=history,
        folder=folder.resolve().name,
        result=_result(history),
        tiles=_tiles(history, facts),
        resume=_resume(history, folder),
        charts=[*charts.draw(history), *charts.draw_precisions(found.curves, found.what)],
        found=found,
        summary=text.summary_rows(_ended(history, facts)),
        mesh=_mesh(facts),
        sections=[
            *_sections(facts),
            *_start(history),
            *_availability(history),
            *_left_out(history),
            *_planned(facts, _ended(history, facts)),
        ],
        colours=PROCESS_COLOURS,
    )
    path = folder / "report.html"
    replace_file(path, page.encode())
    return path


def _template() -> jinja2.Template:
    here = jinja2.FileSystemLoader(Path(__file__).parent)
    page = jinja2.Environment(
        loader=here, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return page.get_template("report.html.jinja")


def _result(history: RunHistory) -> str:
    evaluation = history.evaluations[-1] if history.evaluations else None
    if evaluation is None:
        return f"{history.update:,} of {history.total:,} updates; not evaluated yet."
    parts = text.evaluated_text(evaluation).removeprefix("test ").split("  ")
    return f"Test {', '.join(parts)} after {evaluation.update:,} of {history.total:,} updates."


def _tiles(history: RunHistory, facts: RunFacts) -> list[tuple[str, str, str]]:
    """The few numbers to see first: name, value, remark."""
    ended = _ended(history, facts)
    tiles = []
    if history.evaluations and "accuracy" in history.evaluations[-1].values:
        last = history.evaluations[-1]
        correct = last.sums.get("accuracy", math.nan)
        counts = f"{correct:,.0f} of {last.count:,} right" if float(correct).is_integer() else ""
        tiles.append(("test accuracy", text.percent(last.values["accuracy"], 2), counts))
    tiles.append(("updates", f"{history.update:,}", f"of {history.total:,}"))
    if ended.rate > 0:
        batch = f"{history.starts[-1].batch:,} an update" if history.starts else ""
        tiles.append(("examples a second", text.rate_text(ended.rate), batch))
    if ended.median_step_s > 0:
        tiles.append(("median step", text.milliseconds(ended.median_step_s), _data_remark(ended)))
    if ended.run_s > 0:
        repeated = f"{ended.repeated:,} updates done again" if ended.repeated else ""
        tiles.append(("goodput", text.percent(ended.goodput), repeated))
    if math.isfinite(ended.wall_s):
        compiling = f"compiling {text.duration(ended.compile_s)}"
        tiles.append(("wall time", text.duration(ended.wall_s), compiling))
    return tiles


def _data_remark(ended: Ended) -> str:
    return f"data wait {text.percent(ended.data_share)}" if math.isfinite(ended.data_share) else ""


def _ended(history: RunHistory, facts: RunFacts) -> Ended:
    """The run's own summary, or what can be told without it; NaN where nothing can."""
    accuracy = history.evaluations[-1].values.get("accuracy") if history.evaluations else None
    if history.ended is not None:
        return replace(history.ended, accuracy=accuracy)
    steps_s = np.array([event.step_s for event in history.timed])
    total_s = steps_s.sum()
    batch = history.starts[-1].batch if history.starts else math.nan
    return Ended(
        update=history.update,
        interrupted=False,
        accuracy=accuracy,
        rate=len(steps_s) * batch / total_s if total_s > 0 else math.nan,
        median_step_s=float(np.median(steps_s)) if len(steps_s) else math.nan,
        first_step_s=math.nan,
        compile_s=history.compiled[-1].seconds if history.compiled else math.nan,
        gradient_sum_share=math.nan,
        data_share=history.data_share,
        outside_share=math.nan,
        wall_s=math.nan,
        optimizer_bytes=facts.bytes_per_device.get("optimizer", 0),
    )


def _resume(history: RunHistory, folder: Path) -> str:
    """The command that goes on with the run; empty if it is complete."""
    if history.state == "complete":
        return ""
    if history.ended is not None and history.ended.resume:
        return history.ended.resume
    return f"multipod train --resume {shlex.quote(history.starts[-1].folder if history.starts else str(folder))}"


def _planned(facts: RunFacts, ended: Ended) -> list[tuple[str, list[tuple[str, str]]]]:
    """Predicted beside measured, where the run was laid out by a plan (`multipod train --layout`)."""
    step_s = facts.plan.get("step_s")
    if not isinstance(step_s, int | float) or not step_s > 0:
        return []
    rows = [("planned for", str(facts.plan.get("machine", ""))), ("layout", str(facts.plan.get("layout", "")))]
    measured = ended.median_step_s
    both = f", {measured / step_s - 1:+.0%}" if measured > 0 else ""
    rows.append(("step", f"predicted {text.milliseconds(step_s)}, measured {text.milliseconds(measured)}{both}"))
    plan = {name: value for name, value in facts.plan.items() if isinstance(value, int | float)}
    sums_s, wait_s = ended.gradient_sum_share * measured, ended.data_share * measured
    if "collectives_s" in plan and math.isfinite(sums_s):
        alone = f"the gradient sum alone measured {text.milliseconds(sums_s)}"
        rows.append(("sums", f"predicted {text.milliseconds(plan['collectives_s'])}; {alone}"))
        rest_s = sum(plan.get(f"{part}_s", 0.0) for part in ("compute", "update", "idle"))
        rows.append(("passes and update", _both(rest_s, measured - sums_s - wait_s)))
    rows.append(("input", _both(plan.get("input_s", 0.0), wait_s)))
    if plan.get("evaluation_s") and "evaluation" in ended.lost_s and ended.update:
        rows.append(("evaluation", _both(plan["evaluation_s"], ended.lost_s["evaluation"] / ended.update)))
    if plan.get("copies_s") and "copies" in ended.lost_s and ended.update:
        rows.append(("copies for a lost host", _both(plan["copies_s"], ended.lost_s["copies"] / ended.update)))
    kept = sum(facts.bytes_per_device.get(name, 0) for name in ("parameters", "optimizer", "statistics"))
    if plan.get("state_bytes") and kept:
        held = f"predicted {text.bytes_text(round(plan['state_bytes']))}, laid out {text.bytes_text(kept)}"
        rows.append(("state per device", held))
    return [("Plan", rows)]


def _both(predicted_s: float, measured_s: float) -> str:
    return f"predicted {text.milliseconds(predicted_s)}, measured {text.milliseconds(measured_s)}"


def _sections(facts: RunFacts) -> list[tuple[str, list[tuple[str, str]]]]:
    """The facts as tables: heading, and rows of name and value; rows without a value are left out."""
    kinds = Counter(device.kind or facts.platform for row in facts.devices for device in row)
    run = [
        ("recipe", facts.recipe),
        ("overrides", "\n".join(facts.overrides)),
        ("command", facts.command),
        ("training data", facts.data.get("train", "")),
        ("test data", facts.data.get("test", "")),
        ("started", facts.started.replace("T", " ").replace("+00:00", " UTC").replace("Z", " UTC")),
        ("gradient sum", facts.gradient_sum),
        ("weight update", "sharded over the devices" if facts.shard_update else "the same on every device"),
    ]
    hardware = [
        ("host", facts.host),
        ("cores", f"{facts.cores:,}" if facts.cores else ""),
        ("platform", facts.platform),
        ("devices", ", ".join(f"{count:,} × {kind}" for kind, count in kinds.items())),
        ("mesh", " × ".join(f"{axis}={size}" for axis, size in facts.mesh.items())),
        ("failed chips", ", ".join(str(tuple(chip)) for chip in facts.failed)),
        ("processes", f"{facts.processes:,}"),
    ]
    model = [
        ("parameters", f"{facts.parameters:,}" if facts.parameters is not None else ""),
        *((f"{name} per device", text.bytes_text(count)) for name, count in facts.bytes_per_device.items()),
    ]
    named = [
        ("Run", run),
        ("Hardware", hardware),
        ("Model", model),
        ("Versions", list(facts.versions.items())),
    ]
    filled = [(heading, [row for row in rows if row[1]]) for heading, rows in named]
    return [(heading, rows) for heading, rows in filled if rows]


def _start(history: RunHistory) -> list[tuple[str, list[tuple[str, str]]]]:
    """What the time to the first update of the last process went into."""
    parts = history.ended.start_s if history.ended is not None else {}
    rows = [(part, text.duration(seconds)) for part, seconds in parts.items() if seconds >= 0.05]
    return [("time to the first update", rows)] if rows else []


def _availability(history: RunHistory) -> list[tuple[str, list[tuple[str, str]]]]:
    """Where the time went, over all interruptions; bad updates and saves that failed, the first of them."""
    ended, account = history.ended, history.account
    lost_s = ended.lost_s if ended is not None else account.lost_s
    run_s = ended.run_s if ended is not None else account.told_s
    rows = []
    if run_s > 0:
        rows.append(("good updates", f"{text.percent(account.good_s / run_s)} of {text.duration(run_s)}"))
        order = sorted(lost_s.items(), key=lambda item: -item[1])
        rows += [(cause, f"{text.percent(s / run_s)}, {text.duration(s)}") for cause, s in order if s / run_s > 5e-4]
    if account.repeated:
        rows.append(("updates done again", f"{account.repeated:,}"))
    kept = history.starts[-1].facts if history.starts else {}
    if kept.get("mirror_every"):
        sent = text.bytes_text(kept["bytes_to_neighbour"])
        said = f"{text.bytes_text(kept['bytes_kept'])} each {kept['mirror_every']} updates, of them {sent} for another"
        rows.append(("copies in each process's memory", said))
    rows += [(f"world {one.generation}", text.regrouped_text(one)) for one in history.regrouped[:LEFT_OUT]]
    rows += [(f"update {one.update:,}", text.troubled_text(one)) for one in history.troubled[:LEFT_OUT]]
    rows += [(f"update {one.update:,}", text.save_failed_text(one)) for one in history.not_saved[:LEFT_OUT]]
    return [("Where the time went", rows)] if rows else []


def _left_out(history: RunHistory) -> list[tuple[str, list[tuple[str, str]]]]:
    """The examples that could not be read, the first of them by name."""
    rows = [(one.name, one.reason) for one in history.skipped[:LEFT_OUT]]
    if len(history.skipped) > LEFT_OUT:
        rows.append((f"and {len(history.skipped) - LEFT_OUT:,} more", "in metrics.jsonl"))
    return [("Left out", rows)] if rows else []


@dataclass(frozen=True)
class MeshDrawing:
    """Devices as squares of `cell` units, row by row, coloured by process; None where a chip has failed."""

    rows: list[list[RunDevice | None]]
    cell: int
    width: int
    height: int
    axes: list[tuple[str, int]]
    broken: str
    processes: list[tuple[int, int]]

    @property
    def is_wide(self) -> bool:
        """It does not fit half the page."""
        return self.width > 400


def _places(facts: RunFacts) -> list[list[RunDevice | None]]:
    """The devices where their chips are: with failed chips those of the mesh lie in one row, in the chips' order."""
    rows: list[list[RunDevice | None]] = [list(row) for row in facts.devices]
    live = [device for row in facts.devices for device in row]
    failed = {tuple(chip) for chip in facts.failed}
    if not failed or len(facts.chips) != 2 or math.prod(facts.chips) != len(live) + len(failed):
        return rows
    device = iter(live)
    height, width = facts.chips
    return [[None if (y, x) in failed else next(device, None) for x in range(width)] for y in range(height)]


def _mesh(facts: RunFacts) -> MeshDrawing | None:
    rows = _places(facts)
    columns = max(map(len, rows), default=0)
    if columns == 0:
        return None
    cell = max(6, min(44, 832 // columns))
    counts = Counter(device.process for row in facts.devices for device in row)
    return MeshDrawing(
        rows=rows,
        cell=cell,
        width=cell * columns,
        height=cell * len(rows),
        axes=list(facts.mesh.items()),
        broken=text.broken_text({"chips": facts.chips, "failed": facts.failed}),
        processes=sorted(counts.items()),
    )
