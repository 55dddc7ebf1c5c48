"""Numbers and events as words, for the terminal and the report."""

import math
from collections.abc import Mapping
from typing import Any

from multipod.train.events import BadUpdate, Compiled, Ended, Evaluated, Regrouped, SaveFailed, Skipped, Started

UNKNOWN = "–"
"""Stands where nothing was measured."""


KNOWN_BY = {"auc": "AUC", "bleu": "BLEU", "box_AP": "box AP", "mask_AP": "mask AP"}
"""Values of evaluations by which models are compared, and what they are called."""


def start_rows(ended: Ended) -> list[tuple[str, str]]:
    """What the time to the first step went into, as one row; none where it is not known."""
    parts = ", ".join(f"{part} {duration(seconds)}" for part, seconds in ended.start_s.items() if seconds >= 0.05)
    return [("  of these", parts)] if parts else []


def summary_rows(ended: Ended) -> list[tuple[str, str]]:
    """The names and values of the summary, as text."""
    compiling = f" (compiling {duration(ended.compile_s)})" if math.isfinite(ended.compile_s) else ""
    left_out = [("left out", f"{ended.skipped:,} {ended.unit} that cannot be read")] if ended.skipped else []
    return [
        *judged_rows(ended),
        *ended.notes.items(),
        ("updates", f"{ended.update:,}" + (" (interrupted)" if ended.interrupted else "")),
        (f"{ended.unit}/s", rate_text(ended.rate) if ended.rate > 0 else UNKNOWN),
        ("median step time", milliseconds(ended.median_step_s) if ended.median_step_s > 0 else UNKNOWN),
        ("time to first step", duration(ended.first_step_s) + compiling),
        *start_rows(ended),
        ("gradient sum", share_text(ended.gradient_sum_share, "of the step")),
        ("waiting for data", share_text(ended.data_share, "of the time")),
        ("outside the compiled step", share_text(ended.outside_share, "of the time")),
        ("wall time", duration(ended.wall_s)),
        *goodput_rows(ended),
        ("optimizer state per device", bytes_text(ended.optimizer_bytes)),
        *([("not split, per device", unshared_text(ended.unshared))] if ended.unshared else []),
        *left_out,
    ]


def judged_rows(ended: Ended) -> list[tuple[str, str]]:
    """Returns what the last evaluation says of the model by the measures that it is known by, the loss if by none."""
    rows = [(f"test {words}", f"{ended.values[name]:.5g}") for name, words in KNOWN_BY.items() if name in ended.values]
    if ended.accuracy is not None:
        rows.append(("test accuracy", percent(ended.accuracy, 2)))
    if not rows:
        rows.append(("test loss", f"{ended.values['loss']:.4f}" if "loss" in ended.values else UNKNOWN))
    return rows


def unshared_text(found: dict[str, int]) -> str:
    """Such as `1,280 bytes whole, 96 padding`."""
    words = {"whole": "whole", "padding": "padding", "gathered": "gathered for the optimizer in each update"}
    return ", ".join(f"{count:,} bytes {words[name]}" for name, count in found.items())


def goodput_rows(ended: Ended) -> list[tuple[str, str]]:
    """Returns rows such as `goodput: 83.1 % of 4 min 2 s; compile 8.1 s, repeated 2.2 s (12 updates)`."""
    if not ended.run_s > 0:
        return []
    lost = sorted(ended.lost_s.items(), key=lambda item: -item[1])
    parts = [
        f"{cause} {duration(seconds)}" + (f" ({ended.repeated:,} updates)" if cause == "repeated" else "")
        for cause, seconds in lost
        if seconds >= 0.05 or cause == "repeated"
    ]
    rows = [
        ("goodput", f"{percent(ended.goodput)} of {duration(ended.run_s)}" + ("; " if parts else "") + ", ".join(parts))
    ]
    if ended.troubled:
        rows.append(("bad updates", ", ".join(f"{count:,} {action}" for action, count in ended.troubled.items())))
    return rows


def save_failed_text(event: SaveFailed) -> str:
    """Returns a text such as `NOT SAVED after update 40: ...; training goes on, next try after update 41`."""
    then = "trying again" if event.retry == event.update else f"training goes on, next try after update {event.retry:,}"
    return f"NOT SAVED after update {event.update:,}: {event.reason.rstrip('.')}; {then}"


def regrouped_text(event: Regrouped) -> str:
    """Returns a text such as `after update 85, without rank 1: 3 of 4 processes; the state came from peers; ...`."""
    who = [f"without rank {', '.join(event.lost)}"] if event.lost else []
    who += [f"with rank {', '.join(map(str, event.came))}"] if event.came else []
    source = {
        "memory": "all had the state in memory",
        "peers": "the state came from peers",
        "mirror": "what died came from its mirror",
        "checkpoint": "THE STATE CAME FROM A CHECKPOINT",
        "start": "BEGUN ANEW",
    }[event.source]
    again = f", {event.repeated:,} updates done again" if event.repeated else ""
    return (
        f"after update {event.update:,}, {' and '.join(who) or 'all together'}: {event.processes} of {event.seats} "
        f"processes; {source}{again}; {duration(event.seconds)} without an update"
    )


def troubled_text(event: BadUpdate) -> str:
    """Returns a text such as `BAD UPDATE 40: loss spike (loss 81.2, at most 4.1; ...): left out. bad batch: ...`."""
    said = "; ".join(
        f"{name} {number(value)}" + (f", at most {number(limit)}" if math.isfinite(limit) else "")
        for name, value, limit in ((name, value, event.limits[name]) for name, value in event.values.items())
    )
    done = {
        "repeated": "done again",
        "skip": "left out",
        "roll-back": f"back to update {event.back_to:,}",
        "stop": "stopping",
    }[event.action]
    return f"BAD UPDATE {event.update:,}: {event.kind} ({said}): {done}" + (
        f". {event.verdict}" if event.verdict else ""
    )


def skipped_text(event: Skipped) -> str:
    """Returns a text such as `left out: train/n01440764/x.JPEG: it has no bytes`."""
    return f"left out: {event.name}: {event.reason}"


def started_text(event: Started) -> str:
    """Returns a text such as `digits: 480 updates of 64 examples on 8 cpu devices (y=2 x=4)`."""
    facts = event.facts
    text = f"{facts.get('recipe', 'run')}: {event.updates:,} updates of {event.batch:,} {event.unit}"
    mesh = facts.get("mesh")
    if mesh:
        count = math.prod(mesh.values())
        axes = " ".join(f"{axis}={size}" for axis, size in mesh.items()) + broken_text(facts)
        text += f" on {count:,} {facts.get('platform', '')} device{'s' if count != 1 else ''} ({axes})".replace(
            "  ", " "
        )
    return text + (f", from update {event.update:,} on" if event.update else "")


def broken_text(facts: Mapping[str, Any]) -> str:
    """Returns a text such as `: 2x4 without (0, 1)`; empty for a whole mesh."""
    failed = [str(tuple(chip)) for chip in facts.get("failed", ())]
    if not failed:
        return ""
    named = ", ".join(failed[:4]) + (f" and {len(failed) - 4} more" if len(failed) > 4 else "")
    return f": {'x'.join(map(str, facts.get('chips', ())))} without {named}"


def compiled_text(event: Compiled) -> str:
    """Returns a text such as `compiled in 7.9 s`."""
    return f"compiled in {duration(event.seconds)}"


def evaluated_text(event: Evaluated) -> str:
    """Returns a text such as `test accuracy 98.61 % (355/360)  loss 0.0712`; counts where the sum is a whole number."""
    texts = []
    whole = [(name, value) for name, value in event.values.items() if "/" not in name]
    for name, value in sorted(whole, key=lambda item: item[0] != "accuracy"):
        text = value_text(name, value)
        if name == "accuracy" and float(event.sums.get(name, math.nan)).is_integer():
            text += f" ({event.sums[name]:.0f}/{event.count})"
        texts.append(text)
    return "test " + "  ".join(texts)


def ended_text(event: Ended, updates: int, start: int = 0) -> str:
    """Returns a text such as `done: 480 updates in 21 s`; the command line adds the command that goes on.

    Args:
      event: the end.
      updates: of the whole run.
      start: updates that were done before this process began.
    """
    done = f"{event.update:,} of {updates:,} updates" if event.interrupted else f"{event.update:,} updates"
    last = f", the last {event.update - start:,}" if start else ""
    return f"{'stopped' if event.interrupted else 'done'}: {done}{last} in {duration(event.wall_s)}"


def value_text(name: str, value: float) -> str:
    """A named mean; `accuracy` in percent."""
    return f"accuracy {percent(value, 2)}" if name == "accuracy" else f"{name} {number(value)}"


def number(value: float) -> str:
    """Three or four significant digits, with an exponent only for the very small and the very large."""
    if 1e-4 <= abs(value) < 1e5:
        return f"{value:.{max(0, 3 - max(-1, math.floor(math.log10(abs(value)))))}f}"
    return f"{value:.4g}"


def percent(share: float, digits: int = 1) -> str:
    """Returns a text such as `98.61 %`; `UNKNOWN` for NaN."""
    return f"{100 * share:.{digits}f} %" if math.isfinite(share) else UNKNOWN


def share_text(share: float, of: str) -> str:
    """Returns a text such as `11.4 % of the step`; `UNKNOWN` for NaN."""
    return f"{percent(share)} {of}" if math.isfinite(share) else UNKNOWN


def rate_text(per_s: float) -> str:
    """Whole numbers with thousands apart; one digit more below 100."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.3g}"


def milliseconds(seconds: float) -> str:
    """Three significant digits, up to whole milliseconds."""
    value = 1000 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms" if value >= 10 else f"{value:.2f} ms"


def duration(seconds: float) -> str:
    """Returns a text such as `7.9 s`, `48 s`, `3 min 20 s`, `2 h 5 min`, `3 d 4 h`; `UNKNOWN` for NaN."""
    if not math.isfinite(seconds):
        return UNKNOWN
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    minutes, rest_s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest_s, "s")]
    first = next(place for place, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


def bytes_text(count: int) -> str:
    """Returns a text such as `606 KiB`: three significant digits."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1023.5 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{value:.0f} {units[0]}" if value >= 100 or units[0] == "B" else f"{value:.3g} {units[0]}"
