"""What a split of a recipe's model does to its step: read from XLA's programs of it, compiled for this host.

The partitioner decides what a device of a replica computes and what the replica's devices tell each other, so it is
asked: the real step is compiled, whole and split, for the replica's number of examples and for twice as many, which the
next larger replica has. What grows with the examples and what does not (the gradients of weights that are not split)
follows from the two. Nothing is run, and a large program takes no longer to compile than a small one.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
from jax.sharding import NamedSharding

from multipod.errors import LayoutError, PlanError
from multipod.layout.compiled import CompiledFacts, facts_of_lowered
from multipod.layout.hlo import Product
from multipod.layout.layout import Layout
from multipod.layout.mesh import abstract_mesh, make_mesh, to_spec
from multipod.layout.split import ModelSplit
from multipod.plan.sync import WHOLE
from multipod.plan.tables.layers import product_fill
from multipod.plan.work import Message, Operation, Pattern, Work
from multipod.plan.workload import Part
from multipod.recipe.recipe import Recipe
from multipod.step.placement import MeshPlacement
from multipod.step.program import Program, program_of

LEAST = 8
"""Examples: with fewer, constants would rule, so only memory is taken from programs of fewer."""

PATTERNS: dict[str, Pattern] = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "collective-permute": "neighbour",
}


@dataclass(frozen=True)
class Splits:
    """The splits that a recipe's model allows, and what each makes of its work.

    Attributes:
      recipe: its layout's axes count for nothing here, its rules do.
      cache: a folder where what XLA said is kept; None keeps it for this process alone.
      told: hears what is being compiled.
      experts: numbers of devices that the model's experts or tables divide over.
    """

    recipe: Recipe
    cache: Path | None = None
    told: Callable[[str], Any] = lambda line: None
    experts: tuple[int, ...] = ()

    @cached_property
    def able(self) -> tuple[ModelSplit, ...]:
        """Splits over 2, 4 and 8 devices that the model's dims allow, and products of axes, of as many as are here.

        Images are split by their height, or by height and width; products with experts are among them, experts alone
        are not.
        """
        most = jax.device_count()
        images, layers = ([split for split in made if self._can(split)] for made in _alone(most))
        spatial, model = [(), *(one.spatial for one in images)], [1, *(one.model for one in layers)]
        products = (ModelSplit(*sizes) for sizes in itertools.product(spatial, model, (1, *self.experts)))
        several = (one for one in products if (bool(one.spatial), one.model > 1, one.expert > 1).count(True) > 1)
        return (*images, *layers, *(one for one in several if one.devices <= most and self._can(one)))

    def work(self, whole: tuple[Operation, ...], examples: float, split: ModelSplit, lanes: int = 1) -> Work:
        """The work of a device, of a replica of so many examples. Split over experts alone, its operators are `whole`.

        Products that are split fill the matrix unit less: as much as those of XLA's program do, padded to whole tiles.
        What devices of experts tell each other is not among the messages: it stands in the trace.
        """
        kept = self._kept(split, examples)
        if split.devices == split.expert:
            return Work(whole, (), kept)
        counts = _around(examples)
        alone, parts = (self._facts(one, counts) for one in (ModelSplit(expert=split.expert), split))
        return Work(_divided(whole, alone, parts, lanes), tuple(_messages(counts, parts, examples, split)), kept)

    def parts(self, whole: tuple[Part, ...], examples: float, model: int, lanes: int = 1) -> tuple[Part, ...]:
        """Parts of a pipeline, each split over `model` devices, of which, unsplit but for their weights, `whole` are.

        The shares are those of the unstaged step: of operators, of what is kept, and, by a part's share of the FLOPs,
        of the messages, half of them in the forward pass. `examples` are a micro-batch's.
        """
        split, counts = ModelSplit(model=model), _around(examples)
        alone, parts = (self._facts(one, counts) for one in (ModelSplit(), split))
        kept = min(1.0, self._kept(split, counts[-1]) / max(1.0, self._kept(ModelSplit(), counts[-1])))
        messages = tuple(_messages(counts, parts, examples, split))
        total = max(1.0, sum(part.whole.flops for part in whole))

        def divided(work: Work, share: float) -> Work:
            told = tuple(replace(one, count=one.count * share) for one in messages)
            return Work(_divided(work.ops, alone, parts, lanes), told, work.activation_bytes * kept)

        return tuple(
            replace(
                part,
                forward=divided(part.forward, part.whole.flops / total / 2),
                whole=divided(part.whole, part.whole.flops / total),
                saved=tuple((shape, n, size * kept) for shape, n, size in part.saved),
            )
            for part in whole
        )

    def _kept(self, split: ModelSplit, examples: float) -> float:
        """Bytes that XLA's program for so many examples needs beside arguments, outputs and gradients."""
        (facts,) = self._facts(split, (math.ceil(examples),))
        return max(0.0, facts.memory.temporaries - self._gradients(split))

    def _gradients(self, split: ModelSplit) -> float:
        """Bytes of the gradients on a device, which are among XLA's temporaries."""
        return WHOLE * held_parameters(self.recipe, split)

    def _can(self, split: ModelSplit) -> bool:
        try:
            _ = self._program(split, LEAST).shapes
        except LayoutError:
            return False
        return True

    def _program(self, split: ModelSplit, examples: int) -> Program:
        return _program(self.recipe, split, examples)

    def _facts(self, split: ModelSplit, counts: tuple[int, ...]) -> tuple[CompiledFacts, ...]:
        return tuple(_facts(self.recipe, split, count, self.cache, self.told) for count in counts)


def _alone(most: int) -> tuple[list[ModelSplit], list[ModelSplit]]:
    """Splits over at most so many devices: those of images, and those of layers."""
    sizes = [n for n in (2, 4, 8) if n <= most]
    both = [(h, w) for h in sizes for w in sizes if h * w <= most]
    return [ModelSplit(spatial=n) for n in (*((n,) for n in sizes), *both)], [ModelSplit(model=n) for n in sizes]


def _divided(
    ops: tuple[Operation, ...], alone: tuple[CompiledFacts, ...], parts: tuple[CompiledFacts, ...], lanes: int
) -> tuple[Operation, ...]:
    """The operators of one of the devices, by what XLA's programs do alone and in parts."""
    flops, nbytes = _share(alone, parts, "flops"), _share(alone, parts, "bytes")
    fuller = filled(parts[-1].products, lanes) / filled(alone[-1].products, lanes)
    return tuple(
        replace(
            op,
            flops=op.flops * flops,
            nbytes=op.nbytes * nbytes,
            fill=min(1.0, op.fill * fuller) if op.kind in ("matmul", "convolution") else op.fill,
        )
        for op in ops
    )


def filled(products: tuple[Product, ...], lanes: int) -> float:
    """The share of the matrix unit that products fill, over all their FLOPs; 1 where there are none."""
    flops = sum(one.flops for one in products)
    padded = sum(one.flops / product_fill(one.rows, one.inner, one.outer, lanes) for one in products if one.flops)
    return flops / padded if padded else 1.0


def _around(examples: float) -> tuple[int, int]:
    """So many examples, doubled until they are `LEAST`, and twice as many."""
    few = math.ceil(examples)
    while few < LEAST:
        few *= 2
    return few, 2 * few


def held_parameters(recipe: Recipe, split: ModelSplit) -> float:
    """The parameters on a device of a replica that is split so, as the layout's rules lay them.

    Raises:
      LayoutError: dims that do not divide.
    """
    layout = Layout((1, 1), split=replace(split, rules=recipe.layout.split.rules))
    mesh = abstract_mesh(layout)
    placement = MeshPlacement(replace(recipe, batch=LEAST * split.expert, accumulate=1, layout=layout), mesh)
    leaves = zip(jax.tree.leaves(placement.state.params), placement.placements.values(), strict=True)
    shapes = [NamedSharding(mesh, to_spec(placed.axes)).shard_shape(leaf.shape) for leaf, placed in leaves]
    return float(sum(map(math.prod, shapes)))


@lru_cache(maxsize=64)
def _program(recipe: Recipe, split: ModelSplit, examples: int) -> Program:
    layout = Layout((1, 1), split=replace(split, rules=recipe.layout.split.rules))
    small = replace(recipe, batch=examples, accumulate=1, layout=layout)
    return program_of(small, make_mesh(layout))


@lru_cache(maxsize=256)
def _facts(
    recipe: Recipe, split: ModelSplit, examples: int, cache: Path | None, told: Callable[[str], Any]
) -> CompiledFacts:
    told(f"{recipe.name}: compiling a step of {examples} examples" + (f" over {split}" if split.devices > 1 else ""))
    try:
        return facts_of_lowered(_program(recipe, split, examples).lowered, "here", cache)
    except (TypeError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise PlanError(f"recipe {recipe.name}: its step over {split} cannot be compiled: {first}") from error


def _share(whole: tuple[CompiledFacts, ...], part: tuple[CompiledFacts, ...], name: str) -> float:
    """What of the whole step falls on one device: at the larger number of examples, where constants matter less."""
    return min(1.0, getattr(part[-1], name) / max(1.0, getattr(whole[-1], name)))


def _between(counts: tuple[int, int], values: list[float], examples: float) -> float:
    """The straight line through the values at two counts of examples."""
    few, many = counts
    return values[0] + (values[1] - values[0]) / (many - few) * (examples - few)


def _messages(
    counts: tuple[int, int], facts: tuple[CompiledFacts, ...], examples: float, split: ModelSplit
) -> Iterator[Message]:
    """Collectives of one kind and of as many peers, as one kind of message of their mean size.

    Those between devices of experts alone are left out: messages of the trace, and sums of gradients.
    """
    said = [[one for one in few.collectives if one.axes(split.sizes) != ("expert",)] for few in facts]
    kinds = {(one.kind, one.peers) for few in said for one in few if one.peers > 1}
    for kind, peers in sorted(kinds):
        alike = [[one for one in few if (one.kind, one.peers) == (kind, peers)] for few in said]
        times = [float(sum(one.times for one in found)) for found in alike]
        nbytes = [float(sum(one.nbytes * one.times for one in found)) for found in alike]
        count = max(times)
        each = max(0.0, _between(counts, nbytes, examples)) / count
        yield Message(f"{kind} between peers", PATTERNS[kind], each, peers, count)
