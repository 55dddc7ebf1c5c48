"""The training loop over a bare `while` around the same compiled step, and how long devices idle between updates.

    python benchmarks/loop_time.py [--ms 1,10,100] [--processes 1,4] [--rounds 9] [--ahead 0,2] [--per-call 1,10]
        [--json FILE]

Each process has one CPU device, so a step leaves the other cores to the host as an accelerator does. A step is a small
perceptron beside matrix products, as many as take the time asked for. Rounds of the loop, as a run does it (data,
reports, `metrics.jsonl`), and of the bare `while` follow each other; a ratio is taken within a round, the median over
rounds is printed, so that other load on the machine cancels. The bare `while` gives the devices one step after the
other and waits for the last of them alone, one in each call whatever `--per-call` says of the loop.

Idle is the share of the loop's time beyond the bare `while`'s: there the devices always have a next step. "Seen" is the
loop's own account: the time from the end of an update, as the host sees it, until it gives the devices the next.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multipod import runtime

EDGE = 6
"""Updates at both ends of a round that are not counted: the loop begins and ends a round with none under way."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ms", default="1,10,100", help="milliseconds of a step, with commas")
    parser.add_argument("--processes", default="1,4", help="processes of a run, with commas")
    parser.add_argument("--rounds", type=int, default=9, help="at least 5 for a figure to quote")
    parser.add_argument("--ahead", default="0,2", help="values of --run-ahead, with commas")
    parser.add_argument("--per-call", default="1", help="values of --steps-per-call, with commas")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all that was measured there")
    parser.add_argument("--rank", nargs=3, metavar=("RANK", "RANKS", "ADDRESS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, ranks, address = int(options.rank[0]), int(options.rank[1]), options.rank[2]
        return measure(options, rank, ranks, address)
    import machine

    print(machine.headline(machine.facts()), flush=True)
    lines = []
    head = ["step asked for", "processes", "run-ahead", "per call", "step ms", "loop / while", "quartiles"]
    head += ["idle", "seen"]
    for count in numbers(options.processes):
        found = run_ranks(options, count)
        print(f"\n{machine.table(head, [row_of(line) for line in found])}\nLoad: {machine.facts()['load']}", flush=True)
        lines += found
    if options.json:
        options.json.write_text(json.dumps({"machine": machine.facts(), "cases": lines}, indent=1))
    return 0


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def row_of(line: dict[str, Any]) -> list[str]:
    low, middle, high = line["ratios"]
    idle = f"{max(0.0, 1 - 1 / middle):.2%}", f"{line['seen']:.2%}"
    step = f"{1e3 * line['step_s']:.2f}"
    return [
        f"{line['ms']} ms",
        str(line["ranks"]),
        str(line["ahead"]),
        str(line["per_call"]),
        step,
        f"{middle:.4f}",
        f"{low:.4f} to {high:.4f}",
        *idle,
    ]


def run_ranks(options: argparse.Namespace, ranks: int) -> list[dict[str, Any]]:
    """Starts so many processes of this file; returns what the first of them measured."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    words = ["--ms", options.ms, "--rounds", str(options.rounds), "--ahead", options.ahead]
    words += ["--per-call", options.per_call]
    command = [sys.executable, __file__, *words, "--rank"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), address], stdout=subprocess.PIPE if rank == 0 else None, text=True
        )
        for rank in range(ranks)
    ]
    output = processes[0].communicate()[0]
    codes = [process.wait() for process in processes]
    if any(codes):
        raise RuntimeError(f"processes ended with {codes}: their errors stand above.")
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]


# One process.


def measure(options: argparse.Namespace, rank: int, ranks: int, address: str) -> int:
    """Measures all cases; rank 0 prints a JSON line of each."""
    runtime.prepare(1, cache=runtime.default_cache(), processes=ranks)
    runtime.keep_stdout_for_python()
    import jax

    if ranks > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(address, ranks, rank)
    loops = calibrate(rank, ranks, numbers(options.ms))
    for ms in numbers(options.ms):
        for ahead, per_call in itertools.product(numbers(options.ahead), numbers(options.per_call)):
            line = compare(loops[ms], max(30, min(100, 1000 // ms)), options.rounds, ahead, per_call)
            line |= {"ms": ms, "ranks": ranks}
            if rank == 0:
                print(json.dumps(line), flush=True)
    return 0


def make_program(loops: int, updates: int, ranks: int) -> Any:
    """The program of a perceptron beside `loops` matrix products."""
    import jax
    import jax.numpy as jnp

    from multipod.layout.layout import Layout
    from multipod.layout.mesh import make_mesh
    from multipod.recipe.bad_updates import BadUpdateRules
    from multipod.recipes.digits import digits
    from multipod.step.program import program_of

    @dataclass(frozen=True)
    class Busy:
        """A perceptron whose input passes through matrix products that leave it as it is, but for rounding."""

        loops: int

        def init(self, key: Any) -> Any:
            return {"out": jax.random.normal(key, (64, 10)) / 8, "mix": jnp.eye(64)}, {}

        def apply(self, params: Any, statistics: Any, batch: Any, *, train: bool, key: Any) -> Any:
            x = batch["image"].reshape(-1, 64)
            mix = jax.lax.stop_gradient(params["mix"])
            x = jax.lax.fori_loop(0, self.loops, lambda _, x: jnp.tanh(x @ mix), x)
            return x @ params["out"], statistics

    layout = replace(Layout(), mesh=(1, ranks))
    base = replace(digits(), model=Busy(loops), layout=layout, batch=32 * ranks, updates=updates)
    recipe = replace(base, evaluate_every=0, checkpoint_every=0, bad_updates=BadUpdateRules())
    return program_of(recipe, make_mesh(layout))


def calibrate(rank: int, ranks: int, wanted: list[int]) -> dict[int, int]:
    """How many matrix products take so many milliseconds; the same number in all processes."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    seconds = []
    for loops in (50, 1050):
        bare = Bare(make_program(loops, 1, ranks))
        bare.run(20)
        seconds.append(min(bare.run(20) for _ in range(5)))
    fixed, each = seconds[0], max(1e-7, (seconds[1] - seconds[0]) / 1000)
    found = np.array([max(1, round((ms / 1e3 - fixed) / each)) for ms in wanted], np.int32)
    if jax.process_count() > 1:
        found = np.asarray(multihost_utils.broadcast_one_to_all(found))
    return dict(zip(wanted, found.tolist(), strict=True))


class Bare:
    """A bare `while` around the compiled step, on one batch that is there already."""

    def __init__(self, program: Any) -> None:
        from multipod.data.batches import TrainBatches
        from multipod.data.global_arrays import owned_rows
        from multipod.layout.mesh import batch_sharding

        recipe = program.recipe
        self._update, self._state, self._go = program.compile_update(), program.init(), program.controls()
        rows = owned_rows(batch_sharding(program.mesh), program.rows)
        batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, rows, program.padded)
        self._batch = program.place_batch(batches[0], rows, program.rows)

    def run(self, updates: int) -> float:
        """Does so many updates; returns the seconds of one."""
        import jax

        start, done = time.perf_counter(), 0
        while done < updates:
            self._state, sums = self._update(self._state, self._batch, self._go)
            done += 1
        jax.block_until_ready((self._state, sums))
        return (time.perf_counter() - start) / updates


class Loop:
    """`multipod.train.loop.train` as a run does it, in a thread that waits between rounds; its clock stands still."""

    def __init__(self, program: Any, folder: Path, every: int, ahead: int, per_call: int) -> None:
        from multipod.train.clock import UpdateTimes
        from multipod.train.context import LoopHooks, RunContext
        from multipod.train.observers.jsonl import JsonLines

        self._every, self._held_s = every, 0.0
        self._error: BaseException | None = None
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self.times = UpdateTimes()
        context = RunContext(
            observers=[JsonLines(folder / "metrics.jsonl")],
            hooks=LoopHooks(on_phase=self._pulse),
            clock=self._clock,
            began_s=self._clock(),
            times=self.times,
            run_ahead=ahead,
            steps_per_call=per_call,
        )
        self._thread = threading.Thread(target=self._train, args=(program, context), daemon=True)
        self._thread.start()
        self._wait()

    def run(self) -> tuple[float, float]:
        """Does a round; returns the seconds of an update, and of these the idle ones that the loop saw."""
        first = len(self.times.step_s)
        self._go.release()
        self._wait()
        middle = slice(first + EDGE, len(self.times.step_s) - EDGE)
        steps, inside = self.times.step_s[middle], self.times.inside_s[middle]
        return statistics.fmean(steps), max(0.0, statistics.fmean(steps) - statistics.fmean(inside))

    def end(self) -> None:
        """Does the last round, and waits for all that it leaves to be freed: Python's end does not wait for threads."""
        self.run()
        self._thread.join()

    def _wait(self) -> None:
        self._done.acquire()
        if self._error is not None:
            raise self._error

    def _train(self, program: Any, context: Any) -> None:
        from multipod.train.loop import train

        try:
            train(program, context)
        except BaseException as error:
            self._error = error
        self._done.release()

    def _clock(self) -> float:
        return time.monotonic() - self._held_s

    def _pulse(self, phase: str, update: int) -> None:
        if phase == "updating" and update % self._every == 0:
            settle_devices()
            held = time.monotonic()
            self._done.release()
            self._go.acquire()
            self._held_s += time.monotonic() - held


def settle_devices() -> None:
    """Waits for all updates under way: the bare `while` is another program, whose sums must not meet theirs."""
    import jax

    jax.block_until_ready([array for array in jax.live_arrays() if not array.is_deleted()])


def compare(loops: int, every: int, rounds: int, ahead: int, per_call: int) -> dict[str, Any]:
    """One case: rounds of the loop and of the bare `while` by turns, the first of both to warm up."""
    import jax

    ratios, seen, steps = [], [], []
    program = make_program(loops, every * (rounds + 2), jax.process_count())
    bare = Bare(program)
    with tempfile.TemporaryDirectory() as folder:
        loop = Loop(program, Path(folder), every, ahead, per_call)
        for number in range(rounds + 1):
            before = bare.run(every)
            step_s, idle_s = loop.run()
            after = bare.run(every)
            if number:
                ratios.append(2 * step_s / (before + after))
                seen.append(idle_s / step_s)
                steps.append(step_s)
        loop.end()
    return {
        "ahead": ahead, "per_call": per_call, "loops": loops, "updates": every, "step_s": statistics.median(steps),
        "ratios": statistics.quantiles(ratios, n=4), "seen": statistics.median(seen), "all": ratios,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
