"""Observers: what reaches files and terminal is complete, true, and survives crashes and full disks."""

import errno
import io
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from processes import files_no_larger_than
from rich.console import Console

from multipod.errors import RunFolderError
from multipod.recipes.digits import digits
from multipod.train.events import Compiled, Ended, Evaluated, Event, Saved, Started, Updated
from multipod.train.observers import charts, jsonl, tensorboard, text
from multipod.train.observers.csv import CsvTable
from multipod.train.observers.jsonl import JsonLines, decode, keep_until, read, replace_file
from multipod.train.observers.progress import Bar, PlainLines
from multipod.train.observers.report import write
from multipod.train.observers.summary import Summary, summary_table
from multipod.train.observers.table import FILES, OBSERVERS, PRINTED, ObservedRun, as_observer, make_observers
from multipod.train.observers.tensorboard import TensorBoard
from multipod.train.observers.trackers.table import TRACKERS
from multipod.train.run_folder import RunFolder

needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")

FACTS: dict[str, Any] = {
    "format": "multipod-run-1",
    "recipe": "digits",
    "overrides": ["optimizer.rate=0.2"],
    "command": "multipod train digits --set optimizer.rate=0.2",
    "started": "2026-11-21T02:00:00Z",
    "mesh": {"y": 2, "x": 4},
    "devices": [[{"id": 4 * y + x, "process": y, "kind": "cpu"} for x in range(4)] for y in range(2)],
    "processes": 2,
    "platform": "cpu",
    "host": "here",
    "cores": 2,
    "versions": {"multipod": "0.1.0", "jax": "0.10.2"},
    "parameters": 77562,
    "bytes_per_device": {"parameters": 310248, "optimizer": 620500, "statistics": 1792},
    "gradient_sum": "xla",
    "shard_update": False,
}
ENDED = Ended(4, False, 355 / 360, 5203.0, 0.0123, 9.8, 7.9, 0.114, 0.031, 0.02, 21.3, 620500)


def started(update: int = 0, updates: int = 4) -> Started:
    return Started("runs/digits-001", update, updates, 64, FACTS)


def updated(update: int, loss: float = 0.5, accuracy: float = 0.75, step_s: float = 0.01) -> Updated:
    return Updated(update, {"loss": loss, "accuracy": accuracy}, step_s, step_s / 10, 64 / step_s)


def evaluated(update: int) -> Evaluated:
    return Evaluated(update, {"loss": 0.0712, "accuracy": 355 / 360}, {"loss": 25.6, "accuracy": 355.0}, 360, 0.2)


WHOLE: list[Event] = [
    *(started(), Compiled(7.9)),
    *(updated(1), updated(2), evaluated(2), Saved(2, 0.1)),
    *(updated(3), updated(4), evaluated(4)),
    ENDED,
]


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def tell(observer: Any, events: list[Event]) -> None:
    for event in events:
        observer(event)
    observer.close()


# JSON lines.


def test_every_event_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tell(JsonLines(path), WHOLE)
    assert [record["event"] for record in read(path)][:3] == ["started", "compiled", "updated"]
    assert [decode(record) for record in read(path)] == WHOLE


def test_numbers_that_json_lacks_are_null_and_come_back_as_nan(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    event = Updated(1, {"loss": math.nan, "norm": math.inf}, 0.1, -math.inf, 1.0)
    tell(JsonLines(path), [event, replace(ENDED, accuracy=None)])
    line, last = path.read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail)["values"] == {"loss": None, "norm": None}
    back = decode(json.loads(line))
    assert isinstance(back, Updated)
    assert all(map(math.isnan, [*back.values.values(), back.data_s]))
    assert decode(json.loads(last)) == replace(ENDED, accuracy=None)


def test_a_kind_of_event_from_the_future_is_passed_over() -> None:
    assert decode({"event": "moved", "update": 3}) is None


def test_lines_reach_the_file_each_second_and_at_what_matters(tmp_path: Path) -> None:
    path, clock = tmp_path / "metrics.jsonl", Clock()
    lines = JsonLines(path, clock)
    lines(updated(1))
    assert path.read_bytes() == b""
    clock.now = 1.0
    lines(updated(2))
    assert len(read(path)) == 2
    for number, event in enumerate([Saved(2, 0.1), evaluated(2), ENDED], start=3):
        lines(event)
        assert len(read(path)) == number
    lines.close()
    lines.close()


def test_a_line_cut_short_is_left_out_and_the_next_starts_on_its_own(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = jsonl.encode(updated(1))
    for cut in (1, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole + jsonl.encode(updated(2))[:cut])
        assert len(read(path)) == 1
        tell(JsonLines(path), [updated(3)])
        assert [record["update"] for record in read(path)] == [1, 3]


def test_a_cut_line_longer_than_a_block_is_removed_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(jsonl.encode(updated(1)) + b"x" * 200_000)
    JsonLines(path).close()
    assert path.read_bytes() == jsonl.encode(updated(1))
    path.write_bytes(b"x" * 200_000)
    JsonLines(path).close()
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    "line",
    [
        b"{nonsense\n",
        b"[1]\n",
        b'{"update": 1}\n',
        b'{"event": "updated", "update": "x"}\n',
        b"\xff\n",
        b"\n",
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(jsonl.encode(updated(1)) + line + jsonl.encode(updated(2)))
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl, line 2: not an event: .* remove this line"):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no\.jsonl: cannot be read \(No such file or directory\)\. Name the"):
        read(tmp_path / "no.jsonl")


def test_going_on_keeps_what_was_before_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tell(JsonLines(path), WHOLE)
    with open(path, "ab") as file:
        file.write(b'{"event": "upd')
    keep_until(path, 2)
    assert [decode(record) for record in read(path)] == WHOLE[:6]
    assert path.read_bytes().endswith(b"}\n")
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    keep_until(tmp_path / "missing.jsonl", 2)
    assert not (tmp_path / "missing.jsonl").exists()


@given(st.lists(st.integers(1, 9)), st.integers(0, 9), st.integers(0, 9))
def test_keeping_twice_is_keeping_the_less(tmp_path_factory: Any, numbers: list[int], first: int, second: int) -> None:
    path = tmp_path_factory.mktemp("law") / "metrics.jsonl"
    path.write_bytes(b"".join(jsonl.encode(updated(number)) for number in numbers))
    keep_until(path, first)
    keep_until(path, second)
    assert [record["update"] for record in read(path)] == [n for n in numbers if n <= min(first, second)]


def test_a_move_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(jsonl.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


@needs_full_disk
def test_a_disk_that_stays_full_is_an_error_at_the_end() -> None:
    lines = JsonLines(Path("/dev/full"))
    lines(updated(1))
    lines(evaluated(1))  # flushes in vain, and waits
    with pytest.raises(OSError, match="No space left") as caught:
        lines.close()
    assert caught.value.errno == errno.ENOSPC
    lines.close()


def test_lines_wait_for_a_disk_that_is_full_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    lines(evaluated(1))
    with files_no_larger_than(path.stat().st_size + 10):  # room for the beginning of a line
        lines(evaluated(2))
        assert len(read(path)) == 1
    lines(evaluated(3))
    lines.close()
    assert [record["update"] for record in read(path)] == [1, 2, 3]


# TensorBoard.


Scalars = Callable[[Path, str], list[tuple[int, float]]]


@pytest.fixture
def scalars() -> Scalars:
    """What TensorBoard itself reads: the steps and values of a tag."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

    def read_tag(folder: Path, tag: str) -> list[tuple[int, float]]:
        accumulator = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
        accumulator.Reload()
        return [(event.step, event.value) for event in accumulator.Scalars(tag)]

    return read_tag


def test_tensorboard_reads_what_we_write(tmp_path: Path, scalars: Scalars) -> None:
    tell(TensorBoard(tmp_path / "board"), [*WHOLE[:-1], updated(5, loss=math.nan), ENDED])
    read_back = partial(scalars, tmp_path / "board")
    assert [step for step, _ in read_back("train/loss")] == [1, 2, 3, 4, 5]
    assert math.isnan(read_back("train/loss")[-1][1])
    assert read_back("test/accuracy") == [(2, pytest.approx(355 / 360)), (4, pytest.approx(355 / 360))]
    assert read_back("time/step_s")[0] == (1, pytest.approx(0.01))
    assert read_back("time/data_s")[0] == (1, pytest.approx(0.001))
    assert read_back("rate/examples_per_s")[0] == (1, pytest.approx(6400))
    assert read_back("time/save_s") == [(2, pytest.approx(0.1))]


def test_going_on_hides_later_updates_from_tensorboard(tmp_path: Path, scalars: Scalars) -> None:
    tell(TensorBoard(tmp_path), [started(), *(updated(n, loss=1.0) for n in range(1, 5))])
    tell(TensorBoard(tmp_path), [started(2), updated(3, loss=2.0)])
    assert scalars(tmp_path, "train/loss") == [(1, 1.0), (2, 1.0), (3, 2.0)]
    assert len(list(tmp_path.iterdir())) == 2


def test_tensorboard_can_be_closed_twice_and_is_on_disk_at_evaluations(tmp_path: Path, scalars: Scalars) -> None:
    board = TensorBoard(tmp_path, Clock())
    board(updated(1))
    board(evaluated(1))
    assert scalars(tmp_path, "test/loss") == [(1, pytest.approx(0.0712))]
    board.close()
    board.close()


@needs_full_disk
def test_tensorboard_goes_on_in_another_file_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scalars: Scalars
) -> None:
    real, clock = tensorboard.RecordWriter, Clock()
    monkeypatch.setattr(tensorboard, "RecordWriter", lambda path: real("/dev/full"))
    board = TensorBoard(tmp_path, clock)
    for number in range(1, 5):
        board(updated(number))
    board(evaluated(4))  # is lost
    monkeypatch.setattr(tensorboard, "RecordWriter", real)
    clock.now = 11.0
    board(updated(5))  # too late for this one: it opens the file
    board(evaluated(6))
    board.close()
    assert scalars(tmp_path, "test/loss") == [(6, pytest.approx(0.0712))]


# The terminal.


def plain(events: list[tuple[float, Event]]) -> list[str]:
    stream, clock = io.StringIO(), Clock()
    lines = PlainLines(stream, clock=clock)
    for now, event in events:
        clock.now = now
        lines(event)
    lines.close()
    return stream.getvalue().splitlines()


def test_a_table_of_text_loses_what_is_done_again(tmp_path):
    path = tmp_path / "metrics.csv"
    for first, last in ((0, 3), (2, 4)):
        table = CsvTable(path)
        table(started(first))
        for update in range(first + 1, last + 1):
            table(updated(update, loss=update / 8))
        table(evaluated(last))
        table.close()
        with path.open("a") as file:
            file.write("4,train,lo")  # a process that was killed while it wrote
    lines = [line.split(",") for line in path.read_text().splitlines()]
    assert lines[0] == ["update", "kind", "name", "value"]
    losses = [
        (int(update), float(value)) for update, kind, name, value in lines[1:-1] if (kind, name) == ("train", "loss")
    ]
    assert losses == [(1, 0.125), (2, 0.25), (3, 0.375), (4, 0.5)]
    assert [line[0] for line in lines if line[1:3] == ["test", "accuracy"]] == ["4"]


def test_plain_lines_tell_the_run() -> None:
    events = [(0.0, started(updates=100)), (1.0, Compiled(7.9))]
    events += [(1.0 + n, updated(n, loss=float(n))) for n in range(1, 11)]
    events += [(12.0, evaluated(10)), (13.0, replace(ENDED, update=100))]
    assert plain(events) == [
        "digits: 100 updates of 64 examples on 8 cpu devices (y=2 x=4); compiling",
        "compiled in 7.9 s",
        "  4/100  training loss 2.500  accuracy 75.00 %  6,400 examples/s  data wait 10 %  1 min 36 s left",
        "  9/100  training loss 7.000  accuracy 75.00 %  6,400 examples/s  data wait 10 %  1 min 31 s left",
        " 10/100  test accuracy 98.61 % (355/360)  loss 0.0712",
        " 10/100  training loss 10.00  accuracy 75.00 %  6,400 examples/s  data wait 10 %",
        "done: 100 updates in 21 s",
    ]


def test_the_first_update_of_a_process_counts_in_values_and_not_in_times() -> None:
    slow = updated(3, step_s=100.0)
    lines = plain([(0, started(2)), (101, slow), (107, updated(4)), (107, replace(ENDED, interrupted=True))])
    assert lines[0].endswith("(y=2 x=4), from update 2 on; compiling")
    assert lines[1] == "3/4  training loss 0.5000  accuracy 75.00 %"
    assert lines[2] == "4/4  training loss 0.5000  accuracy 75.00 %  6,400 examples/s  data wait 10 %  0.0 s left"
    assert lines[3] == "stopped: 4 of 4 updates, the last 2 in 21 s"


def test_the_loss_comes_first() -> None:
    backwards = Updated(1, {"accuracy": 0.5, "loss": 1.0}, 0.1, 0.0, 640.0)
    assert plain([(0, started()), (9, backwards)])[1] == "1/4  training loss 1.000  accuracy 50.00 %"


def test_rates_are_total_examples_over_total_time() -> None:
    events = [(0, started()), (0, updated(1)), (0, updated(2, step_s=0.01)), (9, updated(3, step_s=0.03))]
    assert "3,200 examples/s" in plain(events)[1]


def test_the_bar_shows_compiling_values_and_evaluations() -> None:
    out, clock = io.StringIO(), Clock()
    bar = Bar(Console(file=out, force_terminal=True, width=80, color_system=None), clock)
    for event in WHOLE:
        clock.now += 1
        bar(event)
    bar.close()
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue())
    for part in (
        "digits: 4 updates of 64 examples on 8 cpu devices (y=2 x=4)",
        "compiling",
        "compiled in 7.9 s",
        "loss 0.5000  accuracy 75.00 %  6,400 examples/s  10.0 ms/step  data wait 10 %",
        "2  test accuracy 98.61 % (355/360)  loss 0.0712",
        "4/4",
        "done: 4 updates in 21 s",
    ):
        assert part in shown
    assert all(len(line) <= 80 for line in re.split(r"[\r\n]", shown))
    assert out.getvalue().count("\x1b[?25l") == out.getvalue().count("\x1b[?25h") == 1  # the cursor is back


def test_a_bar_that_never_started_closes() -> None:
    Bar(Console(file=io.StringIO())).close()


def rendered(ended: Ended) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(summary_table(ended))
    return [re.sub("  +", "  ", line).strip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("name", [name for name in OBSERVERS if name not in TRACKERS])  # those: test_trackers.py
def test_every_observer_of_the_table_takes_a_run_and_closes_twice(name, tmp_path):
    run = ObservedRun(RunFolder(tmp_path), Console(file=io.StringIO(), width=80), digits())
    (observer,) = make_observers(run, [name, name])
    for event in (started(), Compiled(0.1), updated(1), evaluated(1), Saved(1, 0.1), replace(ENDED, resume="again")):
        observer(event)
    observer.close()
    observer.close()
    assert as_observer(observer) is observer


def test_a_run_has_files_and_what_is_printed_and_a_slip_is_told():
    assert set(FILES) | set(PRINTED) <= set(OBSERVERS)
    with pytest.raises(
        RunFolderError, match=r"--log tensorbord: there is no such logger. Did you mean tensorboard\? Known: json"
    ):
        make_observers(ObservedRun(RunFolder(Path("nowhere")), Console()), ["tensorbord"])


def test_the_summary_says_once_how_to_go_on():
    out = io.StringIO()
    summary = Summary(Console(file=out, width=80), Path("runs/a"))
    summary(replace(ENDED, resume="multipod train --resume runs/a"))
    assert out.getvalue() == ""
    summary.close()
    summary.close()
    assert out.getvalue().count("Go on with:\n  multipod train --resume runs/a\n") == 1


def said_at_the_end(folder: Path, recipe: str, losses: list[float], accuracy: float) -> str:
    """What the summary of a complete run with these losses prints below its table."""
    (folder / "recipe.toml").write_text(recipe)
    out = io.StringIO()
    summary = Summary(Console(file=out, width=80), folder)
    events = [updated(number, loss=loss) for number, loss in enumerate(losses, 1)]
    tell(summary, [started(), *events, Evaluated(len(losses), {"accuracy": accuracy}, {}, 360, 0.2), ENDED])
    return out.getvalue().partition("KiB")[2]


CLASSIFIES = '[objective]\nkind = "multipod.metrics.objective:Classification"\n'
TEN_CLASSES = f"{CLASSIFIES}[model]\nclasses = 10\n[optimizer.rate]\nshare = 0.2\n[optimizer.rate.then]\npeak = 0.2\n"


def test_a_complete_run_ends_with_the_next_steps(tmp_path):
    said = said_at_the_end(tmp_path, TEN_CLASSES, [2.3 - 0.1 * number for number in range(12)], 0.97)
    assert [line.strip() for line in said.strip().splitlines()] == [
        "Next:",
        f"open {tmp_path}/report.html in a browser",
        f"multipod eval {tmp_path}",
        f"multipod export {tmp_path} -o model.tflite",
    ]


def test_what_export_refuses_is_not_suggested(tmp_path):
    said = said_at_the_end(tmp_path, "[optimizer]\nrate = 0.1\n", [2.3 - 0.1 * number for number in range(12)], 0.97)
    assert "multipod eval" in said
    assert "multipod export" not in said


def test_a_run_that_learned_nothing_is_told_so_with_the_likely_cause(tmp_path):
    guessed = said_at_the_end(tmp_path, TEN_CLASSES, [2.3, 9.0, *[2.4] * 10], 0.1)
    assert (
        "NOTHING LEARNED: test accuracy 10.00 % is that of guessing among 10 classes and the loss ended at 2.400, and "
        "its first was 2.300.\n  The loss rose to 9.000 on the way, so the rate is likely too high (it peaks at 0.2). "
        "Try --set optimizer.rate=0.02." in guessed
    )
    flat = said_at_the_end(tmp_path, "[optimizer]\nrate = 1.0\n", [2.3] * 12, 0.1)
    assert "NOTHING LEARNED: the loss ended at 2.300, and its first was 2.300.\n  Likely causes: a rate" in flat
    assert "NOTHING" not in said_at_the_end(tmp_path, TEN_CLASSES, [2.3] * 9, 0.1)  # too short to say


def test_a_function_is_an_observer_that_has_nothing_to_close():
    events: list[Event] = []
    observer = as_observer(events.append)
    observer(Compiled(1.0))
    observer.close()
    assert events == [Compiled(1.0)]


def test_the_summary_table_reads_well_without_colour() -> None:
    assert rendered(ENDED) == [
        "test accuracy  98.61 %",
        "updates  4",
        "examples/s  5,203",
        "median step time  12.3 ms",
        "time to first step  9.8 s (compiling 7.9 s)",
        "gradient sum  11.4 % of the step",
        "waiting for data  3.1 % of the time",
        "outside the compiled step  2.0 % of the time",
        "wall time  21 s",
        "optimizer state per device  606 KiB",
    ]


def test_the_summary_says_what_a_model_is_known_by() -> None:
    detector = replace(ENDED, accuracy=None, values={"box_AP": 0.75882, "mask_AP": 0.744, "loss": 0.68})
    assert text.judged_rows(detector) == [("test box AP", "0.75882"), ("test mask AP", "0.744")]
    assert text.judged_rows(replace(detector, values={"loss": 0.68})) == [("test loss", "0.6800")]


def test_the_summary_table_does_not_invent() -> None:
    lines = rendered(replace(ENDED, accuracy=None, rate=0.0, median_step_s=0.0, data_share=math.nan, interrupted=True))
    assert {"test loss  –", "examples/s  –", "median step time  –", "waiting for data  –"} < set(lines)
    assert "updates  4 (interrupted)" in lines


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (59.6, "1 min"), (200, "3 min 20 s"),
        (3600, "1 h"), (7505, "2 h 5 min"), (86399.7, "1 d"), (273600, "3 d 4 h"), (math.nan, "–"),
    ],
)  # fmt: skip
def test_durations(seconds: float, words: str) -> None:
    assert text.duration(seconds) == words


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1024, "1 KiB"),
        (1792, "1.75 KiB"),
        (620500, "606 KiB"),
        (3 * 2**40, "3 TiB"),
    ],
)
def test_bytes(count: int, words: str) -> None:
    assert text.bytes_text(count) == words


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (2.3456, "2.346"),
        (0.07123, "0.0712"),
        (123.456, "123.5"),
        (0.0, "0"),
        (1e-7, "1e-07"),
        (math.nan, "nan"),
    ],
)
def test_numbers(value: float, words: str) -> None:
    assert text.number(value) == words


# The report.


def run_folder(path: Path, events: list[Event], **changes: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "recipe.toml").write_text('name = "digits"\n')
    (path / "run.json").write_text(json.dumps(FACTS | changes))
    (path / "metrics.jsonl").unlink(missing_ok=True)
    tell(JsonLines(path / "metrics.jsonl"), events)
    return path


def page(folder: Path) -> str:
    return write(folder).read_text()


STATES: dict[str, list[Event]] = {
    "whole": WHOLE,
    "nothing yet": [],
    "started": WHOLE[:1],
    "one update": WHOLE[:3],
    "no evaluation": [*WHOLE[:4], updated(3)],
    "evaluation alone": [started(4), evaluated(4)],
    "diverged": [started(), *(updated(n, loss=math.nan) for n in range(1, 5))],
    "no time passes": [started(), *(Updated(n, {"loss": 0.0}, 0.0, 0.0, math.inf) for n in range(1, 5))],
    "unknown times": [
        started(),
        *(Updated(n, {"loss": 1.0}, math.nan, math.nan, math.nan) for n in range(1, 5)),
    ],
    "stopped": [
        *WHOLE[:5],
        replace(ENDED, interrupted=True, update=2, resume="multipod train --resume 'a b'"),
    ],
    "resumed": [*WHOLE[:8], started(2), Compiled(0.5), updated(3, loss=9.0), updated(4), evaluated(4), ENDED],
    "three values": [
        started(),
        Updated(1, {"loss": 1.0, "accuracy": 0.5, "$x_\\1<b>": 2.0}, 0.1, 0.0, 640.0),
    ],
    "long": [started(updates=500), *(updated(n, loss=1 / n) for n in range(1, 501))],
}


@pytest.mark.parametrize("state", STATES)
def test_a_page_of_a_run_in_any_state_needs_nothing_from_outside(tmp_path: Path, state: str) -> None:
    html = page(run_folder(tmp_path / "run", STATES[state]))
    assert html.startswith("<!doctype html>")
    assert not re.search(r"https?://|//\w+\.|<script|<link|<img|@import|src=|url\((?!#)|&lt;svg", html)
    assert set(re.findall(r'href="([^#])', html)) == set()
    ids = re.findall(r'\bid="([^"]*)"', html)
    assert set(re.findall(r'(?:url\(|href=")#([^)"]*)', html)) <= set(ids)
    assert len(ids) == len(set(ids))
    assert "nan" not in re.sub(r"<svg.*?</svg>", "", html, flags=re.DOTALL).split("</style>")[1].split()


def test_the_page_says_what_came_out(tmp_path: Path) -> None:
    html = page(run_folder(tmp_path / "run", WHOLE))
    for part in (
        "<title>digits · run</title>",
        "Test accuracy 98.61 % (355/360), loss 0.0712 after 4 of 4 updates.",
        "355 of 360 right",
        ">complete</span>",
        "<code>multipod train digits --set optimizer.rate=0.2</code>",
        "process 1: 4 devices",
        "y runs down, x across",
        "2026-11-21 02:00:00 UTC",
        "<td>606 KiB</td>",
        "name = &#34;digits&#34;",
    ):
        assert part in html
    assert "Go on with this run" not in html


def test_the_page_tells_how_to_go_on(tmp_path: Path) -> None:
    html = page(run_folder(tmp_path / "run", STATES["stopped"]))
    assert "It was asked to stop and saved its state after update 2." in html
    assert "<pre>multipod train --resume &#39;a b&#39;</pre>" in html
    html = page(run_folder(tmp_path / "run", STATES["no evaluation"]))
    assert "it was running still, or had been killed" in html
    assert "<pre>multipod train --resume runs/digits-001</pre>" in html
    assert "3 of 4 updates; not evaluated yet." in html


def test_what_was_done_again_counts_once(tmp_path: Path) -> None:
    html = page(run_folder(tmp_path / "run", STATES["resumed"]))
    assert "the run went on from the checkpoint of update 2" in html
    assert ">complete</span>" in html


def test_a_loss_that_was_not_finite_is_named(tmp_path: Path) -> None:
    assert "not finite at 4 updates, first at update 1" in page(run_folder(tmp_path / "run", STATES["diverged"]))


def test_values_in_parts_share_a_heat_map_and_stay_out_of_lines(tmp_path: Path) -> None:
    loads = {f"load/encoder/1/{expert}": expert / 10 for expert in range(5)}
    events: list[Event] = [started()]
    for update in range(1, 5):
        event = updated(update)
        events.append(replace(event, values=event.values | loads))
    text = page(run_folder(tmp_path / "run", events))
    assert "from 0 (clear) to 0.4" in text
    assert "encoder/1/4" in text
    assert text.count("over updates") == 4  # loss, accuracy, load, step time
    assert not any("load" in line for line in plain([(float(i), event) for i, event in enumerate(events)]))
    tasks = {"exact_match/first": 0.25, "exact_match/second": 0.5}
    text = page(run_folder(tmp_path / "tasks", [*events, Evaluated(4, tasks, {}, 8, 0.1)]))
    assert text.count("over updates") == 6  # no updates have the tasks' values: each is a chart


def test_text_from_the_run_cannot_become_markup(tmp_path: Path) -> None:
    bad = "<script>alert('1')</script>"
    devices = [[{"id": 0, "process": 0, "kind": bad}]]
    changes = {"recipe": bad, "command": bad, "overrides": [bad], "versions": {bad: bad}, "mesh": {bad: 1}}
    events: list[Event] = [Started(bad, 0, 1, 1), Updated(1, {bad: 1.0}, 0.1, 0.0, 1.0)]
    events.append(Evaluated(1, {bad: 1.0}, {}, 1, 0.1))
    folder = run_folder(tmp_path / "run", events, devices=devices, **changes)
    (folder / "recipe.toml").write_text(bad)
    html = page(folder)
    assert "<script" not in html
    assert "<h1>&lt;script&gt;" in html


def test_the_same_folder_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", STATES["long"])
    assert page(folder) == page(folder)
    assert sorted(file.name for file in folder.iterdir()) == [
        "metrics.jsonl",
        "recipe.toml",
        "report.html",
        "run.json",
    ]


def test_a_page_with_gaps_beats_no_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", WHOLE)
    (folder / "run.json").write_text('{"format": "multipod-run-1", "recipe": "digits", "from the future": 1}')
    assert "Test accuracy 98.61 %" in page(folder)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "recipe.toml",
            None,
            r"recipe\.toml: cannot be read \(No such file or directory\)\. Every run folder has",
        ),
        ("recipe.toml", b"\xff", r"recipe\.toml: cannot be read \(it is not UTF-8 text\)"),
        ("run.json", None, r"run\.json: cannot be read"),
        ("run.json", b"{", r"run\.json: not the facts of a run \(.*\)\. Copy the file again"),
        (
            "run.json",
            b'{"format": "multipod-run-1", "recipe": 1}',
            r"Expected `str`, got `int` - at `\$\.recipe`",
        ),
        (
            "run.json",
            b'{"format": "multipod-run-9", "recipe": ""}',
            r"its format is 'multipod-run-9', and this version",
        ),
        ("metrics.jsonl", None, r"metrics\.jsonl: cannot be read"),
        (
            "metrics.jsonl",
            b'{"event": "saved", "update": 1}\n',
            r"line 1: not an event of this version \(.*seconds",
        ),
    ],
)
def test_a_missing_or_broken_file_is_named(tmp_path: Path, file: str, content: bytes | None, message: str) -> None:
    folder = run_folder(tmp_path / "run", WHOLE)
    (folder / file).unlink()
    if content is not None:
        (folder / file).write_bytes(content)
    with pytest.raises(RunFolderError, match=message):
        write(folder)
    assert not (folder / "report.html").exists()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"none: there is no such run folder\. Name a folder"):
        write(tmp_path / "none")


@pytest.mark.parametrize("count", [1, 1999, 2000, 2001, 5000, 100_000])
def test_thinned_curves_keep_their_ends_and_extremes(count: int) -> None:
    y = np.random.default_rng(0).normal(size=count)
    y[count // 3], y[count // 2] = 1e6, -1e6
    y[count // 4 : count // 4 + 200 : 2] = np.nan
    x, kept = charts.thinned(np.arange(count), y)
    assert len(x) <= charts.POINTS
    assert np.all(np.diff(x) > 0)
    assert (x[0], x[-1]) == (0, count - 1)
    if count > 1:
        assert (np.nanmin(kept), np.nanmax(kept)) == (np.nanmin(y), np.nanmax(y))
