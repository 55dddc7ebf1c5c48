"""One rank of the PyTorch peer: the digits network under DistributedDataParallel over gloo.

`step_time.py` starts it and talks to it by pipes: a line `loop 20` or `step 20` asks for 20 updates, with
or without the data pipeline, and the answer is one line of JSON. Between commands a rank sleeps on its
pipe. Batch norm is per rank: SyncBatchNorm does not run on CPU. Strided convolutions pad both sides by one,
where JAX pads the end only: the same work, not the same numbers.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from multipod.data.batches import TrainBatches
from multipod.recipe.recipe import Recipe
from multipod.recipes.digits import digits


class Block(nn.Module):
    """`multipod.models.resnet`'s basic block."""

    def __init__(self, features_in: int, features: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(features_in, features, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(features)
        self.conv2 = nn.Conv2d(features, features, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(features)
        same = features_in == features and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(features_in, features, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output."""
        y = F.silu(self.norm1(self.conv1(x)))
        return F.silu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """`SmallResNet()`, channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2))
        self.head = nn.Linear(64, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Logits [examples, 10] for images [examples, 1, 8, 8]."""
        x = F.silu(self.norm(self.stem(image)))
        return self.head(self.blocks(x).mean((2, 3)))


class Training:
    """The network, its optimizer and its data, on this rank."""

    def __init__(self, recipe: Recipe, rank: int, ranks: int) -> None:
        torch.manual_seed(recipe.seed)
        # Channels last and the fused optimizer were the fastest of the four combinations.
        self.model: nn.Module = ResNet().to(memory_format=torch.channels_last)
        if ranks > 1:
            self.model = DistributedDataParallel(self.model, forward_sync_buffers=False, gradient_as_bucket_view=True)
        self.recipe, optimizer = recipe, recipe.optimizer
        weights = list(self.model.parameters())
        groups = [
            {"params": [w for w in weights if w.ndim > 1], "weight_decay": optimizer.weight_decay},
            {"params": [w for w in weights if w.ndim <= 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=optimizer.rate.then.peak, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self.rate)
        rows = np.arange(recipe.batch).reshape(ranks, -1)[rank]
        self.batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, rows)
        self.incoming = self.batches.start(0)
        self.fixed = tensors(self.batches[0])
        self.losses: list[float] = []

    def rate(self, update: int) -> float:
        """The share of the peak rate: linear warm-up, then a cosine to 0."""
        warmup = round(self.recipe.optimizer.rate.share * self.recipe.updates)
        if update < warmup:
            return update / warmup
        return (1 + math.cos(math.pi * min(1.0, (update - warmup) / max(self.recipe.updates - warmup, 1)))) / 2

    def loop(self, updates: int) -> Iterator[float]:
        """Seconds of each update, the data pipeline included."""
        for _ in range(updates):
            start = time.perf_counter()
            self.losses.append(self.update(*tensors(next(self.incoming))))
            yield time.perf_counter() - start

    def step(self, updates: int) -> Iterator[float]:
        """Seconds of each update on one batch that is there already."""
        for _ in range(updates):
            start = time.perf_counter()
            self.update(*self.fixed)
            yield time.perf_counter() - start

    def update(self, image: torch.Tensor, label: torch.Tensor) -> float:
        """One update; returns this rank's loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(image), label, label_smoothing=self.recipe.objective.label_smoothing)
        loss.backward()
        self.optimizer.step()
        self.schedule.step()
        return loss.item()


def tensors(batch: dict[str, np.ndarray]) -> tuple[torch.Tensor, torch.Tensor]:
    # [n, 8, 8, 1] and [n, 1, 8, 8] lie alike in memory when channels come last: nothing is copied.
    return torch.from_numpy(batch["image"]).permute(0, 3, 1, 2), torch.from_numpy(batch["label"]).long()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True, help="length of the run, for the rate's schedule")
    parser.add_argument("--meet", required=True, help="a file that the ranks of one run share")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.ranks > 1:
        address = f"file://{options.meet}"
        distributed.init_process_group("gloo", address, rank=options.rank, world_size=options.ranks)
    training = Training(replace(digits(), updates=options.updates), options.rank, options.ranks)
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        kind, updates = line.split()
        seconds = list(getattr(training, kind)(int(updates)))
        print(json.dumps({"seconds": seconds, "losses": training.losses}), flush=True)


if __name__ == "__main__":
    main()
