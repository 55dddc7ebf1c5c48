"""Measured steps of small recipes on the devices that are here: what `multipod plan calibrate` fits this host to."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from multipod.data.batches import TrainBatches
from multipod.data.global_arrays import owned_rows
from multipod.data.source import ArraySource, Source
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_sharding, make_mesh
from multipod.layout.sync import Sync
from multipod.metrics.objective import Classification, TokenClassification
from multipod.models.bert import tiny_bert
from multipod.models.resnet import SmallResNet
from multipod.optim.adamw import AdamW
from multipod.optim.rates import Cosine, WarmUp
from multipod.optim.sgd import Sgd
from multipod.plan.calibration.fit import Fit, Measurement, fit
from multipod.plan.machine import Machine
from multipod.plan.predict import Prediction, predict_step
from multipod.plan.traced.program import workload_of
from multipod.plan.workload import Workload
from multipod.recipe.recipe import Recipe
from multipod.step.program import program_of

CONSTANTS = ("convolution", "matmul", "memory", "op_s", "message_s", "alone")
"""What is fitted. Hops and links are of no machine whose devices share a memory: messages pass the memory, too; and
no step here was ever held up by arithmetic element by element."""

LIMITS = {"convolution": (0.05, 4.0), "matmul": (0.05, 4.0)}
"""The catalogue's core is one of many kinds; this host's may be faster."""


@dataclass(frozen=True)
class Made:
    """Data of random numbers, made once for a seed."""

    kind: str
    size: int
    classes: int
    examples: int = 1024

    def train(self) -> Source:
        """Images of `size` x `size`, or rows of `size` tokens."""
        rng = np.random.default_rng(0)
        label = rng.integers(0, self.classes, self.examples, np.int32)
        if self.kind == "images":
            image = rng.standard_normal((self.examples, self.size, self.size, 3), np.float32)
            return ArraySource({"image": image, "label": label})
        token = rng.integers(1, self.classes, (self.examples, self.size), np.int32)
        masked = np.tile(np.arange(8, dtype=np.int32), (self.examples, 1))
        words = np.take_along_axis(token, masked, 1)
        return ArraySource({"token": token, "masked": masked, "label": words, "weight": np.ones_like(words)})

    def test(self) -> Source:
        """Returns what `train` returns."""
        return self.train()


def images(width: int, size: int, batch: int, blocks: tuple[int, ...] = (1, 1), layout: Layout | None = None) -> Recipe:
    """A small residual network on random images."""
    return Recipe(
        f"images-{width}-{size}-{batch}{_text(layout)}",
        SmallResNet(channels=3, width=width, blocks=blocks),
        Made("images", size, 10),
        Classification(),
        Sgd(WarmUp(Cosine(0.01), 0.1), momentum=0.9),
        batch=batch,
        updates=10,
        layout=layout or Layout((1, 1)),
    )


def words(features: int, length: int, batch: int, layout: Layout | None = None) -> Recipe:
    """A small BERT on random tokens."""
    return Recipe(
        f"words-{features}-{length}-{batch}{_text(layout)}",
        tiny_bert(512, length, features=features, hidden=4 * features, heads=max(2, features // 64)),
        Made("words", length, 512),
        TokenClassification(tokens_per_example=8),
        AdamW(WarmUp(Cosine(1e-3), 0.1)),
        batch=batch,
        updates=10,
        layout=layout or Layout((1, 1)),
    )


def _text(layout: Layout | None) -> str:
    if layout is None:
        return ""
    rows, columns = layout.mesh
    return f" on {rows}x{columns}" + (", sharded" if layout.sync.zero1 else "")


WHOLE, SHARED = Layout((2, 4)), Layout((2, 4), sync=Sync(sharding="zero1"))

CALIBRATION = (
    images(8, 16, 16),
    images(16, 16, 64),
    images(32, 32, 16),
    images(16, 32, 64, layout=WHOLE),
    images(8, 16, 64, layout=WHOLE),
    words(64, 32, 16),
    words(128, 64, 16),
    words(256, 32, 32, layout=WHOLE),
    words(128, 64, 32, layout=WHOLE),
    words(64, 32, 64, layout=SHARED),
)
"""What is measured to calibrate: two kinds of models, bound by products, by memory, and by operators' starts."""


def step_s(recipe: Recipe, repeats: int = 9) -> float:
    """Seconds of the median step of `recipe` in its layout on the devices that are here; the first two do not count."""
    program = program_of(recipe, make_mesh(recipe.layout))
    rows = owned_rows(batch_sharding(program.mesh), recipe.batch)
    batches = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, rows)
    batch = program.place_batch(batches[0], rows, recipe.batch)
    update, state, go = program.compile_update(), program.init(), program.controls()
    times = []
    for _ in range(repeats + 2):
        began = time.perf_counter()
        state, _ = update(state, batch, go)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - began)
    return float(np.median(times[2:]))


def predict_recipe(recipe: Recipe, workload: Workload, machine: Machine) -> Prediction:
    """The recipe's step on a host with as many devices as its layout has."""
    devices = int(np.prod(recipe.layout.mesh)) if recipe.layout.mesh else machine.devices
    host = replace(machine, devices_per_chip=devices)
    return predict_step(workload, recipe.layout, recipe.batch, host, norm_group=devices)


def priced(recipe: Recipe, workload: Workload, machine: Machine) -> float:
    """The seconds of `predict_recipe`."""
    return predict_recipe(recipe, workload, machine).step_s


def calibrate(
    machine: Machine,
    recipes: Sequence[Recipe] = CALIBRATION,
    told: Callable[[str], Any] = lambda line: None,
) -> tuple[Fit, dict[str, float]]:
    """Measures `recipes` on this host and fits its constants; returns the fit and the measured seconds.

    Half a minute to some minutes, most of it compiling. Other work on the host spoils it.

    Raises:
      PlanError: measurements that cannot be.
    """
    measured, measurements = {}, []
    for recipe in recipes:
        told(f"measuring {recipe.name}")
        measured[recipe.name] = step_s(recipe)
        price = partial(priced, recipe, workload_of(recipe))
        measurements.append(Measurement(recipe.name, measured[recipe.name], price))
    return fit(machine, measurements, CONSTANTS, LIMITS), measured


def memory_bytes(recipe: Recipe) -> int:
    """What XLA lays out for the recipe's step on one device: compiled for the devices that are here, not run."""
    from multipod.layout.compiled import facts_of

    return facts_of(program_of(recipe, make_mesh(recipe.layout)).lowered.compile()).memory.peak
