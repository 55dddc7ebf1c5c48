"""Campaigns of faults against a run of real processes, and what came of it: the outer half of `multipod chaos`.

A run is started in processes of its own and, whenever it ends before its last update, started again from its newest
checkpoint, as often as there are faults and a few times more; the launcher may let it survive most of them.
`multipod.chaos.inject` makes the faults happen inside the processes. Then the records of both sides are held against
those of a run that nothing disturbed.
"""

import json
import os
import random
import shutil
import tomllib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from multipod.chaos.inject import KINDS, Fault, Kind, records
from multipod.elastic.launcher.processes import LineSink
from multipod.elastic.launcher.supervise import INTERRUPTED, RunOutcome
from multipod.elastic.sockets import LISTENING, list_sockets
from multipod.errors import ChaosError

SPARE = 3
"""Restarts beyond one a fault before a campaign is given up."""

EARLIEST = 2
"""No random fault before so many updates."""

RANDOM_KINDS: tuple[Kind, ...] = ("kill", "stop", "slow", "cut", "corrupt")
"""Drawn where a plan names none. A flipped bit needs a recipe that looks for trouble, so it must be asked for."""


@dataclass(frozen=True)
class RandomFaults:
    """Faults to be drawn: how many, of what kinds, and how long those last that last."""

    count: int = 0
    kinds: tuple[Kind, ...] = RANDOM_KINDS
    seconds: float = 1.0


@dataclass(frozen=True)
class FaultPlan:
    """What is to go wrong.

    Attributes:
      processes: of the run.
      seed: of the random faults.
      fault: those that are given.
      random: those that are drawn.
    """

    processes: int = 2
    seed: int = 0
    fault: tuple[Fault, ...] = ()
    random: RandomFaults = field(default_factory=RandomFaults)

    def faults(self, updates: int) -> list[Fault]:
        """All faults of a run of `updates`, in their order; the same for the same seed.

        Raises:
          ChaosError: all that is wrong with those given.
        """
        wrong = [
            f"fault {number}: {fault.kind} {what}"
            for number, fault in enumerate(self.fault, 1)
            for what in _wrong(fault, self.processes, updates)
        ]
        if wrong:
            raise ChaosError("The plan cannot be carried out:\n  " + "\n  ".join(wrong) + "\nMend these in the plan.")
        rng = random.Random(self.seed)
        drawn = [
            Fault(
                rng.choice(self.random.kinds),
                rng.randrange(EARLIEST, max(EARLIEST + 1, updates - 1)),
                rng.randrange(self.processes),
                self.random.seconds,
            )
            for _ in range(self.random.count)
        ]
        return sorted((*self.fault, *drawn), key=lambda fault: fault.at)


def _wrong(fault: Fault, processes: int, updates: int) -> list[str]:
    wrong = []
    if not 0 <= fault.at < updates:
        wrong.append(f"at={fault.at}: the run has updates 0 to {updates - 1} to break before")
    if not 0 <= fault.rank < processes:
        wrong.append(f"rank={fault.rank}: there are ranks 0 to {processes - 1}")
    if not fault.seconds > 0:
        wrong.append(f"seconds={fault.seconds:g}: say more than 0")
    if not 0 <= fault.bit < 32:
        wrong.append(f"bit={fault.bit}: a float32 has bits 0 to 31")
    return wrong


def read_plan(path: Path) -> FaultPlan:
    """The plan in a TOML file.

    Raises:
      ChaosError: it cannot be read, or says what no plan says.
    """
    try:
        return _plan(msgspec.convert(tomllib.loads(path.read_text()), _Strict))
    except OSError as error:
        raise ChaosError(
            f"{path} cannot be read: {error.strerror}. Name a plan: docs/availability.md has one."
        ) from error
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ChaosError(
            f"{path} is no plan: {error}. It has processes, seed, [[fault]] (kind, at, rank, seconds, bit, sticky) and "
            f"[random] (count, kinds, seconds); kinds are {', '.join(KINDS)}."
        ) from error


class _Fault(msgspec.Struct, forbid_unknown_fields=True):
    kind: Kind
    at: int
    rank: int = 0
    seconds: float = 1.0
    bit: int = 30
    sticky: bool = False


class _Random(msgspec.Struct, forbid_unknown_fields=True):
    count: int = 0
    kinds: tuple[Kind, ...] = RANDOM_KINDS
    seconds: float = 1.0


class _Strict(msgspec.Struct, forbid_unknown_fields=True):
    """A plan as text has it: a slip of the pen is an error."""

    processes: int = 2
    seed: int = 0
    fault: tuple[_Fault, ...] = ()
    random: _Random = msgspec.field(default_factory=_Random)


def _plan(read: _Strict) -> FaultPlan:
    given = tuple(Fault(**msgspec.structs.asdict(fault)) for fault in read.fault)
    return FaultPlan(read.processes, read.seed, given, RandomFaults(**msgspec.structs.asdict(read.random)))


@dataclass(frozen=True)
class Attempt:
    """One start of the run: how it ended, and after how many updates."""

    outcome: RunOutcome
    updates: int


@dataclass(frozen=True)
class Campaign:
    """A run with faults, and what it left in `folder`: `run`, `fired-RANK.jsonl`, `seen-RANK.jsonl`."""

    folder: Path
    attempts: tuple[Attempt, ...]

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"


Launch = Callable[[Sequence[str], LineSink], RunOutcome]
"""Runs the processes of a command, given its arguments, to their end; their lines go to the relay."""


def carry_out(faults: Sequence[Fault], folder: Path, train: Sequence[str], launch: Launch, link: str = "") -> Campaign:
    """Runs `multipod` with the arguments `train` to its end, through all faults.

    Args:
      faults: what happens.
      folder: is made; holds the run and the records.
      train: such as `train digits --mesh 2x2`, without --out.
      launch: runs the processes.
      link: the network link of each process, if it has one of its own.

    Raises:
      ChaosError: the run was interrupted, or came no further in spite of all restarts.
    """
    folder.mkdir(parents=True)
    run, attempts, idle = folder / "run", list[Attempt](), False
    said = {"link": link, "faults": [asdict(fault) for fault in faults]}
    inject = ["--inject", str(folder), "--quiet"]
    while True:
        (folder / "faults.json").write_text(json.dumps({**said, "attempt": len(attempts)}))
        saved = [path for path in (run / "checkpoints").glob("*") if path.name.isdigit()]
        if len(saved) == 1 and idle:
            saved = []  # it cannot go on from its only checkpoint: a fault has damaged it
        if not saved and run.exists():
            shutil.rmtree(run)  # it died before its first good checkpoint: nothing to go on from
        command = ["train", "--resume", str(run), *_kept(train)] if saved else [*train, "--out", str(run)]
        lines: list[str] = []
        before, outcome = len(updates_done(folder)), launch([*command, *inject], lines.append)
        seen = updates_done(folder)
        idle = len(seen) == before
        attempts.append(Attempt(outcome, max((update for _, update in seen), default=0)))
        if outcome.exit_code == 0:
            return Campaign(folder, tuple(attempts))
        if outcome.exit_code == INTERRUPTED:
            raise ChaosError(f"{folder}: the campaign was interrupted. Its run can go on: see {run}.")
        if len(attempts) > len(faults) + SPARE:
            raise ChaosError(
                f"{folder}: the run did not reach its end in {len(attempts)} starts; the last: {outcome.reason}.\n"
                + "\n".join(lines[-8:])
                + "\nMake checkpoint_every smaller than the distance of the faults, or the plan milder."
            )


def _kept(train: Sequence[str]) -> list[str]:
    """Of the arguments of a command, those that a resumed run needs again: where it runs, not what it is."""
    kept, words = [], list(train[1:])
    for at, word in enumerate(words):
        if word in ("--mesh", "--cpu-devices", "--timeout", "--cache") and at + 1 < len(words):
            kept += [word, words[at + 1]]
    return kept


@dataclass(frozen=True)
class FaultEffect:
    """A fault that happened.

    Attributes:
      fault: what.
      update: updates done when it did.
      recovered_s: until the run was further than ever before; None if it never was, or nothing was behind it.
      repeated: updates done again because of it.
    """

    fault: Fault
    update: int
    recovered_s: float | None
    repeated: int


def updates_done(folder: Path) -> list[tuple[float, int]]:
    """When each update was done, in the order of time: by whichever process was first to say so."""
    first: dict[tuple[int, int, int], float] = {}
    for file in folder.glob("seen-*.jsonl"):
        for record in records(file):
            if "numbers" not in record:
                key = (*record["world"], record["update"])
                first[key] = min(record["t"], first.get(key, record["t"]))
    return sorted((t, key[-1]) for key, t in first.items())


def fault_effects(folder: Path, ranks: int) -> list[FaultEffect]:
    """What happened, from the records, in the order of time."""
    seen = updates_done(folder)
    fired = sorted(
        (record for rank in range(ranks) for record in records(folder / f"fired-{rank}.jsonl")), key=lambda r: r["t"]
    )
    once = {record["fault"]: record for record in reversed(fired)}
    ordered = sorted(once.values(), key=lambda r: r["t"])
    found = []
    for record, following in zip(ordered, [*ordered[1:], None], strict=True):
        until = following["t"] if following else float("inf")
        # The others may not have written down yet what this process has done.
        furthest = max([record["update"], *(update for t, update in seen if t <= record["t"])])
        after = [(t, update) for t, update in seen if t > record["t"]]
        recovered = next((t - record["t"] for t, update in after if update > furthest), None)
        again = sum(1 for t, update in after if t < until and update <= furthest)
        fault = Fault(**{name: record[name] for name in Fault.__dataclass_fields__})
        found.append(FaultEffect(fault, record["update"], recovered, again))
    return found


@dataclass(frozen=True)
class ExampleUse:
    """Which examples the updates that count were made of.

    Attributes:
      updates: how many there were.
      used: examples in all.
      same: whether each update had the examples that it has in the undisturbed run.
      uneven: examples used more often than others by more than one: none if each was used once an epoch.
    """

    updates: int
    used: int
    same: bool
    uneven: int


def compare_examples(disturbed: Path, undisturbed: Path, ranks: int) -> ExampleUse:
    """From the records of both runs; an update that was done again counts as it was done last."""
    mine, theirs = (_used(folder, ranks) for folder in (disturbed, undisturbed))
    counts = Counter(number for numbers in mine.values() for number in numbers)
    least = min(counts.values(), default=0)
    return ExampleUse(
        len(mine), sum(counts.values()), mine == theirs, sum(count > least + 1 for count in counts.values())
    )


def _used(folder: Path, ranks: int) -> dict[int, list[int]]:
    """The examples of each update: of the world that did it last, what each of its processes gave to it last."""
    given: dict[tuple[int, tuple[int, ...]], dict[int, list[int]]] = {}
    last: dict[int, tuple[int, ...]] = {}
    for rank in range(ranks):
        for record in records(folder / f"seen-{rank}.jsonl"):
            update, world = record["update"], tuple(record["world"])
            if "numbers" in record:
                given.setdefault((update, world), {})[rank] = record["numbers"]
            else:
                last[update] = max(world, last.get(update, world))
    return {
        update: sorted(number for numbers in given[update, last[update]].values() for number in numbers)
        for update in sorted(last)
    }


def read_end(run: Path) -> dict[str, Any]:
    """The last line of a run's events: how it ended."""
    return [record for record in records(run / "metrics.jsonl") if record["event"] == "ended"][-1]


def read_parameters(run: Path) -> dict[str, np.ndarray]:
    """The parameters of a run's newest checkpoint by their path, on this host whatever they were on. Needs JAX."""
    import jax
    import orbax.checkpoint as ocp

    newest = max(int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit())
    folder = (run / "checkpoints" / str(newest) / "default").absolute()
    reader = ocp.PyTreeCheckpointer()
    tree = reader.metadata(folder).item_metadata.tree
    whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    found = jax.tree_util.tree_flatten_with_path(reader.restore(folder, restore_args=whole))[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in found}
    return {name: leaf for name, leaf in named.items() if name.startswith("params/")}


def largest_difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    """Between tensors of the same name, over their largest number; infinite if the names or shapes differ."""
    if one.keys() != other.keys() or any(one[name].shape != other[name].shape for name in one):
        return float("inf")
    floats = [name for name in one if np.issubdtype(one[name].dtype, np.floating) and one[name].size]
    if not all(np.isfinite(one[name]).all() for name in floats):
        return float("inf")
    apart = [np.abs(one[name] - other[name]).max() / max(np.abs(other[name]).max(), 1e-30) for name in floats]
    exact = all((one[name] == other[name]).all() for name in one if name not in floats)
    return float(max(apart, default=0.0)) if exact else float("inf")


def loss_difference(run: Path, other: Path) -> float:
    """Between the losses of the same updates of two runs, over the largest; infinite if the updates differ.

    Updates done again count as they were done last. Two runs whose sums are rounded otherwise, on more or fewer
    processes, agree in this longer than in their parameters: Adam divides by what small gradients are like, which is
    rounding where nothing depends on a parameter.
    """
    mine, theirs = (
        {
            one["update"]: one["values"]["loss"]
            for one in records(folder / "metrics.jsonl")
            if one["event"] == "updated" and one["values"].get("loss") is not None
        }
        for folder in (run, other)
    )
    if mine.keys() != theirs.keys():
        return float("inf")
    apart = max((abs(loss - theirs[update]) for update, loss in mine.items()), default=0.0)
    return apart / max((abs(loss) for loss in theirs.values()), default=1.0)


def find_left_behind(folder: Path, before: set[str]) -> list[str]:
    """Processes that still mention the folder or are still this one's, ports that it still listens on, and shared
    memory that was not there before."""
    me, found = os.getpid(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
        theirs = "--inject" in words and any(word.startswith(str(folder)) for word in words)
        if int(process.name) != me and (theirs or parent == me):
            found.append(f"process {process.name}: {' '.join(words)[:80]}")
    found += [f"port {one.local}" for one in list_sockets(LISTENING)]
    return found + [f"/dev/shm/{name}" for name in sorted(list_shared_memory() - before)]


def list_shared_memory() -> set[str]:
    """The names of what lies in shared memory."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
