"""Time of an update of the digits recipe: multipod, plain JAX, and PyTorch, interleaved in one run.

    python benchmarks/step_time.py [--rounds 7] [--updates 20] [--json FILE] [--no-torch]

Each round runs some updates of every case, the others asleep, in an order that turns from round to round;
ratios are taken within a round and their median is printed, so that other load on the machine cancels. A
`loop` case is an update as a run does it, data and reports included; a `step` case is the compiled step
alone on a batch that is there already.
"""

import argparse
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from multipod import runtime

runtime.prepare(cache=runtime.default_cache())  # before JAX is imported

import jax  # noqa: E402
import machine  # noqa: E402
import plain_jax  # noqa: E402

from multipod.data.batches import TrainBatches  # noqa: E402
from multipod.data.global_arrays import owned_rows, to_mesh  # noqa: E402
from multipod.layout.layout import Layout  # noqa: E402
from multipod.layout.mesh import batch_sharding, make_mesh  # noqa: E402
from multipod.layout.sync import Sync  # noqa: E402
from multipod.recipe.recipe import Recipe  # noqa: E402
from multipod.recipes.digits import digits  # noqa: E402
from multipod.step.program import Program, program_of  # noqa: E402
from multipod.train.context import LoopHooks, RunContext  # noqa: E402
from multipod.train.events import Event, Updated  # noqa: E402
from multipod.train.loop import train  # noqa: E402
from multipod.train.observers.jsonl import JsonLines  # noqa: E402
from multipod.train.observers.tensorboard import TensorBoard  # noqa: E402

LAYOUTS = {
    "multipod, as in the recipe": digits().layout,
    "multipod, xla": Layout(),
    "multipod, xla, split update": Layout(sync=Sync(sharding="zero1")),
    "multipod, torus": Layout(sync=Sync("torus")),
    "multipod, torus, split update": Layout(sync=Sync("torus", sharding="zero1")),
    "multipod, one device": Layout(mesh=(1, 1)),
}
PLAIN, DDP, ONE = "plain JAX", "PyTorch DDP, 2 ranks x 1 thread", "PyTorch, 1 process x 2 threads"
SAME_LOSS, SAME_UPDATES = 1e-3, 10  # later, rounding that differs in the last bit has grown into other numbers


class Case(Protocol):
    """Something that does updates when asked, and nothing in between.

    Attributes:
      losses: of the updates done, where the case reads its data as a run does; else empty.
    """

    losses: list[float]

    def run(self, updates: int) -> list[float]:
        """Does so many updates; returns the seconds of each."""
        ...


class OurLoop:
    """`multipod.train.loop.train` as it is, in a thread that its pulse holds between rounds.

    While it is held its clock stands still, so the shares that the run reports at its end are true.
    """

    def __init__(self, program: Program, folder: Path, round_updates: int) -> None:
        self.losses: list[float] = []
        self.ended: Any = None
        self._every = round_updates
        self._seconds: list[float] = []
        self._began: float | None = None
        self._held_s = 0.0
        self._error: BaseException | None = None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        folder.mkdir()
        observers = [JsonLines(folder / "metrics.jsonl"), TensorBoard(folder), self._observe]
        hooks = LoopHooks(on_phase=self._pulse)
        around = RunContext(observers=observers, hooks=hooks, clock=self._clock, began_s=self._clock())
        threading.Thread(target=self._train, args=(program, around), daemon=True).start()
        self._wait()

    def run(self, updates: int) -> list[float]:
        """See `Case`."""
        assert updates == self._every
        self._seconds.clear()
        self._go.release()
        self._wait()
        return self._seconds[:]

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def _train(self, program: Program, around: RunContext) -> None:
        try:
            _, self.ended = train(program, around)
        except BaseException as error:
            self._error = error
        self._done.release()

    def _clock(self) -> float:
        return time.monotonic() - self._held_s

    def _pulse(self, phase: str, update: int) -> None:
        if self._began is not None:
            self._seconds.append(self._clock() - self._began)
        if phase == "updating" and update % self._every == 0:
            held = time.monotonic()
            self._done.release()
            self._go.acquire()
            self._held_s += time.monotonic() - held
        self._began = self._clock() if phase == "updating" else None

    def _observe(self, event: Event) -> None:
        if isinstance(event, Updated):
            self.losses.append(event.values["loss"])


class OurStep:
    """`Program.compile_update` on one batch."""

    def __init__(self, program: Program) -> None:
        self.losses: list[float] = []
        self._update, self._state = program.compile_update(), program.init()
        self._go = program.controls()
        sharding = batch_sharding(program.mesh)
        rows = owned_rows(sharding, program.recipe.batch)
        self._batch = to_mesh(first_batch(program.recipe), rows, program.recipe.batch, sharding)

    def run(self, updates: int) -> list[float]:
        """See `Case`."""
        return list(map(self._one, range(updates)))

    def _one(self, _: int) -> float:
        start = time.perf_counter()
        self._state, sums = self._update(self._state, self._batch, self._go)
        jax.block_until_ready((self._state, sums))
        return time.perf_counter() - start


class PlainLoop:
    """Plain JAX, fed as our loop is: the next batch is read while the devices work."""

    def __init__(self, recipe: Recipe) -> None:
        self.losses: list[float] = []
        self._step, self._state = plain_jax.build(recipe)
        self._split, _ = plain_jax.shardings()
        self._incoming = batches(recipe).start(0)
        self._batch = jax.device_put(next(self._incoming), self._split)

    def run(self, updates: int) -> list[float]:
        """See `Case`."""
        return list(map(self._one, range(updates)))

    def _one(self, _: int) -> float:
        start = time.perf_counter()
        self._state, values = self._step(self._state, self._batch)
        self._batch = jax.device_put(next(self._incoming), self._split)
        jax.block_until_ready((self._state, values))
        self.losses.append(float(values["loss"]))
        return time.perf_counter() - start


class PlainStep:
    """Plain JAX on one batch."""

    def __init__(self, recipe: Recipe) -> None:
        self.losses: list[float] = []
        self._step, self._state = plain_jax.build(recipe)
        self._batch = jax.device_put(first_batch(recipe), plain_jax.shardings()[0])

    def run(self, updates: int) -> list[float]:
        """See `Case`."""
        return list(map(self._one, range(updates)))

    def _one(self, _: int) -> float:
        start = time.perf_counter()
        self._state, values = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, values))
        return time.perf_counter() - start


class TorchRanks:
    """The processes of a PyTorch run. They sleep on their pipes between commands; rank 0's times count."""

    def __init__(self, ranks: int, threads: int, recipe: Recipe, folder: Path) -> None:
        script = Path(__file__).with_name("torch_ranks.py")
        numbers = {"--ranks": ranks, "--threads": threads, "--updates": recipe.updates, "--meet": folder / "meet"}
        folder.mkdir()
        command = [sys.executable, str(script), *(str(word) for pair in numbers.items() for word in pair)]
        self.processes = [
            subprocess.Popen([*command, "--rank", str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for rank in range(ranks)
        ]
        self._answers()

    def run(self, kind: str, updates: int) -> dict[str, list[float]]:
        """Asks all ranks for so many updates; returns rank 0's answer."""
        for process in self.processes:
            process.stdin.write(f"{kind} {updates}\n")
            process.stdin.flush()
        return self._answers()[0]

    def close(self) -> None:
        """Ends the ranks."""
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            process.wait(30)

    def _answers(self) -> list[Any]:
        lines = [process.stdout.readline() for process in self.processes]
        if not all(lines):
            raise RuntimeError("a PyTorch rank ended before it answered: its error stands above.")
        return list(map(json.loads, lines))


class TorchCase:
    """One kind of update of a PyTorch run."""

    def __init__(self, ranks: TorchRanks, kind: str) -> None:
        self.losses: list[float] = []
        self._ranks, self._kind = ranks, kind

    def run(self, updates: int) -> list[float]:
        """See `Case`."""
        answer = self._ranks.run(self._kind, updates)
        self.losses = answer["losses"] if self._kind == "loop" else []
        return answer["seconds"]


@dataclass(frozen=True)
class Measured:
    """A case's seconds, one list a round; the first round warms up and is left out."""

    rounds: list[list[float]]

    @property
    def medians(self) -> list[float]:
        """The median of each round."""
        return list(map(statistics.median, self.rounds))

    @property
    def quartiles(self) -> list[float]:
        """Lower quartile, median and upper quartile of all updates."""
        return statistics.quantiles(itertools.chain(*self.rounds), n=4)

    def ratio(self, other: "Measured") -> list[float]:
        """Quartiles of the ratio of the rounds' medians."""
        return statistics.quantiles([a / b for a, b in zip(self.medians, other.medians, strict=True)], n=4)


Cases = dict[tuple[str, str], Case]
"""Cases by name and kind, `loop` or `step`."""


def batches(recipe: Recipe) -> TrainBatches:
    rows = owned_rows(plain_jax.shardings()[0], recipe.batch)
    return TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, rows)


def first_batch(recipe: Recipe) -> dict[str, Any]:
    return batches(recipe)[0]


def build(recipe: Recipe, options: argparse.Namespace, stack: ExitStack) -> Cases:
    """All cases, compiled and ready."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    cases: Cases = {}
    for number, (name, layout) in enumerate(LAYOUTS.items()):
        program = program_of(replace(recipe, layout=layout), make_mesh(layout))
        cases[name, "step"] = OurStep(program)
        cases[name, "loop"] = OurLoop(program, folder / str(number), options.updates)
    cases[PLAIN, "step"], cases[PLAIN, "loop"] = PlainStep(recipe), PlainLoop(recipe)
    if options.torch and importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed and is left out. For its rows: pip install 'multipod[bench]'.")
    elif options.torch:
        for name, ranks, threads in ((DDP, 2, 1), (ONE, 1, 2)):
            started = TorchRanks(ranks, threads, recipe, folder / f"torch{ranks}")
            stack.callback(started.close)
            cases |= {(name, kind): TorchCase(started, kind) for kind in ("step", "loop")}
    return cases


def measure(cases: Cases, rounds: int, updates: int) -> dict[tuple[str, str], Measured]:
    """Runs all cases in turn, round by round, one round more than asked for."""
    names = list(cases)
    taken: dict[tuple[str, str], list[list[float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken[name].append(cases[name].run(updates))
    return {name: Measured(lists[1:]) for name, lists in taken.items()}


def rows(results: dict[tuple[str, str], Measured], kind: str) -> Iterator[list[str]]:
    """The lines of one kind's table."""
    peers = [results.get((name, kind)) for name in (PLAIN, DDP, ONE)]
    for (name, of), measured in results.items():
        if of == kind:
            low, middle, high = (f"{1e3 * s:.2f}" for s in measured.quartiles)
            ratios = [measured.ratio(peer) if peer else None for peer in peers]
            spread = f"{ratios[0][0]:.3f} to {ratios[0][2]:.3f}" if ratios[0] else ""
            yield [name, middle, f"{low} to {high}", *(f"{r[1]:.3f}" if r else "" for r in ratios[:1]), spread] + [
                f"{r[1]:.2f}" if r else "" for r in ratios[1:]
            ]


def loss_differences(cases: Cases) -> dict[str, float]:
    """How far each of our loops' loss was at most from plain JAX's in the first updates, on the same data."""
    plain = cases[PLAIN, "loop"].losses[:SAME_UPDATES]
    return {
        name: max(abs(ours - theirs) for ours, theirs in zip(cases[name, "loop"].losses, plain, strict=False))
        for name in LAYOUTS
    }


def shares(cases: Cases, results: dict[tuple[str, str], Measured]) -> Iterator[list[str]]:
    """Where the time of our loop goes: the loop's own account, and against the step alone."""
    for name in LAYOUTS:
        ended = cases[name, "loop"].ended
        over = results[name, "loop"].ratio(results[name, "step"])[1]
        yield [name, f"{ended.outside_share:.2%}", f"{ended.data_share:.2%}", f"{over:.3f}"]


def as_json(cases: Cases, results: dict[tuple[str, str], Measured], losses: dict[str, float]) -> dict[str, Any]:
    """All that was measured."""
    return {
        "machine": machine.facts(),
        "cases": [{"name": n, "kind": kind, "seconds": m.rounds} for (n, kind), m in results.items()],
        "loss_differences": losses,
        "outside_share": {name: cases[name, "loop"].ended.outside_share for name in LAYOUTS},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="at least 5 for a figure to quote")
    parser.add_argument("--updates", type=int, default=20, help="of each case in a round")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all times there")
    parser.add_argument("--no-torch", dest="torch", action="store_false", help="leave PyTorch out")
    options = parser.parse_args()
    recipe = replace(digits(), updates=(options.rounds + 1) * options.updates, evaluate_every=0)
    print(machine.headline(machine.facts()), flush=True)
    with ExitStack() as stack:
        cases = build(recipe, options, stack)
        results = measure(cases, options.rounds, options.updates)
    losses = loss_differences(cases)
    for kind, title in (("loop", "An update in a run"), ("step", "The compiled step alone")):
        head = [title, "median ms", "quartiles", "/ plain JAX", "quartiles", "/ DDP", "/ 1 process"]
        print(f"\n{machine.table(head, list(rows(results, kind)))}")
    head = ["Our loop", "outside the step", "waiting for data", "loop / step alone"]
    print(f"\n{machine.table(head, list(shares(cases, results)))}")
    same = max(losses.values()) <= SAME_LOSS
    print(
        f"\nLoss after {SAME_UPDATES} updates: plain JAX {cases[PLAIN, 'loop'].losses[SAME_UPDATES - 1]:.5f}; "
        f"until then ours was at most {max(losses.values()):.1e} away: {'' if same else 'NOT '}the same work."
    )
    print(f"Load average at the end: {machine.facts()['load']}")
    if options.json:
        options.json.write_text(json.dumps(as_json(cases, results, losses), indent=1))
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
