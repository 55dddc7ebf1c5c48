"""Whether a log keeps to MLPerf's rules: what MLCommons' compliance checker says, and what it does not look at."""

import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

from multipod.errors import MlperfError
from multipod.extras import import_optional
from multipod.mlperf.benchmarks import Benchmark, check_ruleset, find_benchmark
from multipod.mlperf.lines import Line, read_lines

TENSORS = "initialized_tensors"
"""In the official checker's message about the names of initialised tensors."""


@dataclass(frozen=True)
class Verdict:
    """What was found in a log.

    Attributes:
      benchmark: which benchmark the log is of.
      ruleset: under which rules it was read.
      official: the messages of MLCommons' checker; empty where the log complies.
      wrong: what is wrong and that checker does not see.
      notes: what a reader should know: resumed, evaluated at other times than the closed division asks, ...
      closed: what the checker says of the same log as one of the closed division; empty where it would comply.
    """

    benchmark: Benchmark
    ruleset: str
    official: tuple[str, ...]
    wrong: tuple[str, ...]
    notes: tuple[str, ...]
    closed: tuple[str, ...]

    @property
    def is_good(self) -> bool:
        """Whether neither we nor the official checker found anything wrong."""
        return not self.official and not self.wrong


def check(path: Path, ruleset: str = "") -> Verdict:
    """Reads a log under a rule set; under the benchmark's last one if it is empty.

    Raises:
      MlperfError: the log cannot be read, or its benchmark is not known or not in the rule set.
      MissingPackageError: MLCommons' checker is not installed.
    """
    lines = read_lines(path)
    benchmark = find_benchmark(_one(lines, "submission_benchmark", path).value)
    ruleset = check_ruleset(benchmark, ruleset)
    with TemporaryDirectory() as folder:
        closed = Path(folder, "closed.log")
        closed.write_text("".join(_as_closed(line).encode() for line in lines))
        refused = ask_official(closed, ruleset)
    return Verdict(
        benchmark,
        ruleset,
        ask_official(path, ruleset),
        tuple(_wrong(lines, benchmark, ruleset)),
        tuple(_notes(lines, benchmark)),
        refused,
    )


def ask_official(path: Path, ruleset: str) -> tuple[str, ...]:
    """Returns the messages of MLCommons' compliance checker about a log, each on one line.

    Raises:
      MissingPackageError: it is not installed.
    """
    module = official("compliance_checker.mlp_compliance")
    checker = module.make_checker("training", ruleset, quiet=False, werror=False)
    module.enqueued_configs.clear()  # of a log on which it stumbled
    stumbled = []
    with quiet_logging():
        try:
            checker.check_file(str(path), f"training_{ruleset}/common.yaml")
        except OSError as error:  # it has no rules for what the log says, an optimizer for instance
            stumbled = [f"has no rules {Path(error.filename).stem}"]
    messages = [_first_part(text) for text in (*checker.overwritable.values(), *checker.not_overwritable)]
    told = (_tensors(text, path) if TENSORS in text else text for text in messages)
    return (*(text for text in told if not text.startswith("Could not find")), *stumbled)


def _tensors(message: str, path: Path) -> str:
    """Returns in short how the tensors of a log differ from the rules' list, which `message` has whole."""
    wanted = re.findall(r"[\"']([^\"']+)[\"']", message.split("==", 1)[1])
    told = [str(line.metadata.get("tensor")) for line in read_lines(path) if line.key == "weights_initialization"]
    lacking, beside = ([name for name in a if name not in b] for a, b in ((wanted, told), (told, wanted)))
    parts = [f"{what} {_some(names)}" for what, names in (("lacks", lacking), ("has beside", beside)) if names]
    how = " and ".join(parts) or "has some twice"
    return f"the rules list {len(wanted)} initialised tensors, and the log {how}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _first_part(message: str) -> str:
    """Returns a message of the official checker without what it prints of its own state."""
    return " ".join(message.split("\ncurrent ")[0].splitlines())


def official(module: str) -> ModuleType:
    """Returns a module of MLCommons' mlperf_logging.

    Raises:
      MissingPackageError: it is not installed.
    """
    return import_optional("MLCommons' checkers", f"mlperf_logging.{module}")


@contextmanager
def quiet_logging() -> Iterator[list[str]]:
    """Gives a list that what is logged inside, at warning or above, goes to and not to the terminal."""
    messages: list[str] = []
    root = logging.getLogger()
    before, root.handlers[:] = root.handlers[:], [_Collect(messages)]
    try:
        yield messages
    finally:
        root.handlers[:] = before


class _Collect(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage().strip())


def _one(lines: Sequence[Line], key: str, path: Path) -> Line:
    for line in lines:
        if line.key == key:
            return line
    raise MlperfError(f"{path}: no line has {key}: it is no MLPerf log, or was cut short. Train with --log mlperf.")


def _as_closed(line: Line) -> Line:
    return replace(line, value="closed") if line.key == "submission_division" else line


def _numbers(lines: Sequence[Line], key: str) -> list[float]:
    return [line.value for line in lines if line.key == key]


def _wrong(lines: Sequence[Line], benchmark: Benchmark, ruleset: str) -> Iterator[str]:
    """What the official checker lets pass though it is not so."""
    stops = [line for line in lines if line.key == "run_stop"]
    said = stops[-1].metadata.get("status") if stops else "nothing"
    best = [quality for line in lines if line.key == "eval_accuracy" for quality in [_quality(line)]]
    met = any(benchmark.is_met(quality, ruleset) for quality in best)
    targets = ", ".join(f"{name} {benchmark.target(name, ruleset):g}".strip() for name in benchmark.targets)
    if said == "success" and not met:
        yield f"the log says success, and no evaluation is at the target of {ruleset} ({targets})"
    if said != "success" and met:
        yield f"an evaluation is at the target of {ruleset} ({targets}), and the log says {said}"
    if any(before.time_ms > after.time_ms for before, after in _pairs(lines, "run_start", "run_stop")):
        yield "run_stop has an earlier time than run_start"
    if not any(line.metadata.get("samples_count", 0) == 0 for line in lines if line.key == "block_start"):
        yield "the log does not begin with the first example: the run was resumed without one, its time is not whole"


def _pairs(lines: Sequence[Line], begin: str, end: str) -> list[tuple[Line, Line]]:
    return list(zip((a for a in lines if a.key == begin), (b for b in lines if b.key == end), strict=False))


def _quality(line: Line) -> dict[str, float]:
    return line.value if isinstance(line.value, dict) else {"": line.value}


def _notes(lines: Sequence[Line], benchmark: Benchmark) -> Iterator[str]:
    """What is allowed in the open division, or happened to the run."""
    resumed = [line for line in lines if line.key == "multipod_resumed"]
    regrouped = [line for line in lines if line.key == "multipod_regrouped"]
    if resumed:
        yield f"resumed {len(resumed)} times, after updates {', '.join(str(line.value) for line in resumed)}"
    if regrouped:
        yield f"went on {len(regrouped)} times with other processes, after some died or came"
    examples, batches = _numbers(lines, "train_samples"), _numbers(lines, "global_batch_size")
    if benchmark.examples and examples and examples[0] != benchmark.examples:
        yield f"{examples[0]:,} training examples, where the reference has {benchmark.examples:,}: other data"
    if benchmark.due and examples and batches:
        yield from _late(lines, benchmark, batches[0], benchmark.due(int(batches[0]), int(examples[0])))


def _late(lines: Sequence[Line], benchmark: Benchmark, batch: float, due: tuple[float, float]) -> Iterator[str]:
    """Evaluations that are not when the rules have them, to a batch."""
    places = [line.metadata.get("samples_count", 0) for line in lines if line.key == "eval_start"]
    first, every = due
    gaps = [after - before for before, after in pairwise(places)]
    off = [gap for gap in gaps if abs(gap - every) > batch]
    if places and places[0] > first + batch:
        yield f"first evaluated after {places[0]:,} examples; the rules: {benchmark.schedule}, {first:,.0f} at most"
    if off:
        apart = f"{len(off)} of {len(gaps)} evaluations are {off[0]:,} examples or so apart"
        yield f"{apart}; the rules: {benchmark.schedule}"
