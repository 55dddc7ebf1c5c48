"""What came of a campaign: each fault's effect, and the run compared with one that nothing disturbed."""

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from multipod.chaos.inject import Fault, records
from multipod.elastic.sockets import LISTENING, list_sockets


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
    """Reads from the records what happened, in the order of time."""
    seen = updates_done(folder)
    fired = sorted(
        (record for rank in range(ranks) for record in records(folder / f"fired-{rank}.jsonl")), key=lambda r: r["t"]
    )
    once = {record["fault"]: record for record in reversed(fired)}
    ordered = sorted(once.values(), key=lambda r: r["t"])
    effects = []
    for record, following in zip(ordered, [*ordered[1:], None], strict=True):
        until = following["t"] if following else float("inf")
        # The others may not have written down yet what this process has done.
        furthest = max([record["update"], *(update for t, update in seen if t <= record["t"])])
        after = [(t, update) for t, update in seen if t > record["t"]]
        recovered = next((t - record["t"] for t, update in after if update > furthest), None)
        again = sum(1 for t, update in after if t < until and update <= furthest)
        fault = Fault(**{name: record[name] for name in Fault.__struct_fields__})
        effects.append(FaultEffect(fault, record["update"], recovered, again))
    return effects


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
    """Compares the examples of both runs by their records; an update that was done again counts as it was done last."""
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
    as_arrays = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    leaves = jax.tree_util.tree_flatten_with_path(reader.restore(folder, restore_args=as_arrays))[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}
    return {name: leaf for name, leaf in named.items() if name.startswith("params/")}


def largest_difference(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> float:
    """The difference between tensors of the same name, over their largest; infinite if names or shapes differ."""
    if left.keys() != right.keys() or any(left[name].shape != right[name].shape for name in left):
        return float("inf")
    floats = [name for name in left if np.issubdtype(left[name].dtype, np.floating) and left[name].size]
    if not all(np.isfinite(left[name]).all() for name in floats):
        return float("inf")
    apart = [np.abs(left[name] - right[name]).max() / max(np.abs(right[name]).max(), 1e-30) for name in floats]
    exact = all((left[name] == right[name]).all() for name in left if name not in floats)
    return float(max(apart, default=0.0)) if exact else float("inf")


def loss_difference(run: Path, other: Path) -> float:
    """The difference between the losses of two runs, over the largest; infinite if the updates differ.

    Updates done again count as they were done last. Two runs whose sums are rounded otherwise, on more or fewer
    processes, agree in this longer than in their parameters: Adam divides by what small gradients are like, which is
    rounding where nothing depends on a parameter.
    """
    mine, theirs = (
        {
            record["update"]: record["values"]["loss"]
            for record in records(folder / "metrics.jsonl")
            if record["event"] == "updated" and record["values"].get("loss") is not None
        }
        for folder in (run, other)
    )
    if mine.keys() != theirs.keys():
        return float("inf")
    apart = max((abs(loss - theirs[update]) for update, loss in mine.items()), default=0.0)
    return apart / max((abs(loss) for loss in theirs.values()), default=1.0)


def find_left_behind(folder: Path, before: set[str]) -> list[str]:
    """Lists processes that mention the folder or are children of this one, open ports, and new shared memory."""
    me, left = os.getpid(), []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
        theirs = "--inject" in words and any(word.startswith(str(folder)) for word in words)
        if int(process.name) != me and (theirs or parent == me):
            left.append(f"process {process.name}: {' '.join(words)[:80]}")
    left += [f"port {listener.local}" for listener in list_sockets(LISTENING)]
    return left + [f"/dev/shm/{name}" for name in sorted(list_shared_memory() - before)]


def list_shared_memory() -> set[str]:
    """The names of what lies in shared memory."""
    folder = Path("/dev/shm")
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()
