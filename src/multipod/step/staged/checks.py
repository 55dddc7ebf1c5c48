"""What a recipe may say and a pipeline has no way for."""

from multipod.errors import LayoutError
from multipod.recipe.recipe import Recipe
from multipod.step.staged.pipe import layers_of

UNUSED = ("shard_update", "shard_weights", "gather_dtype", "sum_dtype", "bucket_bytes")
"""Fields of a layout about updates that are split over data devices."""


def check_stages(recipe: Recipe) -> None:
    """Refuses what a layout can say and a pipeline has no way for, all at once.

    Raises:
      RecipeError: a model that cannot be cut.
      LayoutError: names the fields.
    """
    layers_of(recipe)
    layout, wrong = recipe.layout, []
    axes = [f"{axis}={size}" for axis, size in layout.tile_sizes.items() if axis not in ("stage", "model")]
    if axes:
        wrong.append(
            f"{', '.join(axes)}: inside a stage only model splits anything. Images are split for models with batch "
            "norm, which no pipeline takes, and experts trade tokens with data devices, for which no pass waits. "
            "Give these devices to model, to stage or to the batch"
        )
    asked = [f"{name}={getattr(layout, name)}" for name in UNUSED if getattr(layout, name)]
    if asked:
        wrong.append(
            f"{', '.join(asked)}: a stage updates its own weights, which is a share already, and each data device "
            "all of them. Take more stages, or model, for memory, and leave these out"
        )
    if layout.asynchronous and layout.gradient_sum != "xla":
        wrong.append(
            f"gradient_sum={layout.gradient_sum}: stages of {layout.schedule} sum at different moments, and only "
            "xla waits for nobody else. Take xla, or 1f1b"
        )
    if recipe.accumulate > 1:
        wrong.append(
            f"accumulate={recipe.accumulate}: micro-batches are that already. Set accumulate=1 and layout.micro_batches"
        )
    if recipe.bad_updates.watches:
        wrong.append(
            f"bad_updates.action={recipe.bad_updates.action}: no stage sees the whole gradient that it judges. "
            "Take ignore"
        )
    if recipe.pipemare.warmup and layout.schedule not in ("pipemare", "pipedream"):
        wrong.append(f"pipemare.warmup={recipe.pipemare.warmup}: {layout.schedule} is synchronous. Leave it out")
    if wrong:
        raise LayoutError("\n".join(f"layout.stage={layout.stage} with {line}." for line in wrong))
