"""Layouts drawn at random of those that a recipe takes and that do not change what it learns."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from multipod.collectives.build import ALGORITHMS
from multipod.errors import LayoutError, MultipodError
from multipod.layout.axes import DATA_AXES
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.split import ASYNCHRONOUS, UNSPLIT, ModelSplit, PipelineSplit
from multipod.layout.sync import BUILT_IN_SUMS, Sharding, Sync
from multipod.layout.text import spelled
from multipod.nn.images.batch_norm import spanned_examples
from multipod.nn.model import nested_models
from multipod.pipelines.build import PIPELINES
from multipod.recipe.recipe import Recipe
from multipod.step.program import Program, program_of

DRAWS = 40
"""Draws for each layout that is wanted, before it is said that there are no more."""

SPLITS = (
    *(ModelSplit(spatial=parts) for parts in ((2,), (4,), (8,), (2, 2))),
    *(ModelSplit(model=size) for size in (2, 4)),
    *(ModelSplit(expert=size) for size in (2, 4)),
    *(ModelSplit(model=2, expert=2), ModelSplit(spatial=(2,), model=2)),
)
"""The ways of sharing a replica's layers that are drawn from."""

DRAINING = tuple(name for name in PIPELINES if name not in ASYNCHRONOUS)

SHARDINGS: tuple[Sharding, ...] = ("none", "none", "zero1", "fsdp")


@dataclass
class LayoutDraws(Iterator[Program]):
    """Programs of a recipe in one drawn layout after the other, none twice.

    Combinations that change what is learnt are not drawn: Adasum, pipelines that never drain, gradients or weights
    that travel in another type. Gradient accumulation is drawn for models without statistics: batch norm sees the
    parts.

    Attributes:
      recipe: whose `layout` counts for nothing.
      devices: the most that a layout may take.
      seed: of the draws.
      refused: how often a draw was refused, by the first line of the reason.
    """

    recipe: Recipe
    devices: int
    seed: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = np.random.default_rng(self.seed)
        self._seen: set[tuple[str, tuple[tuple[int, int], ...], int]] = set()
        alone = self._of(Layout((1, 1)))
        self._has_statistics = bool(jax.tree.leaves(program_of(alone, make_mesh(alone.layout)).shapes.statistics))
        kinds: list[tuple[ModelSplit, PipelineSplit | None]] = [(split, None) for split in SPLITS]
        kinds += [(UNSPLIT, PipelineSplit(stages)) for stages in (2, 4)]
        self._replicas = [(UNSPLIT, None)] * 2 + [kind for kind in kinds if self._takes(Layout((1, 1), *kind))]

    def __next__(self) -> Program:
        """The next one.

        Raises:
          StopIteration: many draws brought no new layout.
        """
        for _ in range(DRAWS):
            drawn = self._drawn()
            if drawn is None:
                continue
            known = (spelled(drawn.layout), drawn.layout.failed, drawn.accumulate)
            if known in self._seen:
                continue
            self._seen.add(known)
            program = self._program(drawn)
            if program is not None:
                return program
        raise StopIteration

    def _drawn(self) -> Recipe | None:
        rng = self._rng
        split, pipeline = self._replicas[rng.integers(len(self._replicas))]
        if pipeline is not None:
            micro_batches = int(rng.choice([0, 2, 4, 8]))
            pipeline = replace(pipeline, schedule=str(rng.choice(DRAINING)), micro_batches=micro_batches)
        room = self.devices // (split.devices * (pipeline.stages if pipeline else 1))
        if not room:
            return None
        sizes = [size for size in range(1, room + 1) if self.recipe.batch % size == 0]
        data = int(rng.choice(sizes)) if rng.random() < 0.75 else int(rng.integers(1, room + 1))
        rows = int(rng.choice([size for size in range(1, data + 1) if data % size == 0]))
        mesh = (rows, data // rows)
        dead = (int(rng.integers(mesh[0])), int(rng.integers(mesh[1])))
        failed = (dead,) if min(mesh) > 1 and (self.recipe.batch % data or rng.random() < 0.25) else ()
        accumulate = 1 if pipeline or self._has_statistics or rng.random() < 0.7 else 2
        try:
            return self._of(Layout(mesh, split, pipeline, self._sync(pipeline is not None), failed), accumulate)
        except MultipodError as error:
            self._refuse(error)
            return None

    def _sync(self, staged: bool) -> Sync:
        rng = self._rng
        name = str(rng.choice(BUILT_IN_SUMS if rng.random() < 0.6 else tuple(ALGORITHMS)))
        if staged:
            return Sync(name)
        return Sync(name, SHARDINGS[rng.integers(len(SHARDINGS))], bucket_bytes=int(rng.choice([0, 0, 20_000])))

    def _of(self, layout: Layout, accumulate: int = 1) -> Recipe:
        return replace(self.recipe, layout=layout, accumulate=accumulate)

    def _takes(self, layout: Layout) -> bool:
        """Whether the model can be split so at all, on devices that are there."""
        return layout.replica_devices <= self.devices and self._program(self._of(layout)) is not None

    def _program(self, recipe: Recipe) -> Program | None:
        """The program, traced; None where it is refused."""
        try:
            program = program_of(recipe, make_mesh(recipe.layout))
            self._check_groups(program)
            assert program.lowered is not None
        except MultipodError as error:
            self._refuse(error)
            return None
        return program

    def _check_groups(self, program: Program) -> None:
        """Refuses a mesh on which batch norm's groups cannot have the size that the recipe says."""
        sizes, batch = tuple(program.mesh.shape[axis] for axis in DATA_AXES), self.recipe.batch
        for _, model in nested_models(self.recipe.model):
            tile = getattr(model, "batch_norm_tile", None)
            if isinstance(tile, int) and (span := spanned_examples(tile, batch, (sizes[0], sizes[1]))) != tile:
                raise LayoutError(
                    f"batch norm over {tile} examples would take {span} on this mesh, and learn otherwise."
                )

    def _refuse(self, error: MultipodError) -> None:
        self.refused[str(error).splitlines()[0]] += 1
