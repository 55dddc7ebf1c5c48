"""A recipe in a pipeline: its model cut into stages, its objective and optimizer in the parts that need them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from multipod.errors import RecipeError
from multipod.execute.pipeline.delays import PipelinePart
from multipod.execute.pipeline.passes import PartFunction
from multipod.execute.pipeline.pipe import Pipe
from multipod.execute.pipeline.setup import PipelineSetup
from multipod.layout.compatible import conflict_of
from multipod.layout.stages import Cut, Layer, as_asked, balanced, check_cut, tied_places
from multipod.metrics.objective import JudgesAnswers, masked_sums, scores_of
from multipod.nn.by_example import NUMBERS, numbered_examples
from multipod.nn.layered import Layered, ModelLayer, apply_layers, shapes_of
from multipod.nn.logical_axes import Splits, logical_axis_rules
from multipod.nn.model import FlaxModel
from multipod.nn.padding import padding_mask
from multipod.optim.optimizer import clip_of
from multipod.optim.pipemare import PipeMare
from multipod.pipelines.check import PipelineProof
from multipod.recipe.recipe import Recipe
from multipod.step.agreement import init_model, refusing_misfits
from multipod.step.specs import state_specs


def cut_of(recipe: Recipe, parts: int) -> Cut:
    """The model of `recipe` in `parts`: as `layout.pipeline.cut` says, or of balanced cost.

    Raises:
      RecipeError: a model that does not say its layers.
      LayoutError: more parts than layers, or a cut that is not of this model.
    """
    layers = [Layer(layer.name, layer.cost, layer.weights) for layer in layers_of(recipe)]
    cut = recipe.layout.pipeline.cut if recipe.layout.pipeline else ()
    return as_asked(layers, parts, cut) if cut else balanced(layers, parts)


def pipe_of(
    recipe: Recipe,
    proof: PipelineProof,
    mesh: Mesh | AbstractMesh,
    example: Any,
    *,
    stage_axis: str = "stage",
    data_axes: tuple[str, ...] = (),
    techniques: PipeMare | None = None,
    rows: int = 0,
    over_data: Callable[[Any], Any] | None = None,
    specs: Mapping[str, PartitionSpec] | None = None,
    splits: Splits | None = None,
) -> Pipe:
    """The recipe in the pipeline that `proof` is of, over `stage_axis`; the batch is split over `data_axes`.

    example: a batch, any number of rows, for its shapes; an entry `mask` tells examples from padding. A micro-batch's
    `aux` is {"batch": ..., "key": key data}: rows with their numbers (`by_example.NUMBERS`), and the update's key.
    techniques: (asynchronous) PipeMare's; None: none of the three. rows: of a batch with its padding; 0:
    `recipe.batch`. over_data: see `Pipe`. specs: how axes inside a stage split each parameter; splits: and
    activations, by the names of their dims.

    Raises:
      RecipeError: a model that does not say its layers, or a global limit on the gradient.
      LayoutError, ScheduleError: see `check_cut`.
    """
    if clip_of(recipe.optimizer):
        conflict = conflict_of("pipeline", "clip")
        raise RecipeError(f"recipe {recipe.name}: optimizer.clip {conflict.reason}. {conflict.remedy}")
    made, layers = proof.schedule, layers_of(recipe)
    cut = cut_of(recipe, made.parts)
    devices = 1
    for axis in data_axes:
        devices *= mesh.shape[axis]
    each = check_cut(cut, made, rows or recipe.batch, devices)
    shapes: dict[str, Any] = shapes_of(recipe.model)  # type: ignore[arg-type]
    optimizer = recipe.optimizer.build(recipe.updates)
    parts, weights = [], []
    for n, own in enumerate(_of_parts(cut, layers)):
        delay = 0.0 if made.synchronous else float(proof.mean_delay(n))
        part = _part(recipe, own, n == made.parts - 1, optimizer, delay, techniques or PipeMare(), (mesh, splits or {}))
        parts.append(part)
        weights.append({name: shapes[name] for layer in own for name in layer.weights})
    seen = jax.eval_shape(lambda given: given, example)  # with the types that JAX has
    batch = {name: jax.ShapeDtypeStruct((each, *array.shape[1:]), array.dtype) for name, array in seen.items()}
    batch[NUMBERS] = jax.ShapeDtypeStruct((each,), "uint32")
    aux = {"batch": batch, "key": jax.ShapeDtypeStruct((2,), "uint32")}
    split = _split(parts, weights, specs) if specs else None
    tied = tied_places(cut)
    return Pipe(PipelineSetup(proof, parts, weights, aux, mesh, stage_axis, data_axes, tied, over_data, split))


def _split(
    parts: list[PipelinePart], weights: list[Any], specs: Mapping[str, PartitionSpec]
) -> tuple[list[Any], list[Any]]:
    """The `PartitionSpec`s of the parts' weights, and of their optimizers' states."""
    of_weights = [{name: specs[name] for name in part} for part in weights]
    states = [jax.eval_shape(part.optimizer.init, shapes) for part, shapes in zip(parts, weights, strict=True)]
    return of_weights, [state_specs(*each) for each in zip(states, weights, of_weights, strict=True)]


def evaluations(
    recipe: Recipe, parts: int, mesh: Mesh | AbstractMesh, splits: Splits | None = None
) -> list[PartFunction]:
    """The function of each of `parts` in evaluation, as `multipod.execute.pipeline.forward` takes them.

    `aux` is a batch with a `mask`; the last part's extra are the sums of the objective's values, and the scores and
    labels of an objective that has them.
    """

    def of_part(layers: tuple[ModelLayer, ...], last: bool) -> PartFunction:
        def function(weights: Any, x: Any, aux: Any) -> tuple[Any, Any]:
            batch = dict(aux)
            mask, key = batch.pop("mask"), jax.random.key(0)
            with logical_axis_rules(mesh, splits or {}):
                with refusing_misfits(recipe, recipe.model, batch):
                    y = apply_layers(recipe.model, layers, weights, x, batch, train=False, key=key)  # type: ignore[arg-type]
                if not last:
                    return y, {}
                with refusing_misfits(recipe, recipe.objective, batch):
                    return y, (masked_sums(recipe.objective(y, batch), mask), scores_of(recipe.objective, y, batch))

        return function

    cut, layers = cut_of(recipe, parts), layers_of(recipe)
    return [of_part(own, n == parts - 1) for n, own in enumerate(_of_parts(cut, layers))]


def split_params(pipe: Pipe, params: dict[str, Any]) -> list[dict[str, Any]]:
    """The full parameters as those of the parts; tied ones are in several."""
    return [{name: params[name] for name in part} for part in pipe.setup.weights]


def join_params(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The full parameters from those of the parts; the opposite of `split_params`."""
    return {name: value for part in parts for name, value in part.items()}


def layers_of(recipe: Recipe) -> tuple[ModelLayer, ...]:
    """The layers of the recipe's model.

    Raises:
      RecipeError: the model does not say them; with what stands in the way, if that is batch norm.
    """
    name = f"recipe {recipe.name}: {type(recipe.model).__name__}"
    statistics = jax.tree.leaves(jax.eval_shape(partial(init_model, recipe), jax.random.key(0))[1])
    if statistics:
        conflict = conflict_of("pipeline", "batch norm")
        raise RecipeError(f"{name} normalises over the batch: {conflict.reason}. {conflict.remedy}")
    if isinstance(recipe.objective, JudgesAnswers):
        raise RecipeError(
            f"{type(recipe.objective).__name__} has the whole model answer, and a stage has a part of it. Evaluate by "
            "another objective (--set objective=tokens), or train without a pipeline."
        )
    if not isinstance(recipe.model, Layered) or not isinstance(recipe.model, FlaxModel):
        lacks = "is no FlaxModel" if isinstance(recipe.model, Layered) else "does not say its layers"
        raise RecipeError(
            f"{name} {lacks}, so it cannot be cut into stages. Write it as a FlaxModel (multipod.nn.model) with a "
            "method cut_points (multipod.nn.layered), or train it without a pipeline."
        )
    return recipe.model.cut_points()


def _of_parts(cut: Cut, layers: tuple[ModelLayer, ...]) -> list[tuple[ModelLayer, ...]]:
    return [layers[start:stop] for start, stop in zip(cut.starts, cut.starts[1:], strict=False)]


def _part(
    recipe: Recipe,
    layers: tuple[ModelLayer, ...],
    last: bool,
    optimizer: Any,
    delay: float,
    techniques: PipeMare,
    lie: tuple[Mesh | AbstractMesh, Splits],
) -> PipelinePart:
    def function(weights: Any, x: Any, aux: Any) -> tuple[Any, Any]:
        batch, key = dict(aux["batch"]), jax.random.wrap_key_data(aux["key"])
        mask, numbers = batch.pop("mask", None), batch.pop(NUMBERS)
        with padding_mask(mask), numbered_examples(numbers, key) as own, logical_axis_rules(*lie):
            with refusing_misfits(recipe, recipe.model, batch):
                y = apply_layers(recipe.model, layers, weights, x, batch, train=True, key=own)  # type: ignore[arg-type]
            if not last:
                return y, {}
            with refusing_misfits(recipe, recipe.objective, batch):
                sums = masked_sums(recipe.objective(y, batch), mask)
        return sums["loss"] / recipe.batch, sums

    if delay == 0:
        return PipelinePart(function, optimizer)
    return PipelinePart(
        function,
        techniques.wrap(optimizer, delay),
        (lambda w, state, on: techniques.backward_weights(w, state, delay * on)) if techniques.decay else None,
    )
