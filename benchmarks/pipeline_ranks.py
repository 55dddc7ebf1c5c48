"""One process of a case of `pipeline.py`: waits for `go N` on standard input, trains N steps, answers with a JSON line.

python pipeline_ranks.py ENGINE KIND RANK RANKS PORT LAYERS FEATURES BATCH LENGTH MICRO_BATCHES
"""

import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import memory

HEADS = 8


def main() -> None:
    engine, kind, *numbers = sys.argv[1:]
    rank, ranks, port, layers, features, batch, length, micro = map(int, numbers)
    if kind != "serial":
        one_core(rank)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # gloo greets on standard output
    make = {"ours": ours, "torch": torch_peer}[engine]
    step, barrier = make(kind, rank, ranks, port, layers, features, batch, length, micro)
    answers.write("made\n")
    sys.stdin.readline()  # all have compiled: gloo's processes wait for each other for 30 s and no longer
    step()
    process_mb = memory.peak_mb()
    memory.forget_peak()
    answers.write("ready\n")
    for line in sys.stdin:
        count = int(line.split()[1])
        barrier()
        before, start = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        loss = None
        for _ in range(count):
            loss = step()
        end, after = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        system = (after.ru_stime - before.ru_stime) / count
        answer = {
            "start": start, "end": end, "loss": loss, "peak_mb": memory.peak_mb(), "process_mb": process_mb,
            "cpu": (after.ru_utime - before.ru_utime) / count + system, "system": system,
            "faults": (after.ru_minflt - before.ru_minflt) / count,
        }  # fmt: skip
        answers.write(json.dumps(answer) + "\n")


def one_core(rank: int) -> None:
    """Holds this process, and all threads that it will have, to one core, before an engine counts them. Linux.

    XLA runs products that do not wait for each other on its pool's threads, whatever its flag for Eigen says: a serial
    run "with one thread" took 1.6 cores, and was then the yardstick of pipelines of one core a process.
    """
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def ours(
    kind: str, rank: int, ranks: int, port: int, layers: int, features: int, batch: int, length: int, micro: int
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """Our pipeline on one CPU device of each process, or the same micro-batches one after the other in one."""
    threads = 2 if kind == "serial" else 1
    eigen = "" if threads > 1 else " --xla_cpu_multi_thread_eigen=false"
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "NPROC": str(max(threads, 2)),
        "XLA_FLAGS": eigen.strip(),
        "JAX_COMPILATION_CACHE_DIR": str(Path(tempfile.gettempdir()) / "multipod-pipeline-benchmark"),
    }
    import jax
    import numpy as np

    serial = kind.startswith("serial")
    if not serial:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", ranks, rank)
    n = 1 if kind == "serial" else micro
    parts = 1 if serial else ranks
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((n, batch // n, length, features), np.float32) for _ in range(2))
    each = layers // parts
    weights = [
        [_block_weights(np.random.default_rng(p * each + k), features) for k in range(each)] for p in range(parts)
    ]
    if serial:
        return _in_one(_part(True, True, n), weights[0], x, y), lambda: None
    functions = [_part(p == 0, p == parts - 1, n) for p in range(parts)]
    return _piped(kind, ranks, micro, functions, weights, {"x": x, "y": y}), lambda: None


def _part(first: bool, last: bool, micro: int) -> Callable[[Any, Any, Any], Any]:
    """The blocks of one part of the model; the last one's output is its share of the loss of `micro` micro-batches."""
    import jax.numpy as jnp

    def function(weights: Any, x: Any, aux: Any) -> Any:
        h = aux["x"] if first else x
        for block in weights:
            h = _block(block, h)
        if not last:
            return h, {}
        loss = jnp.mean((h - aux["y"]) ** 2) / micro
        return loss, {"loss": loss}

    return function


def _in_one(function: Callable[[Any, Any, Any], Any], weights: Any, x: Any, y: Any) -> Callable[[], float]:
    """A step of the whole model, micro-batches one after the other."""
    import jax
    import jax.numpy as jnp

    def gradients(weights: Any, x: Any, y: Any) -> Any:
        def one(total: Any, batch: Any) -> Any:
            aux = {"x": batch[0], "y": batch[1]}
            (loss, _), own = jax.value_and_grad(lambda w: function(w, (), aux), has_aux=True)(weights)
            return jax.tree.map(jnp.add, total, own), loss

        total, losses = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, weights), (x, y))
        return jax.tree.map(lambda w, g: w - 0.0 * g, weights, total), losses.sum()

    state = [jax.device_put(weights)]
    run = jax.jit(gradients, donate_argnums=0).lower(state[0], x, y).compile()

    def step() -> float:
        state[0], loss = run(state[0], x, y)
        jax.block_until_ready(state[0])
        return float(loss)

    return step


def _piped(kind: str, ranks: int, micro: int, functions: Any, weights: Any, given: dict[str, Any]) -> Callable[[], Any]:
    """A step of the pipeline called `kind`."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh

    from multipod.execute.pipeline.delays import PipelinePart
    from multipod.execute.pipeline.pipe import Pipe
    from multipod.execute.pipeline.setup import PipelineSetup
    from multipod.pipelines.build import build
    from multipod.pipelines.check import check

    sgd = optax.sgd(0.0)
    aux = {name: jax.ShapeDtypeStruct(a.shape[1:], a.dtype) for name, a in given.items()}
    asynchronous = kind in ("pipemare", "pipedream")
    proof = check(build(kind, ranks, micro, 3 + 2 * -(-2 * ranks // micro) if asynchronous else 1))
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    parts = [PipelinePart(f, sgd, kind=k) for f, k in zip(functions, _kinds(ranks), strict=True)]
    pipe = Pipe(PipelineSetup(proof, parts, weights, aux, mesh))
    held = [pipe.begin(weights)]
    batches = jax.tree.map(
        lambda a: jax.make_array_from_callback(
            a.shape, jax.NamedSharding(mesh, jax.sharding.PartitionSpec()), lambda at: a[at]
        ),
        given,
    )
    on = jax.make_array_from_callback(
        (), jax.NamedSharding(mesh, jax.sharding.PartitionSpec()), lambda at: np.asarray(True)
    )
    update = pipe.compiled(weights).lower(held[0], batches, on).compile()

    def step() -> float:
        held[0], sums = update(held[0], batches, on)
        jax.block_until_ready(held[0])
        return float(sums["loss"])

    return step


def _kinds(parts: int) -> list[str]:
    """First, middle and last parts have functions of their own."""
    return ["first", *["middle"] * (parts - 2), "last"][:parts]


def _block_weights(random: Any, features: int) -> dict[str, Any]:
    import numpy as np

    draw = lambda *shape: random.standard_normal(shape, np.float32) * shape[0] ** -0.5  # noqa: E731
    ones, zeros = np.ones(features, np.float32), np.zeros(features, np.float32)
    return {
        "qkv": draw(features, 3 * features), "qkv_bias": np.zeros(3 * features, np.float32),
        "out": draw(features, features), "out_bias": zeros,
        "up": draw(features, 4 * features), "up_bias": np.zeros(4 * features, np.float32),
        "down": draw(4 * features, features), "down_bias": zeros,
        "scale1": ones, "shift1": zeros, "scale2": ones, "shift2": zeros,
    }  # fmt: skip


def _block(w: dict[str, Any], x: Any) -> Any:
    """torch.nn.TransformerEncoderLayer with norm_first, ReLU and no dropout."""
    import jax
    import jax.numpy as jnp

    def norm(x: Any, scale: Any, shift: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale + shift

    rows, length, features = x.shape
    q, k, v = jnp.split((norm(x, w["scale1"], w["shift1"]) @ w["qkv"] + w["qkv_bias"]), 3, -1)
    q, k, v = (t.reshape(rows, length, HEADS, -1).transpose(0, 2, 1, 3) for t in (q, k, v))
    scores = jax.nn.softmax(q @ k.transpose(0, 1, 3, 2) * (features // HEADS) ** -0.5, -1)
    mixed = (scores @ v).transpose(0, 2, 1, 3).reshape(rows, length, features)
    x = x + mixed @ w["out"] + w["out_bias"]
    hidden = jax.nn.relu(norm(x, w["scale2"], w["shift2"]) @ w["up"] + w["up_bias"])
    return x + hidden @ w["down"] + w["down_bias"]


def torch_peer(
    kind: str, rank: int, ranks: int, port: int, layers: int, features: int, batch: int, length: int, micro: int
) -> tuple[Callable[[], Any], Callable[[], None]]:
    """`torch.distributed.pipelining` over gloo, or the same micro-batches in one process."""
    import torch
    from torch import distributed, nn

    torch.set_num_threads(2 if kind == "serial" else 1)
    block = lambda: nn.TransformerEncoderLayer(features, HEADS, 4 * features, 0.0, batch_first=True, norm_first=True)  # noqa: E731
    x, y = torch.randn(batch, length, features), torch.randn(batch, length, features)
    if kind.startswith("serial"):
        model = nn.Sequential(*[block() for _ in range(layers)])
        n = 1 if kind == "serial" else micro

        def alone() -> float:
            total = 0.0
            for a, b in zip(x.chunk(n), y.chunk(n), strict=True):
                loss = nn.functional.mse_loss(model(a), b) / n
                loss.backward()
                total += float(loss.detach())
            model.zero_grad(set_to_none=True)
            return total

        return alone, lambda: None
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    model = nn.Sequential(*[block() for _ in range(layers // ranks)])
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[kind](stage, micro, loss_fn=nn.functional.mse_loss)

    def step() -> float | None:
        losses: list[Any] = []
        schedule.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == ranks - 1 else {}))
        model.zero_grad(set_to_none=True)
        return float(sum(loss.detach() for loss in losses) / micro) if losses else None

    return step, distributed.barrier


if __name__ == "__main__":
    main()
