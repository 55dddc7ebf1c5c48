"""MLPerf's recipes at reference size: parameters, bytes and FLOPs from their shapes, beside published counts.

    python benchmarks/reference_size.py [NAME ...]

Nothing is allocated or compiled: parameters are abstract, and FLOPs are what XLA's cost analysis says of the lowered
gradient of the loss of one example, forward and backward, without the optimizer. It counts the body of a loop once.
"""

import argparse

from multipod import runtime

runtime.prepare(1)  # before JAX is imported

import jax  # noqa: E402
import machine  # noqa: E402

from multipod.data.source import example_of  # noqa: E402
from multipod.pytrees import Batch, Params, Statistics  # noqa: E402
from multipod.recipe.override import override  # noqa: E402
from multipod.recipe.recipe import Recipe  # noqa: E402
from multipod.recipes.find import load  # noqa: E402

PUBLISHED = {
    "resnet50": (25_557_032, "torchvision"),
    "ssd": (19_276_214, "the reference with Google's 1x1 head on the last map, counted from both codes"),
    "mask-rcnn": (44_401_393, "torchvision, without frozen norms"),
    "bert-large": (336_226_108, "Hugging Face, BertForPreTraining"),
    "transformer-big": (
        209_842_176,
        "PyTorch's nn.Transformer without attention's biases, a table of 32,768 tokens",
    ),
    "gnmt": (160_671_297, "NVIDIA's log of MLPerf v0.6"),
    "dlrm-mlperf": (
        24_036_595_969,
        "added up from the sizes in MLPerf's reference; tables dense",
    ),
    "dlrm-v2": (26_151_671_809, "added up from the sizes in MLPerf's reference"),
}
"""Parameters, and who says so."""

GFLOP = {
    "resnet50": "24.5: 6 x torchvision's 4.09 G multiply-adds",
    "bert-large": "1,033: 6 x parameters x 512 tokens",
    "dlrm-v2": "0.12: 3 x MLCommons' 40 MFLOP of a forward pass",
}
"""What is known from elsewhere of the FLOPs of an example, forward and backward."""

CHANGES = {
    "dlrm-mlperf": ["model.tables.place=replicated", "model.tt_rows=0"],
    "dlrm-v2": ["model.tables.place=replicated"],
}
"""Of a recipe, so that its tables are dense and have no room to divide over devices."""

LOOPS = ("gnmt",)
"""Recipes whose layers are loops, of which XLA's analysis counts the body once: it says nothing of them."""


def gflop_of(recipe: Recipe) -> float:
    """Billions of FLOPs of the gradient of one example's loss."""
    params, statistics = jax.eval_shape(recipe.model.init, jax.random.key(0))
    batch = {n: jax.ShapeDtypeStruct(array.shape, array.dtype) for n, array in example_of(recipe.data).items()}

    def loss(params: Params, statistics: Statistics, batch: Batch) -> jax.Array:
        outputs, _ = recipe.model.apply(params, statistics, batch, train=True, key=jax.random.key(0))
        return recipe.objective(outputs, batch)["loss"].mean()

    traced = jax.jit(jax.grad(loss)).trace(params, statistics, batch)
    # As an accelerator has it: some parts are loops on CPU.
    return traced.lower(lowering_platforms=("tpu",)).cost_analysis()["flops"] / 1e9


def row_of(name: str) -> list[str]:
    """The cells of a recipe."""
    recipe = override(load(name), CHANGES.get(name, []))
    params, _ = jax.eval_shape(recipe.model.init, jax.random.key(0))
    count, nbytes = (
        sum(each) for each in zip(*((x.size, x.size * x.dtype.itemsize) for x in params.values()), strict=True)
    )
    published, source = PUBLISHED[name]
    beside = f"{published:,}" + ("" if published == count else " (another)")
    gflop = "-" if name in LOOPS else f"{gflop_of(recipe):,.4g}"
    return [name, f"{count:,}", beside, source, f"{nbytes / 1e6:,.1f}", gflop, GFLOP.get(name, "-")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(PUBLISHED))
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    head = ["recipe", "parameters", "published", "by", "weights, MB", "GFLOP an example", "known"]
    print(machine.table(head, [row_of(name) for name in options.names]))


if __name__ == "__main__":
    main()
