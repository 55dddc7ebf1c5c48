"""A recipe in many layouts, every update of each held against float64: `verify`."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.text import spelled
from multipod.recipe.recipe import Recipe
from multipod.step.program import Program, program_of
from multipod.verify.checks import evaluates, optimizer_bytes, repeats, replicas_agree, same_beginning
from multipod.verify.drawing import LayoutDraws
from multipod.verify.locating import place_of, stage_of
from multipod.verify.moving import HostStates
from multipod.verify.recording import recording
from multipod.verify.reference import Reference
from multipod.verify.rounding import EPS, LIMIT, Errors, errors_of


@dataclass(frozen=True)
class LayoutResult:
    """What became of a recipe in a layout.

    Attributes:
      layout: as text.
      devices: that it took.
      ratio: the largest error over that of one device, of all things in all updates.
      of, at: the thing and the update (from 0) where it was largest.
      curve: the largest relative difference of a loss from the run on one device.
      bytes: of the optimizer's state: promised, and held on the device that holds most.
      wrong: all that is wrong, a sentence each; empty if the layout learns what one device learns.
    """

    layout: str
    devices: int
    ratio: float
    of: str
    at: int
    curve: float
    bytes: tuple[int, int]
    wrong: tuple[str, ...]


@dataclass(frozen=True)
class RecipeVerdict:
    """What became of a recipe.

    Attributes:
      recipe: its name.
      updates: of each layout.
      results: one for each layout.
      refused: reasons for which drawn layouts were refused, with how many.
    """

    recipe: str
    updates: int
    results: tuple[LayoutResult, ...]
    refused: Mapping[str, int]

    @property
    def holds(self) -> bool:
        """Whether nothing is wrong in any layout."""
        return not any(result.wrong for result in self.results)


def verify(
    recipe: Recipe,
    *,
    layouts: int | Sequence[Layout] = 20,
    updates: int = 5,
    devices: int = 8,
    seed: int = 0,
    report: Callable[[LayoutResult], None] = lambda _: None,
) -> RecipeVerdict:
    """Trains a recipe for some updates in other layouts, and holds each update against float64.

    Every update of a layout begins with the state that the layout itself came to, so that errors do not grow from one
    to the next, and a discrete choice that rounding turns over is one update's. See `docs/verify.md`.

    Args:
      layouts: these, or so many drawn at random, of which there may be fewer.
      devices: the most that a layout takes; there must be so many.
      report: told each result.

    Raises:
      RecipeError, LayoutError: the recipe cannot be trained on one device, or in a layout that is not drawn.
    """
    recorded = recording(recipe)
    reference = Reference(recorded, updates)
    refused: Counter[str] = Counter()
    if isinstance(layouts, int):
        draws = LayoutDraws(recorded, devices, seed, refused)
        programs: Iterator[Program] = itertools.islice(draws, layouts)
    else:
        programs = _programs(recorded, layouts)
    results = []
    for program in programs:
        results.append(hold(program, reference))
        report(results[-1])
    return RecipeVerdict(recipe.name, updates, tuple(results), dict(refused))


def _programs(recipe: Recipe, layouts: Sequence[Layout]) -> Iterator[Program]:
    for layout in layouts:
        yield program_of(replace(recipe, layout=layout), make_mesh(layout))


def hold(program: Program, reference: Reference) -> LayoutResult:
    """The updates of a program held against those of the reference, up to the first that is not the same."""
    states, walk = HostStates(program), reference.walk
    last = before = states.first
    wrong = [*same_beginning(before, reference)]
    state = states.write(before)
    curve, ratio, of, at = 0.0, 0.0, "", 0
    for update in range(reference.updates):
        state, made = states.made(state, states.batch(reference.source, update))
        exact = reference.exact(before, update)
        ratios = _ratios(errors_of(made, exact, before), walk.noise)
        name = max(ratios, key=lambda one: ratios[one])
        worst = ratios[name]
        if not worst <= ratio:
            ratio, of, at = worst, name, update
        loss = float(made.sums["loss"]) / float(made.sums["count"])
        curve = max(curve, abs(loss - walk.losses[update]) / max(abs(walk.losses[update]), EPS))
        if not ratio <= LIMIT:
            place = place_of(of, made, exact, before, state)
            wrong.append(_too_far(ratio, of, at, place, stage_of(ratios)))
            break
        last, before = before, made.state
    promised, held = optimizer_bytes(program, state)
    if held > promised:
        wrong.append(f"the optimizer's state: {promised:,} bytes on a device were promised, and it holds {held:,}")
    wrong += replicas_agree(state)
    if not wrong:
        wrong += repeats(states, last, before, reference)
        wrong += evaluates(states, before, reference)
    return LayoutResult(_text(program), program.mesh.size, ratio, of, at, curve, (promised, held), tuple(wrong))


def _ratios(found: Errors, noise: Errors) -> Errors:
    """Each error in times of that of one device."""
    return {name: error / noise.get(name, EPS) if math.isfinite(error) else math.inf for name, error in found.items()}


def _too_far(ratio: float, of: str, at: int, place: str, stage: str) -> str:
    return (
        f"update {at}: the {of} is {ratio:,.3g} times as far from float64 as on one device, where {LIMIT:.0f} is what "
        f"another order of sums explains{place and f': {place}'}. It goes wrong in {stage}"
    )


def _text(program: Program) -> str:
    layout = program.recipe.layout
    parts = [spelled(layout, always=("mesh",))]
    parts += [f"fail={'+'.join(f'{y},{x}' for y, x in layout.failed)}"] if layout.failed else []
    parts += [f"accumulate={program.recipe.accumulate}"] if program.recipe.accumulate > 1 else []
    return ",".join(parts)
