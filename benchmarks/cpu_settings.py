"""What XLA's settings do to the compiled step of the digits recipe on CPU, interleaved in one run.

    python benchmarks/cpu_settings.py [--rounds 7] [NAME=VALUE[,NAME=VALUE]... ...]

Each argument is a variant: environment variables of its own process (`XLA_FLAGS`, `NPROC`, `DEVICES`, ...).
Without arguments `VARIANTS` are run. Ratios are to the first, which is multipod's own choice. CPU time is
that of the whole process, all threads: it means something on a busy machine too.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import machine

VARIANTS = [
    "",
    "NPROC=8",
    "NPROC=4",
    "NPROC=2",
    "DEVICES=4",
    "DEVICES=2",
    "DEVICES=1",
    "XLA_FLAGS=--xla_cpu_use_thunk_runtime=false",
    "XLA_FLAGS=--xla_cpu_multi_thread_eigen=false",
    "XLA_FLAGS=--xla_cpu_enable_fast_math=true",
    "XLA_FLAGS=--xla_cpu_use_onednn=true",
    "XLA_FLAGS=--xla_cpu_use_xnnpack=true",
    "XLA_FLAGS=--xla_cpu_use_fusion_emitters=false",
    "XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false",
    "XLA_FLAGS=--xla_cpu_prefer_vector_width=512",
    "XLA_FLAGS=--xla_cpu_prefer_vector_width=128",
    "XLA_FLAGS=--xla_cpu_strict_dot_conv_math=false",
    "XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=",
    "XLA_FLAGS=--xla_cpu_parallel_codegen_split_count=1",
    "MALLOC_TOP_PAD_=268435456,MALLOC_TRIM_THRESHOLD_=1073741824,MALLOC_MMAP_THRESHOLD_=1073741824",
]


def serve() -> None:
    """The process of one variant: answers each number on its input with the times of so many updates."""
    from multipod import runtime

    devices = int(os.environ.get("DEVICES", "8"))
    runtime.prepare(devices)
    import jax

    from multipod.data.batches import TrainBatches
    from multipod.data.global_arrays import owned_rows, to_mesh
    from multipod.layout.mesh import batch_sharding, make_mesh
    from multipod.recipes.digits import digits
    from multipod.step.program import program_of

    recipe = digits()
    program = program_of(recipe, make_mesh(recipe.layout))
    sharding = batch_sharding(program.mesh)
    rows = owned_rows(sharding, recipe.batch)
    batch = to_mesh(TrainBatches(recipe.data.train(), recipe.batch, 0, rows)[0], rows, recipe.batch, sharding)
    state, go, update = program.init(), program.controls(), program.compile_update()
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, cpu = [], time.process_time()
        for _ in range(int(line)):
            start = time.perf_counter()
            state, _ = jax.block_until_ready(update(state, batch, go))
            seconds.append(time.perf_counter() - start)
        print(json.dumps([statistics.median(seconds), (time.process_time() - cpu) / len(seconds)]), flush=True)


def start(variant: str) -> subprocess.Popen[str] | None:
    """A process of this variant, ready, or None if it failed."""
    settings = dict(pair.split("=", 1) for pair in variant.split(",") if pair)
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve"],
        env=os.environ | settings,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return process if process.stdout.readline() else None


def ask(process: subprocess.Popen[str], updates: int) -> tuple[float, float]:
    """Median seconds and mean CPU seconds of so many updates."""
    process.stdin.write(f"{updates}\n")
    process.stdin.flush()
    wall, cpu = json.loads(process.stdout.readline())
    return wall, cpu


def measure(
    processes: dict[str, subprocess.Popen[str]], rounds: int, updates: int
) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of each round of each variant; one more round warms up."""
    names = list(processes)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        # Forwards and backwards in turn, so that none always follows the same other.
        for name in names if turn % 2 else names[::-1]:
            taken[name].append(ask(processes[name], updates))
    return {name: times[1:] for name, times in taken.items()}


def row(name: str, times: list[tuple[float, float]], base: list[tuple[float, float]]) -> list[str]:
    columns = []
    for ours, theirs in zip(zip(*times, strict=True), zip(*base, strict=True), strict=True):
        low, middle, high = statistics.quantiles([a / b for a, b in zip(ours, theirs, strict=True)], n=4)
        columns += [f"{1e3 * statistics.median(ours):.1f}", f"{middle:.2f} ({low:.2f} to {high:.2f})"]
    return [f"`{name}`" if name else "multipod's own", *columns]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", default=VARIANTS, metavar="NAME=VALUE,...")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    print(machine.headline(machine.facts()), flush=True)
    started = {name: start(name) for name in dict.fromkeys(["", *options.variants])}
    running = {name: process for name, process in started.items() if process is not None}
    results = measure(running, options.rounds, options.updates)
    rows = [row(name, times, results[""]) for name, times in results.items()]
    print(machine.table(["variant", "median ms", "/ first", "CPU ms", "/ first"], rows))
    for name in started.keys() - running.keys():
        print(f"`{name}` failed: JAX refuses it, or it crashed.")
    print(f"Load average at the end: {machine.facts()['load']}")
    for process in running.values():
        process.stdin.close()
        process.wait()
    return None


if __name__ == "__main__":
    main()
