"""A recipe in a pipeline: its model cut into stages, its objective and optimizer in the parts that need them."""

from typing import Any

import jax
from jax.sharding import Mesh

from multipod.errors import RecipeError
from multipod.execute.delays import Part
from multipod.execute.pipeline import Pipe
from multipod.layout.stages import Cut, Layer, balanced, check_cut, tied_places
from multipod.metrics.objective import masked_sums
from multipod.nn.layered import ModelLayer, apply_layers, shapes_of
from multipod.optim.pipemare import PipeMare
from multipod.pipelines.check import Proof
from multipod.recipe.recipe import Recipe


def cut_of(recipe: Recipe, parts: int) -> Cut:
    """The model of `recipe` in `parts` of balanced cost.

    Raises:
      RecipeError: a model that does not say its layers.
      LayoutError: more parts than layers.
    """
    return balanced([Layer(layer.name, layer.cost, layer.weights) for layer in _layers(recipe)], parts)


def pipe_of(
    recipe: Recipe,
    proof: Proof,
    mesh: Mesh,
    example: Any,
    *,
    stage_axis: str = "stage",
    data_axes: tuple[str, ...] = (),
    techniques: PipeMare | None = None,
) -> Pipe:
    """The recipe in the pipeline that `proof` is of, over `stage_axis`; the batch is split over `data_axes`.

    example: a batch, any number of rows, for its shapes. A micro-batch's `aux` is {"batch": ..., "key": key data}, the
    key drawn by the caller for each of them. techniques: (asynchronous) PipeMare's; None: none of the three.

    Raises:
      RecipeError: a model that does not say its layers, or a global limit on the gradient.
      LayoutError, ScheduleError: see `check_cut`.
    """
    if getattr(recipe.optimizer, "clip", 0):
        raise RecipeError(
            f"recipe {recipe.name}: optimizer.clip limits the norm over the whole model, and no stage of a pipeline "
            "sees it. Set optimizer.clip=0."
        )
    made, layers = proof.schedule, _layers(recipe)
    cut = cut_of(recipe, made.parts)
    devices = 1
    for axis in data_axes:
        devices *= mesh.shape[axis]
    rows = check_cut(cut, made, recipe.batch, devices)
    shapes: dict[str, Any] = shapes_of(recipe.model)  # type: ignore[arg-type]
    parts, weights = [], []
    optimizer = recipe.optimizer.build(recipe.updates)
    for n, (start, stop) in enumerate(zip(cut.starts, cut.starts[1:], strict=False)):
        own = layers[start:stop]
        delay = 0.0 if made.synchronous else float(proof.mean_delay(n))
        parts.append(_part(recipe, own, stop == len(layers), optimizer, delay, techniques or PipeMare()))
        weights.append({name: shapes[name] for layer in own for name in layer.weights})
    seen = jax.eval_shape(lambda given: given, example)  # with the types that JAX has
    batch = {name: jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype) for name, array in seen.items()}
    aux = {"batch": batch, "key": jax.ShapeDtypeStruct((2,), "uint32")}
    return Pipe(proof, parts, weights, aux, mesh, stage_axis, data_axes, tied_places(cut))


def split_params(recipe: Recipe, pipe: Pipe, params: dict[str, Any]) -> list[dict[str, Any]]:
    """The whole model's parameters as those of the parts; tied ones are in several."""
    return [{name: params[name] for name in own} for own in pipe.weights]


def join_params(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole model's parameters from those of the parts; the opposite of `split_params`."""
    return {name: value for own in parts for name, value in own.items()}


def _part(
    recipe: Recipe, layers: tuple[ModelLayer, ...], last: bool, optimizer: Any, delay: float, techniques: PipeMare
) -> Part:
    def function(weights: Any, x: Any, aux: Any) -> tuple[Any, Any]:
        key = jax.random.wrap_key_data(aux["key"])
        y = apply_layers(recipe.model, layers, weights, x, aux["batch"], train=True, key=key)  # type: ignore[arg-type]
        if not last:
            return y, {}
        sums = masked_sums(recipe.objective(y, aux["batch"]))
        return sums["loss"] / recipe.batch, sums

    if delay == 0:
        return Part(function, optimizer)
    return Part(
        function,
        techniques.wrap(optimizer, delay),
        (lambda w, state, on: techniques.backward_weights(w, state, delay * on)) if techniques.decay else None,
    )


def _layers(recipe: Recipe) -> tuple[ModelLayer, ...]:
    cut_points = getattr(recipe.model, "cut_points", None)
    if cut_points is None:
        raise RecipeError(
            f"recipe {recipe.name}: {type(recipe.model).__name__} does not say its layers, so it cannot be cut into "
            "stages. Give it a method cut_points (multipod.nn.layered), or train it without a pipeline."
        )
    return cut_points()
