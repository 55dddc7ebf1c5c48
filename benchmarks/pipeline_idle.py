"""Idle time and resident memory of pipelines on real processes: GPipe, PipeDream and PipeMare, a process a stage.

A stage's work is to sleep, forward and twice as long back, so that any number of stages works at once on any number of
cores; its weights are one large matrix under SGD with momentum (PipeMare with T2), so that weight-sized arrays are what
a process's resident memory grows by. Beside each figure stands the closed form (`multipod.pipelines.model`).

    python benchmarks/pipeline_idle.py --stages 4 8
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import memory

KINDS = ("gpipe", "pipedream", "pipemare")
LIMIT_S = 300


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    arguments.add_argument("--forward-ms", type=float, default=30.0)
    arguments.add_argument("--features", type=int, default=2048, help="of a stage's matrix: 16 MiB")
    arguments.add_argument("--steps", type=int, default=3)
    arguments.add_argument("--markdown", type=Path)
    arguments.add_argument("--rank", type=int, nargs=4, metavar=("RANK", "RANKS", "PORT", "MICRO"), help="a process")
    a = arguments.parse_args()
    if a.rank:
        process(*a.rank, a.forward_ms, a.features, a.steps)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process is left behind
    found = {}
    for stages in a.stages:
        found[stages] = measured(stages, 2 * stages, a)
        text = page(a, found)
        if a.markdown:
            a.markdown.write_text(text + "\n", encoding="utf-8")
    print(text)


def measured(stages: int, micro: int, a: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """What each process says of each kind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, __file__, "--forward-ms", str(a.forward_ms), "--features", str(a.features),
               "--steps", str(a.steps)]  # fmt: skip
    ranks = [
        subprocess.Popen(
            [*command, "--rank", str(rank), str(stages), str(port), str(micro)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(stages)
    ]
    try:
        said = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    each = [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]
    if any(len(lines) != len(KINDS) for lines in each):
        raise RuntimeError(f"{stages} stages: a process ended early; run one by itself with --rank to see why.")
    return {kind: [lines[n] for lines in each] for n, kind in enumerate(KINDS)}


def page(a: argparse.Namespace, found: dict[int, dict[str, list[dict[str, float]]]]) -> str:
    """The tables."""
    from multipod.pipelines.model import cost

    rows, held = [], []
    for stages, kinds in found.items():
        micro = 2 * stages
        for kind, ranks in kinds.items():
            known = cost(kind, stages, micro, "momentum")
            used = sum(r["worked_s"] / r["wall_s"] for r in ranks) / stages
            rows.append([f"P = {stages}, N = {micro}", kind, f"{used:.1%}", f"{float(known.utilisation):.1%}",
                         f"{sum(r['cpu_s'] for r in ranks) / stages * 1e3:.0f}"])  # fmt: skip
            copies = [r["grown_mb"] / r["matrix_mb"] for r in ranks]
            held.append([f"P = {stages}, N = {micro}", kind, f"{sum(copies) / stages:.2f}",
                         f"{min(copies):.2f} to {max(copies):.2f}", f"{float(known.weight_copies):.2f}",
                         f"{max(r['peak_mb'] for r in ranks):.0f}"])  # fmt: skip
    facts = machine.headline(machine.facts())
    return "\n\n".join([
        "# Idle time and memory of pipelines, on real processes",
        f"One process a stage; it sleeps {a.forward_ms:g} ms forward and {2 * a.forward_ms:g} ms back; a matrix of "
        f"{a.features} x {a.features} a stage; {a.steps} steps after the pipe is full. {facts}, "
        f"commit {machine.commit()}.",
        machine.table(["pipeline", "method", "in use, measured", "in use, model", "CPU ms a step"], rows),
        machine.table(["pipeline", "method", "weight-sized arrays, measured", "by process", "model", "peak MB"], held),
    ])  # fmt: skip


def process(rank: int, ranks: int, port: int, micro: int, forward_ms: float, features: int, steps: int) -> None:
    """One stage: a JSON line for each kind."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NPROC": "2"}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # gloo greets on standard output
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", ranks, rank)
    for kind in KINDS:
        answers.write(json.dumps(one_kind(kind, ranks, micro, forward_ms, features, steps)) + "\n")


def one_kind(kind: str, ranks: int, micro: int, forward_ms: float, features: int, steps: int) -> dict[str, float]:
    """What a process measures of itself: times, and how much of it is resident with the pipeline and without."""
    import jax

    step = pipeline(kind, ranks, micro, forward_ms, features)
    for _ in range(1 + -(-2 * ranks // micro)):  # compiles, and fills the pipe
        step()
    memory.forget_peak()
    began, cpu = time.monotonic(), time.process_time()
    for _ in range(steps):
        step()
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu
    peak = memory.peak_mb()
    del step
    jax.clear_caches()
    memory.forget_peak()
    return {
        "wall_s": wall_s, "cpu_s": cpu_s / steps, "worked_s": steps * micro * 3 * forward_ms / 1e3, "peak_mb": peak,
        "grown_mb": peak - memory.resident_mb(), "matrix_mb": features * features * 4 / 2**20,
    }  # fmt: skip


def pipeline(kind: str, ranks: int, micro: int, forward_ms: float, features: int) -> Any:
    """A step of stages y = nap(x W)."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from multipod.execute.pipeline import Pipe
    from multipod.pipelines.build import build
    from multipod.pipelines.check import check

    proof = check(build(kind, ranks, micro, 1 if kind == "gpipe" else 3 + 2 * -(-2 * ranks // micro)))
    parts = parts_of(kind, stages(ranks, forward_ms, features * micro), proof)
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    shapes = [jax.ShapeDtypeStruct((features, features), "float32")] * ranks
    pipe = Pipe(proof, parts, shapes, jax.ShapeDtypeStruct((1, features), "float32"), mesh)
    start = lambda: pipe.fresh([jnp.eye(features) / 2] * ranks)  # noqa: E731
    state = [jax.jit(start, out_shardings=pipe.shardings(jax.eval_shape(start)))()]
    update = pipe.compiled(shapes)
    whole = NamedSharding(mesh, PartitionSpec())
    given = np.ones((micro, 1, features), np.float32)
    batches = jax.make_array_from_callback(given.shape, whole, lambda at: given[at])

    def step() -> None:
        state[0], _ = update(state[0], batches, True)
        jax.block_until_ready(state[0])

    return step


def stages(ranks: int, forward_ms: float, numbers: int) -> list[Any]:
    """Functions (weights, x, aux) of all stages; each naps, twice as long backward. The loss is over `numbers`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def slept(milliseconds: float, x: Any) -> Any:
        def nap(held: Any) -> Any:
            time.sleep(milliseconds / 1e3)
            return np.asarray(held)

        return jax.pure_callback(nap, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def work(x: Any) -> Any:
        return slept(forward_ms, x)

    work.defvjp(lambda x: (slept(forward_ms, x), ()), lambda _, dy: (slept(2 * forward_ms, dy),))

    def first(weights: Any, x: Any, aux: Any) -> Any:
        return work(aux @ weights), {}

    def middle(weights: Any, x: Any, aux: Any) -> Any:
        return work(x @ weights), {}

    def last(weights: Any, x: Any, aux: Any) -> Any:
        loss = jnp.sum(work(x @ weights)) / numbers
        return loss, {"loss": loss}

    return [first, *[middle] * (ranks - 2), last]


def parts_of(kind: str, functions: list[Any], proof: Any) -> list[Any]:
    """The stages with their optimizers: momentum, and PipeMare's T2 where the kind is `pipemare`."""
    import optax

    from multipod.execute.delays import Part
    from multipod.optim.pipemare import PipeMare

    momentum, parts = optax.sgd(1e-6, momentum=0.9), []
    for n, function in enumerate(functions):
        if kind == "pipemare":
            mare, delay = PipeMare(decay=0.135), float(proof.mean_delay(n))
            back = lambda w, s, on, mare=mare, delay=delay: mare.backward_weights(w, s, delay * on)  # noqa: E731
            parts.append(Part(function, mare.wrap(momentum, delay), back, kind=function))
        else:
            parts.append(Part(function, momentum, kind=function))
    return parts


if __name__ == "__main__":
    main()
