"""MLPerf's recipes at reference size: parameters and bytes from their shapes, beside published counts.

    python benchmarks/reference_size.py [NAME ...]

Nothing is allocated: parameters are abstract.
"""

import argparse

from multipod import runtime

runtime.prepare(1)  # before JAX is imported

import jax  # noqa: E402
import machine  # noqa: E402

from multipod.recipes.find import load  # noqa: E402

PUBLISHED = {
    "resnet50": (25_557_032, "torchvision"),
    "ssd": (19_276_214, "the reference with Google's 1x1 head on the last map, counted from both codes"),
    "mask-rcnn": (44_401_393, "torchvision, without frozen norms"),
    "bert-large": (336_226_108, "Hugging Face, BertForPreTraining"),
    "gnmt": (160_671_297, "NVIDIA's log of MLPerf v0.6"),
}
"""Parameters, and who says so."""


def row_of(name: str) -> list[str]:
    """The cells of a recipe."""
    recipe = load(name)
    params, _ = jax.eval_shape(recipe.model.init, jax.random.key(0))
    count, nbytes = (
        sum(each) for each in zip(*((x.size, x.size * x.dtype.itemsize) for x in params.values()), strict=True)
    )
    published, source = PUBLISHED[name]
    beside = f"{published:,}" + ("" if published == count else " (another)")
    return [name, f"{count:,}", beside, source, f"{nbytes / 1e6:,.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=list(PUBLISHED))
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    head = ["recipe", "parameters", "published", "by", "weights, MB"]
    print(machine.table(head, [row_of(name) for name in options.names]))


if __name__ == "__main__":
    main()
