"""A result as MLCommons' package checker takes it: logs, a description of the system, how to run it again."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multipod.errors import MlperfError
from multipod.mlperf.benchmarks import Benchmark, check_ruleset, find_benchmark
from multipod.mlperf.check import official, quiet_logging
from multipod.mlperf.lines import Line, read_lines

STATUS = {
    "onprem": "Available on-premise",
    "cloud": "Available cloud",
    "research": "Research, Development, or Internal (RDI)",
    "preview": "Preview",
}
"""The words of a system's description for `submission_status`."""


@dataclass(frozen=True)
class Submission:
    """Who hands in what, in the log's words.

    Attributes:
      org: the organisation.
      system: the system's name, which names files, too.
      division: open or closed.
      status: one of `STATUS`.
    """

    org: str
    system: str
    division: str = "open"
    status: str = "research"

    def __post_init__(self) -> None:
        wrong = []
        if self.division not in ("open", "closed"):
            wrong.append(f"division {self.division!r} (open or closed)")
        if self.status not in STATUS:
            wrong.append(f"status {self.status!r} ({', '.join(STATUS)})")
        if "/" in self.system or not self.system:
            wrong.append(f"system {self.system!r} (a name of files)")
        if wrong:
            raise MlperfError(f"mlperf: {'; '.join(wrong)}. Say it otherwise.")

    def fill_in(self, line: Line) -> Line:
        """Returns a line of a run's log with what the run could not know."""
        known = {
            "submission_org": self.org,
            "submission_platform": self.system,
            "submission_division": self.division,
            "submission_status": self.status,
        }
        return replace(line, value=known[line.key]) if line.key in known else line


@dataclass(frozen=True)
class Run:
    """One run to hand in.

    Attributes:
      log: its MLPerf log.
      recipe: its recipe as text.
      facts: what `run.json` says of it.
    """

    log: Path
    recipe: str
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Package:
    """What was made.

    Attributes:
      folder: where it lies.
      benchmark: of which benchmark.
      minutes: from run_start to run_stop of each run, none where it was aborted.
      score: their Olympic mean, minutes; None where the rules give none.
      blanks: fields of the system's description that nobody filled in.
      missing: what a complete result still lacks.
      refused: what MLCommons' checkers say against it.
    """

    folder: Path
    benchmark: Benchmark
    minutes: tuple[float | None, ...]
    score: float | None
    blanks: tuple[str, ...]
    missing: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


def pack(runs: Sequence[Run], submission: Submission, folder: Path, ruleset: str = "") -> Package:
    """Writes a package of runs of one benchmark to a new folder, and has MLCommons' checkers look at it.

    Raises:
      MlperfError: no runs, runs of several benchmarks, a log that cannot be read, or a folder that is there already.
      MissingPackageError: MLCommons' checkers are not installed.
      OSError: the folder cannot be written; what was begun stays.
    """
    logs = [read_lines(run.log) for run in runs]
    names = {line.value for log in logs for line in log if line.key == "submission_benchmark"}
    if len(names) != 1:
        raise MlperfError(f"a package holds runs of one benchmark; these are of {', '.join(sorted(names)) or 'none'}.")
    benchmark = find_benchmark(names.pop())
    ruleset = check_ruleset(benchmark, ruleset)
    if folder.exists():
        raise MlperfError(f"{folder} is there already. Name another folder with --out.")
    official("package_checker.package_checker")
    results = folder / "results" / submission.system / benchmark.name
    results.mkdir(parents=True)
    for number, log in enumerate(logs):
        text = "".join(submission.fill_in(line).encode() for line in log)
        (results / f"result_{number}.txt").write_text(text)
    system = describe_system(runs[0].facts, submission)
    (folder / "systems").mkdir()
    (folder / "systems" / f"{submission.system}.json").write_text(json.dumps(system, indent=1) + "\n")
    _write_implementation(folder / "benchmarks" / benchmark.name / "implementations" / "multipod", runs)
    minutes = tuple(map(minutes_of, logs))
    return Package(
        folder,
        benchmark,
        minutes,
        olympic_mean(minutes),
        tuple(name for name, value in system.items() if value == ""),
        tuple(_missing(benchmark, minutes)),
        _ask_official(folder, ruleset),
    )


def minutes_of(log: Sequence[Line]) -> float | None:
    """Returns the minutes from run_start to run_stop; None for a run that did not reach its target."""
    times = {line.key: line for line in log if line.key in ("run_start", "run_stop")}
    if len(times) < 2 or times["run_stop"].metadata.get("status") != "success":
        return None
    return (times["run_stop"].time_ms - times["run_start"].time_ms) / 60e3


def olympic_mean(minutes: Sequence[float | None]) -> float | None:
    """Returns the mean without the fastest and the slowest of at least three runs; one that failed is the slowest.

    None where fewer than three are given, or more than one failed.
    """
    good = sorted(minute for minute in minutes if minute is not None)
    if len(minutes) < 3 or len(good) < len(minutes) - 1:
        return None
    return statistics.mean(good[1:] if len(good) < len(minutes) else good[1:-1])


def describe_system(facts: Mapping[str, Any], submission: Submission) -> dict[str, str]:
    """Returns the system's description from what a run noted of its machine; what it did not is an empty text."""
    rows = [device for row in facts.get("devices", []) for device in row]
    processes = max(1, int(facts.get("processes", 1)))
    machine = facts.get("machine", {})
    on_host = facts.get("platform") == "cpu"
    versions = facts.get("versions", {})
    known = {
        "submitter": submission.org,
        "division": submission.division,
        "status": STATUS[submission.status],
        "system_name": submission.system,
        "number_of_nodes": str(machine.get("nodes", processes)),
        "host_processor_model_name": machine.get("processor", ""),
        "host_processor_core_count": str(machine.get("cores", "")),
        "host_processor_vcpu_count": str(facts.get("cores", "")),
        "host_memory_capacity": _gigabytes(machine.get("memory_bytes")),
        "accelerators_per_node": "0" if on_host else str(len(rows) // processes),
        "accelerator_model_name": "none" if on_host else str(rows[0]["kind"]) if rows else "",
        "framework": f"JAX {versions.get('jax', '')}, multipod {versions.get('multipod', '')}",
        "other_software_stack": ", ".join(f"{name} {version}" for name, version in versions.items()),
        "operating_system": machine.get("system", ""),
        "hw_notes": f"{len(rows)} devices in {processes} processes, mesh {facts.get('mesh', '')}",
        "sw_notes": f"layout: {facts.get('layout', '')}",
    }
    return {name: known.get(name, "") for name in _FIELDS}


def _gigabytes(size: int | None) -> str:
    return f"{size / 2**30:.0f} GiB" if size else ""


def _write_implementation(folder: Path, runs: Sequence[Run]) -> None:
    folder.mkdir(parents=True)
    commands = "\n".join(f"    {run.facts.get('command', '')}" for run in runs)
    versions = runs[0].facts.get("versions", {})
    packages = "\n".join(f"{name}=={version}" for name, version in versions.items() if name != "python")
    (folder / "requirements.txt").write_text(packages + "\n")
    for number, run in enumerate(runs):
        (folder / f"recipe_{number}.toml").write_text(run.recipe)
    (folder / "README.md").write_text(
        "# How to run this again\n\nInstall the packages of requirements.txt, and give each command; recipe_N.toml is "
        f"the whole recipe of run N, its seed among the rest.\n\n{commands}\n"
    )


def _missing(benchmark: Benchmark, minutes: Sequence[float | None]) -> list[str]:
    failed = sum(minute is None for minute in minutes)
    missing = []
    if len(minutes) != benchmark.runs:
        missing.append(f"{len(minutes)} runs; a result of {benchmark.name} has {benchmark.runs}")
    if failed > 1:
        missing.append(f"{failed} runs did not reach the target; one may fail to")
    return missing


def _ask_official(folder: Path, ruleset: str) -> tuple[str, ...]:
    """Returns what MLCommons' checkers of packages, seeds and systems say against a package."""
    checker = official("package_checker.package_checker")
    seeds = official("package_checker.seed_checker").SeedChecker(ruleset)
    with quiet_logging() as said:
        good = checker.check_systems(str(folder), "training", ruleset)
        good &= checker.check_training_result_files(
            str(folder), "training", ruleset, quiet=False, werror=False, rcp_bypass=False, rcp_bert_train_samples=False,
            seed_checker_bypass=False,
        )  # fmt: skip
        for results in sorted((folder / "results").glob("*/*")):
            good &= seeds.check_seeds(sorted(map(str, results.glob("result_*.txt"))))
    return () if good else tuple(said)


_FIELDS = (
    "submitter", "division", "status", "system_name", "number_of_nodes", "host_processors_per_node",
    "host_processor_model_name", "host_processor_core_count", "host_processor_vcpu_count", "host_processor_frequency",
    "host_processor_caches", "host_processor_interconnect", "host_memory_capacity", "host_storage_type",
    "host_storage_capacity", "host_networking", "host_networking_topology", "host_memory_configuration",
    "accelerators_per_node", "accelerator_model_name", "accelerator_host_interconnect", "accelerator_frequency",
    "accelerator_on-chip_memories", "accelerator_memory_configuration", "accelerator_memory_capacity",
    "accelerator_interconnect", "accelerator_interconnect_topology", "cooling", "hw_notes", "framework",
    "other_software_stack", "operating_system", "sw_notes",
)  # fmt: skip
"""Fields of a system's description, as MLCommons' checker asks for them."""
