"""One rank of `weight_update.py`: does updates when asked to, and sleeps in between.

python weight_update_ranks.py torch|jax KIND LAYERS RANKS MEET ADDRESS RANK
"""

import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Client
from typing import Any

import memory
import numpy as np

from multipod import runtime

VOCAB, FEATURES, HEADS, ROWS, LENGTH = 4096, 512, 8, 2, 64
"""Rows are those of one rank."""

Step = Callable[[], object]


def memory_mb() -> dict[str, float]:
    return {"resident": memory.resident_mb(), "peak": memory.peak_mb()}


def torch_rank(kind: str, layers: int, ranks: int, meet: str, rank: int) -> tuple[Step, Callable[[], float], int]:
    import torch
    from torch import distributed, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    distributed.init_process_group("gloo", f"file://{meet}", rank=rank, world_size=ranks)

    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(FEATURES, HEADS, 4 * FEATURES, 0.0, batch_first=True, norm_first=True)

    model: nn.Module = nn.Sequential(
        nn.Embedding(VOCAB, FEATURES), *(layer() for _ in range(layers)), nn.Linear(FEATURES, VOCAB)
    )
    count = sum(parameter.numel() for parameter in model.parameters())
    if kind == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind != "local":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    if kind == "zero1":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.Adam, lr=1e-4)
    else:
        optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    def state_mb() -> float:
        held = (optimizer.optim if kind == "zero1" else optimizer).state.values()
        tensors = [t for one in held for t in one.values() if torch.is_tensor(t)]
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in local) / 2**20

    return step, state_mb, count


def jax_rank(kind: str, layers: int, ranks: int, meet: str, rank: int) -> tuple[Step, Callable[[], float], int]:
    import jax

    jax.distributed.initialize(meet, ranks, rank)
    from multipod.data.source import ArraySource
    from multipod.layout.layout import Layout
    from multipod.layout.mesh import make_mesh
    from multipod.layout.sync import Sync
    from multipod.metrics.objective import TokenClassification
    from multipod.models.bert import Bert
    from multipod.optim.adamw import AdamW
    from multipod.optim.rates import Constant
    from multipod.recipe.recipe import Recipe
    from multipod.step.program import program_of
    from multipod.step.state import device_bytes

    class Tokens:
        def train(self) -> ArraySource:
            token = np.random.default_rng(0).integers(1, VOCAB, (ROWS * ranks, LENGTH)).astype(np.int32)
            return ArraySource({"token": token, "label": token, "weight": np.ones_like(token)})

        test = train

    layout = Layout(
        (1, ranks), sync=Sync(sharding="fsdp" if kind == "weights" else "zero1" if kind == "update" else "none")
    )
    model = Bert(VOCAB, FEATURES, 4 * FEATURES, HEADS, layers, positions=LENGTH, next_sentence=False, dropout=0.0)
    adam = AdamW(Constant(1e-4))
    objective = TokenClassification()
    recipe = Recipe("bench", model, Tokens(), objective, adam, ROWS * ranks, 1000, layout=layout)
    program = program_of(recipe, make_mesh(layout))
    update, state = program.compile_update(), program.init()
    runtime.release_memory()  # as a run does
    mine = np.arange(ROWS * rank, ROWS * (rank + 1))
    batch = program.place_batch(Tokens().train().read(mine), mine, ROWS * ranks)
    flags = program.controls()
    held = [state]

    def step() -> None:
        held[0], sums = update(held[0], batch, flags)
        jax.block_until_ready((held[0], sums))

    state = None
    count = sum(leaf.size for leaf in jax.tree.leaves(program.shapes.params))
    return step, lambda: device_bytes(program.shapes.optimizer) / 2**20, count


def main() -> None:
    engine, kind, layers, ranks, meet, address, rank = sys.argv[1:]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.sched_setaffinity(0, [int(rank) % os.cpu_count()])  # one core a rank: JAX sizes its pools by it
    build = {"torch": torch_rank, "jax": jax_rank}[engine]
    with Client(address) as parent:
        if engine == "jax":
            runtime.prepare(cpu_devices=1, cache=runtime.default_cache(), processes=int(ranks))
        __import__(engine)
        before = memory_mb()["resident"]
        step, state_mb, count = build(kind, int(layers), int(ranks), meet, int(rank))
        parent.send(count)
        while updates := parent.recv():
            cpu, begin = time.process_time(), time.monotonic()
            for _ in range(updates):
                step()
            end, used = time.monotonic(), memory_mb()
            parent.send(
                {
                    "rank": int(rank), "begin": begin, "end": end, "cpu_s": time.process_time() - cpu,
                    "resident_mb": used["resident"] - before, "peak_mb": used["peak"] - before, "state_mb": state_mb(),
                }
            )  # fmt: skip


if __name__ == "__main__":
    main()
