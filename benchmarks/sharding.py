"""State of a run on each device under ZeRO-1 and FSDP: real models on 2 to 8,192 devices, by shapes alone.

    python benchmarks/sharding.py [--markdown FILE]

Nothing is compiled or allocated. Of each mesh it prints the bytes of LAMB's state on a device, these bytes as a
multiple of an equal share, and the bytes that a rule that only divides dims would keep (`layout.shares.update_spec`).
"""

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import machine

from multipod.layout.axes import DATA_AXES
from multipod.layout.mesh import is_split
from multipod.layout.shares import share_of, update_spec
from multipod.models.bert import Bert
from multipod.models.transformer import Transformer
from multipod.recipes.imagenet import resnet50

MODELS: dict[str, Callable[[], Any]] = {
    "BERT-large": Bert,
    "ResNet-50": lambda: resnet50().model,
    "Transformer-big": Transformer,
}
MESHES = [(1, 2), (1, 3), (2, 3), (1, 7), (3, 4), (6, 10), (8, 16), (32, 64), (1, 2047), (32, 256), (1, 8188)]
SLOTS = 2
"""Arrays of the weights' size in LAMB's state."""


def kept(shapes: list[tuple[int, ...]], mesh: tuple[int, int]) -> tuple[int, int]:
    """Elements that a device keeps of tensors of these shapes: as the step shares them, and where dims divide alone."""
    sizes, devices = dict(zip(DATA_AXES, mesh, strict=True)), math.prod(mesh)
    shares = [share_of(shape, sizes) for shape in shapes]
    now = sum(math.prod(share.kept) // (devices if is_split(share.spec) else 1) for share in shares)
    dims = sum(math.prod(shape) // (devices if is_split(update_spec(shape, sizes)) else 1) for shape in shapes)
    return now, dims


def rows() -> list[list[str]]:
    lines = []
    for name, model in MODELS.items():
        shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(model().init, jax.random.key(0))[0])]
        total = 4 * SLOTS * sum(map(math.prod, shapes))
        for mesh in MESHES:
            now, dims = (4 * SLOTS * elements for elements in kept(shapes, mesh))
            share = total / math.prod(mesh)
            mesh_text = f"{mesh[0]}x{mesh[1]}"
            most = 1.02 * share + 1024 * SLOTS * len(shapes)
            assert now <= most, (name, mesh, now, most)
            lines.append([name, mesh_text, f"{now:,}", f"{now / share:.4f}", f"{dims:,}", f"{dims / share:.1f}"])
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the table there")
    options = parser.parse_args()
    head = ["model", "mesh", "bytes a device", "x equal share", "dims alone", "x equal share "]
    table = machine.table(head, rows())
    print(table)
    if options.markdown:
        command = " ".join(["benchmarks/sharding.py", *sys.argv[1:]])
        options.markdown.write_text(f"`python {command}`, commit {machine.commit()}.\n\n{table}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
