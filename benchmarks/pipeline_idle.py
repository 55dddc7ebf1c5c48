"""Idle time and resident memory of pipelines on real processes: GPipe, PipeDream and PipeMare, a process a stage.

Two measurements, because one would spoil the other. Time: a stage's work is to sleep, forward and twice as long back,
so that any number of stages works at once on any number of cores; its matrix is small. Memory: a stage's weights are
one large matrix under SGD with momentum (PipeMare with T2), and nobody sleeps, so that weight-sized arrays are what a
process's resident memory grows by. Beside each figure stands the closed form (`multipod.pipelines.model`), and beside
the memory what the compiler has set aside.

    python benchmarks/pipeline_idle.py --stages 4 8
"""

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import machine
import memory

KINDS = ("gpipe", "pipedream", "pipemare")
LIMIT_S = 1800


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--stages", type=int, nargs="+", default=[4, 8])
    arguments.add_argument("--forward-ms", type=float, default=250.0)
    arguments.add_argument("--small", type=int, default=64, help="features of a stage's matrix while time is measured")
    arguments.add_argument("--features", type=int, default=2048, help="the same for memory: 16 MiB")
    arguments.add_argument("--rounds", type=int, default=2, help="of all methods, one after the other, for time")
    arguments.add_argument("--steps", type=int, default=1, help="in each round")
    arguments.add_argument("--markdown", type=Path)
    arguments.add_argument("--rank", type=int, nargs=4, metavar=("RANK", "RANKS", "PORT", "MICRO"), help="a process")
    a = arguments.parse_args()
    if a.rank:
        process(a)
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
    names = ("forward_ms", "small", "features", "rounds", "steps")
    given = [word for name in names for word in (f"--{name.replace('_', '-')}", str(getattr(a, name)))]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *given, "--rank", str(rank), str(stages), str(port), str(micro)],
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
    facts = machine.headline(machine.facts())
    return "\n\n".join([
        "# Idle time and memory of pipelines, on real processes",
        f"One process a stage. Time: a stage sleeps {a.forward_ms:g} ms forward and {2 * a.forward_ms:g} ms back, its "
        f"matrix is {a.small} x {a.small}; medians of {a.rounds} rounds of {a.steps} steps, the methods in turn, the "
        f"pipe full. Memory: a matrix of {a.features} x {a.features} a stage, nobody sleeps. {facts}, "
        f"commit {machine.commit()}.",
        times(found),
        copies(found),
        at_the_papers_size(),
    ])  # fmt: skip


def times(found: dict[int, dict[str, list[dict[str, float]]]]) -> str:
    """The share of time that stages are at work."""
    from multipod.pipelines.model import cost

    rows = []
    for stages, kinds in found.items():
        for kind, ranks in kinds.items():
            known = float(cost(kind, stages, 2 * stages, "momentum").utilisation)
            used = statistics.mean(r["used"] for r in ranks)
            rows.append([f"P = {stages}, N = {2 * stages}", kind, f"{used:.1%}", f"{known:.1%}", f"{used / known:.3f}",
                         f"{1e3 * statistics.mean(r['cpu_s'] for r in ranks):.0f}"])  # fmt: skip
    return machine.table(["pipeline", "method", "in use, measured", "model", "ratio", "CPU ms a step, process"], rows)


def copies(found: dict[int, dict[str, list[dict[str, float]]]]) -> str:
    """Weight-sized arrays of each process."""
    from multipod.pipelines.model import cost

    rows = []
    for stages, kinds in found.items():
        for kind, ranks in kinds.items():
            known = float(cost(kind, stages, 2 * stages, "momentum").weight_copies)
            grown = [r["grown_mb"] / r["matrix_mb"] for r in ranks]
            kept, temporary = (ranks[0][name] / ranks[0]["matrix_mb"] for name in ("state_mb", "temporary_mb"))
            rows.append([f"P = {stages}, N = {2 * stages}", kind, f"{known:.2f}", f"{statistics.mean(grown):.2f}",
                         f"{min(grown):.2f} to {max(grown):.2f}", f"{kept:.2f} + {temporary:.2f}",
                         f"{max(r['peak_mb'] for r in ranks):.0f}"])  # fmt: skip
    head = ["pipeline", "method", "weight-sized arrays, model", "measured", "by process", "compiler: state + temporary",
            "peak MB"]  # fmt: skip
    return machine.table(head, rows)


def at_the_papers_size() -> str:
    """The model where the paper's headline is: ResNet-50 in 107 stages, 8 micro-batches."""
    from multipod.experiments.pipemare.theory import resnet_memory
    from multipod.pipelines.model import cost

    gpipe, mare = (cost(kind, 107, 8, "momentum") for kind in ("gpipe", "pipemare"))
    more = float(mare.utilisation / gpipe.utilisation)
    return "\n\n".join([
        "**At the paper's size, by the model** (P = 107, a stage for each layer with weights of ResNet-50; N = 8, our "
        "reading; momentum SGD, so three arrays without a pipeline): GPipe is in use "
        f"{float(gpipe.utilisation):.1%} of the time, PipeMare all of it, {more:.2f} times as much (the paper: "
        "14.3). Memory for weights and optimizer: PipeMare with T2 "
        f"{float(mare.weight_copies) / 3:.2f} times that of GPipe; PipeDream's depends on where the large layers are "
        "(the paper: 2.70). " + resnet_memory()[1],
    ])  # fmt: skip


def process(a: argparse.Namespace) -> None:
    """One stage: a JSON line for each kind."""
    rank, ranks, port, micro = a.rank
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "NPROC": "2"}
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # gloo greets on standard output
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", ranks, rank)
    time_of = timed(ranks, micro, a)
    for kind in KINDS:
        answers.write(json.dumps(time_of[kind] | held(kind, ranks, micro, a.features)) + "\n")


def timed(ranks: int, micro: int, a: argparse.Namespace) -> dict[str, dict[str, float]]:
    """For each kind the share of its time that this process is at work, and the processor seconds of a step."""
    steps = {kind: pipeline(kind, ranks, micro, a.forward_ms, a.small)[0] for kind in KINDS}
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for step in steps.values():
        fill(step, ranks, micro)
    for _ in range(a.rounds):
        for kind, step in steps.items():
            began, cpu = time.monotonic(), time.process_time()
            for _ in range(a.steps):
                step()
            found[kind].append((time.monotonic() - began, time.process_time() - cpu))
    worked = a.steps * micro * 3 * a.forward_ms / 1e3
    return {
        kind: {"used": worked / statistics.median(wall for wall, _ in each),
               "cpu_s": statistics.median(cpu for _, cpu in each) / a.steps}
        for kind, each in found.items()
    }  # fmt: skip


def held(kind: str, ranks: int, micro: int, features: int) -> dict[str, float]:
    """How much of this process is resident with a pipeline and without; and what the compiler has set aside."""
    import jax

    step, planned = pipeline(kind, ranks, micro, 0.0, features)
    fill(step, ranks, micro)
    memory.forget_peak()
    step()
    peak = memory.peak_mb()
    del step
    jax.clear_caches()
    memory.forget_peak()
    return {
        "peak_mb": peak, "grown_mb": peak - memory.resident_mb(), "matrix_mb": features * features * 4 / 2**20,
        "state_mb": planned.argument_size_in_bytes / 2**20, "temporary_mb": planned.temp_size_in_bytes / 2**20,
    }  # fmt: skip


def fill(step: Any, ranks: int, micro: int) -> None:
    """Steps until an asynchronous pipe is full."""
    for _ in range(1 + -(-2 * ranks // micro)):
        step()


def pipeline(kind: str, ranks: int, micro: int, forward_ms: float, features: int) -> tuple[Any, Any]:
    """A step of stages y = nap(x W), and the compiler's figures of its memory."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from multipod.execute.pipeline.pipe import Pipe
    from multipod.execute.pipeline.setup import PipelineSetup
    from multipod.pipelines.build import build
    from multipod.pipelines.check import check

    proof = check(build(kind, ranks, micro, 1 if kind == "gpipe" else 3 + 2 * -(-2 * ranks // micro)))
    parts = parts_of(kind, stages(ranks, forward_ms, features * micro), proof)
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    shapes = [jax.ShapeDtypeStruct((features, features), "float32")] * ranks
    pipe = Pipe(PipelineSetup(proof, parts, shapes, jax.ShapeDtypeStruct((1, features), "float32"), mesh))
    start = lambda: pipe.fresh([jnp.eye(features) / 2] * ranks)  # noqa: E731
    state = [jax.jit(start, out_shardings=pipe.shardings(jax.eval_shape(start)))()]
    whole = NamedSharding(mesh, PartitionSpec())
    given, on = np.ones((micro, 1, features), np.float32), np.asarray(True)
    batches, delayed = (jax.make_array_from_callback(v.shape, whole, lambda at, v=v: v[at]) for v in (given, on))
    update = pipe.compiled(shapes).lower(state[0], batches, delayed).compile()  # type: ignore[attr-defined]

    def step() -> None:
        state[0], _ = update(state[0], batches, delayed)
        jax.block_until_ready(state[0])

    return step, update.memory_analysis()


def stages(ranks: int, forward_ms: float, numbers: int) -> list[Any]:
    """Functions (weights, x, aux) of all stages; each naps, twice as long backward. The loss is over `numbers`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def slept(milliseconds: float, x: Any) -> Any:
        if not milliseconds:
            return x

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

    from multipod.execute.pipeline.delays import PipelinePart
    from multipod.optim.pipemare import PipeMare

    momentum, parts = optax.sgd(1e-6, momentum=0.9), []
    for n, function in enumerate(functions):
        if kind == "pipemare":
            mare, delay = PipeMare(decay=0.135), float(proof.mean_delay(n))
            back = lambda w, s, on, mare=mare, delay=delay: mare.backward_weights(w, s, delay * on)  # noqa: E731
            parts.append(PipelinePart(function, mare.wrap(momentum, delay), back, kind=function))
        else:
            parts.append(PipelinePart(function, momentum, kind=function))
    return parts


if __name__ == "__main__":
    main()
