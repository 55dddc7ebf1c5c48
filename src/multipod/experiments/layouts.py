"""Three models in every layout of eight devices: what they learn, hold, send and take."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding

from multipod.data.batches import TrainBatches
from multipod.data.docstrings import Docstrings
from multipod.data.source import ArraySource
from multipod.experiments.experiments import Report
from multipod.experiments.outcome import Claim, Outcome, Section
from multipod.layout.compiled import facts_of
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.layout.text import spelled
from multipod.metrics.objective import Classification, TokenClassification
from multipod.models.images import IMAGE_DIMS
from multipod.models.resnet import SmallResNet
from multipod.models.transformer import small_transformer
from multipod.nn.images.conv_norm import ConvNorm, Style
from multipod.nn.model import FlaxModel
from multipod.optim.adamw import AdamW
from multipod.optim.lamb import Lamb
from multipod.optim.lars import Lars
from multipod.optim.rates import Cosine, WarmUp
from multipod.pytrees import Batch
from multipod.recipe.recipe import Recipe
from multipod.step.inspect import totals
from multipod.step.program import Program
from multipod.step.unstaged import UnstagedProgram

UPDATES = 12
SAME = 1e-3
"""The largest relative difference of a loss that passes as rounding, over `UPDATES` updates."""

DATA = (Layout((2, 4)), Layout((2, 4), sync=Sync(sharding="zero1")), Layout((2, 4), sync=Sync(sharding="fsdp")))
SPATIAL = tuple(
    Layout(mesh, split=ModelSplit(spatial=parts)) for mesh, parts in (((2, 2), (2,)), ((1, 2), (4,)), ((1, 1), (8,)))
)
FEATURES = (
    *(Layout(mesh, split=ModelSplit(model=parts)) for mesh, parts in (((2, 2), 2), ((1, 2), 4))),
    Layout((2, 2), split=ModelSplit(model=2), sync=Sync("torus", sharding="zero1", bucket_bytes=200_000)),
)


@dataclass(frozen=True)
class Backbone(FlaxModel):
    """A chain of 3x3 convolutions of stride 2 as behind an SSD: 75 rows, 38, 19, 10, 5, 3, 2, 1."""

    input_dims = IMAGE_DIMS

    features: int = 16
    levels: int = 7
    classes: int = 4

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _Backbone(self, rngs)

    def forward(self, module: Any, batch: Batch) -> jax.Array:
        """Logits [examples, classes]."""
        return module(batch["image"])


class _Backbone(nnx.Module):
    def __init__(self, spec: Backbone, rngs: nnx.Rngs) -> None:
        conv = partial(ConvNorm, Style("all", 0.9, 1e-5, "same", "float32"), rngs=rngs)
        widths = [3, *[spec.features] * spec.levels]
        self.levels = nnx.List([conv(a, b, 3, stride=2, activate=nnx.silu) for a, b in itertools.pairwise(widths)])
        self.head = nnx.Linear(spec.features, spec.classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for level in self.levels:
            x = level(x)
        return self.head(x.mean((1, 2)))


@dataclass(frozen=True)
class Noise:
    """Images of noise with random classes: what is learnt does not matter here, only that it is the same."""

    size: int
    channels: int

    def train(self) -> ArraySource:
        """48 examples."""
        rng = np.random.default_rng(0)
        image = rng.normal(size=(48, self.size, self.size, self.channels)).astype(np.float32)
        return ArraySource({"image": image, "label": rng.integers(0, 4, 48).astype(np.int32)})

    test = train


def run(report: Report) -> Outcome:
    """Trains each model in each of its layouts, and times the update under three optimizers."""
    rows, claims = [], []
    for recipe, layouts in _cases():
        alone = _measured(replace(recipe, layout=Layout((1, 1))))
        for layout in (Layout((1, 1)), *layouts):
            report(f"{recipe.name}: {spelled(layout)}")
            one = alone if layout == Layout((1, 1)) else _measured(replace(recipe, layout=layout))
            rows.append(_row(recipe.name, layout, one, alone))
            if layout != Layout((1, 1)):
                claims.append(same(recipe.name, layout, one, alone))
            if layout.sync.shards_update and layout.split.model == 1:
                claims.append(shrinks(recipe.name, layout, one, alone))
    report("the share of the update: Adam, LAMB, LARS")
    shares = _update_shares()
    sections = (
        Section(
            "Every layout",
            "Bytes are of one device, temporaries those of XLA's CPU compiler; bytes moved are what the collectives of "
            "one update carry, as a device sees them. Times are medians on virtual devices that share two cores: the "
            "work is the same in all, so they show what a layout adds and not what it saves.",
            ("model", "layout", "loss differs by", "weights", "optimizer", "temporaries", "moved", "update, ms"),
            rows,
        ),
        Section(
            "The share of the weight update",
            "The optimizer alone, on weights and gradients that are there, over the whole update; Transformer; medians "
            "of 15 rounds in which all four take turns. Virtual devices share two cores: whole, all do the same work "
            "over again, which is what splitting spares; of real devices each would do it once.",
            ("optimizer", "whole on every device", "split over 8"),
            [(name, f"{whole:.1%}", f"{split:.1%}") for name, whole, split in shares],
        ),
    )
    claims += [smaller_share(*one) for one in shares]
    return Outcome("Layouts of eight devices", tuple(claims), sections)


@dataclass(frozen=True)
class MeasuredRun:
    """What a run of a layout held, sent and took; bytes of one device."""

    losses: list[float]
    bytes: dict[str, int]
    temporaries: int
    moved: int
    update_s: float


def _cases() -> list[tuple[Recipe, tuple[Layout, ...]]]:
    data = Docstrings(source_length=64, target_length=16, vocab=1024)
    words = Recipe(
        "transformer", small_transformer(data.vocab), data, TokenClassification(label_smoothing=0.1),
        Lamb(WarmUp(Cosine(0.01), 0.1)), 16, UPDATES,
    )  # fmt: skip
    images = replace(words, objective=Classification(), optimizer=Lars(WarmUp(Cosine(1.0), 0.1)))
    resnet = replace(
        images, name="resnet", data=Noise(16, 1), model=SmallResNet(classes=4, blocks=(1, 1, 1), activation="silu")
    )
    backbone = replace(images, name="ssd-like backbone", data=Noise(75, 3), model=Backbone())
    return [(words, (*DATA, *FEATURES)), (resnet, (*DATA, *SPATIAL)), (backbone, (*DATA, *SPATIAL))]


def _measured(recipe: Recipe) -> MeasuredRun:
    program = UnstagedProgram(recipe, make_mesh(recipe.layout))
    update, state = program.compile_update(), program.init()
    facts = facts_of(update)
    losses, seconds = [], []
    for batch in itertools.islice(_batches(program), recipe.updates):
        began = time.monotonic()
        state, sums = update(state, batch, program.controls())
        jax.block_until_ready((state, sums))
        seconds.append(time.monotonic() - began)
        losses.append(float(sums["loss"]) / recipe.batch)
    moved = sum(one.nbytes * one.times for one in facts.collectives if one.peers > 1)
    return MeasuredRun(losses, totals(program), facts.memory.temporaries, moved, statistics.median(seconds[2:]))


def _batches(program: Program) -> Iterator[Any]:
    """The batches of the run, on the mesh."""
    recipe, rows = program.recipe, np.arange(program.rows)
    incoming = TrainBatches(recipe.data.train(), recipe.batch, recipe.seed, rows, program.padded).start(0)
    while True:
        yield jax.block_until_ready(program.place_batch(next(incoming), rows, program.rows))


def _differs(one: MeasuredRun, alone: MeasuredRun) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(one.losses, alone.losses, strict=True))


def _row(name: str, layout: Layout, one: MeasuredRun, alone: MeasuredRun) -> tuple[str, ...]:
    held = [f"{one.bytes[part]:,}" for part in ("weights", "optimizer")]
    ours = f"{_differs(one, alone):.1e}" if one is not alone else "-"
    return name, spelled(layout), ours, *held, f"{one.temporaries:,}", f"{one.moved:,}", f"{one.update_s * 1e3:.1f}"


def same(name: str, layout: Layout, one: MeasuredRun, alone: MeasuredRun) -> Claim:
    """The claim that a layout learns what one device learns."""
    text = f"{name} in {spelled(layout)}: the loss curve of the unsplit model, relative difference"
    wrong = "a halo, a sum or a share of the update is wrong"
    return Claim(text, "arXiv:2011.03641", _differs(one, alone), SAME, _differs(one, alone) <= SAME, fails_if=wrong)


def shrinks(name: str, layout: Layout, one: MeasuredRun, alone: MeasuredRun) -> Claim:
    """The claim that a device holds its share of the optimizer's state."""
    ratio = one.bytes["optimizer"] / alone.bytes["optimizer"]
    text = f"{name} in {spelled(layout)}: optimizer state on a device falls as 1 / devices"
    return Claim(text, "arXiv:2004.13336", ratio, 1 / 8 * 1.02, ratio <= 1 / 8 * 1.02,
                 fails_if="tensors are left whole, as those that no axis divides once were")  # fmt: skip


def smaller_share(name: str, whole: float, split: float) -> Claim:
    """The claim that the update's share of the step falls when it is split."""
    text = f"{name}: splitting the update over 8 devices shrinks its share of the step"
    return Claim(text, "arXiv:1909.09756; arXiv:2004.13336", split / whole, 1.0, split < whole,
                 fails_if="what splitting adds to the update costs more than the work that it spares")  # fmt: skip


def _update_shares() -> list[tuple[str, float, float]]:
    """For each optimizer the update's share of the step's time, whole and split; all four take turns."""
    recipe, _ = _cases()[0]
    shares = []
    rate = WarmUp(Cosine(0.01), 0.1)
    for name, optimizer in {"adamw": AdamW(rate), "lamb": Lamb(rate), "lars": Lars(rate)}.items():
        named = replace(recipe, optimizer=optimizer)
        whole, split = (
            replace(named, layout=Layout((2, 4), sync=Sync(sharding="zero1" if on else "none"))) for on in (False, True)
        )
        seconds = np.array(_in_turn([*_update_and_step(whole), *_update_and_step(split)]))
        of_whole, of_split = np.median(seconds[:, ::2] / seconds[:, 1::2], axis=0)
        shares.append((name, float(of_whole), float(of_split)))
    return shares


def _update_and_step(recipe: Recipe) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The optimizer alone, on weights and gradients that are there, and the whole update of the recipe."""
    program = UnstagedProgram(recipe, make_mesh(recipe.layout))
    shardings = jax.tree.map(lambda spec: NamedSharding(program.mesh, spec), program.sync.specs)
    state = program.init()
    params = jax.tree.map(jnp.copy, jax.device_put(state.params, shardings))  # the step gives its own up
    held = jax.tree.map(lambda leaf: leaf.sharding, program.shapes.optimizer)
    optimizer = jax.tree.map(jnp.copy, state.optimizer)

    def update(gradients: Any, optimizer: Any, params: Any) -> Any:
        return program.placement.optimizer.update(gradients, optimizer, params)

    alone = jax.jit(update, out_shardings=(shardings, held))
    whole, batch, last = program.compile_update(), _batches(program), [state]

    def step() -> Any:
        last[0], sums = whole(last[0], next(batch), program.controls())
        return last[0], sums

    return lambda: alone(params, optimizer, params), step


def _in_turn(calls: Sequence[Callable[[], Any]], rounds: int = 15) -> list[list[float]]:
    """Seconds of each call in each round; the first round compiles and does not count."""
    taken = []
    for _ in range(rounds + 1):
        taken.append([_seconds(call) for call in calls])
    return taken[1:]


def _seconds(call: Callable[[], Any]) -> float:
    began = time.monotonic()
    jax.block_until_ready(call())
    return time.monotonic() - began
