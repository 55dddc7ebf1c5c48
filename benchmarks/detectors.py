"""Detectors against torchvision and pycocotools on the same cores: a step of Mask R-CNN, NMS, RoIAlign, scoring.

    python benchmarks/detectors.py [step nms roi_align scoring] [--side 512] [--images 500] [--rounds 7]

Needs the extras `bench` and `coco`. Both sides have the same inputs, and the step the same weights; what they give is
compared before anything is timed. They run in turn in one process on all cores: medians of wall and of processor time,
and the medians of the rounds' ratios.

torchvision's operators are its own compiled ones. Where its wheel is linked against CUDA and torch is not, empty
libraries stand in for CUDA's: nothing of a CPU operator calls them. That needs gcc and binutils.
"""

import argparse
import contextlib
import ctypes
import importlib.util
import io
import os
import subprocess
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multipod import runtime

runtime.prepare(1)  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import machine  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from multipod.interop.weights.convert import to_ours  # noqa: E402
from multipod.interop.weights.families import family_of  # noqa: E402
from multipod.metrics.coco import Detections, average_precision  # noqa: E402
from multipod.metrics.coco_masks import encode_masks  # noqa: E402
from multipod.models.mask_rcnn import MaskRcnn  # noqa: E402
from multipod.nn.detection.nms import nms  # noqa: E402
from multipod.nn.detection.roi_align import RoiAlign, pyramid_level, stride_scales  # noqa: E402

Way = Callable[[], Any]
Case = tuple[str, Way, Way]
"""What is done, by us, by the other."""


def load_torchvision() -> Any:
    """torchvision with its own compiled operators."""
    try:
        torch.ops.load_library(_operators())
    except OSError:
        with tempfile.TemporaryDirectory() as folder:
            _stand_in_for_cuda(Path(folder))
            ctypes.CDLL(_operators(), mode=os.RTLD_LAZY)
    import torchvision

    return torchvision


def _operators() -> str:
    return str(Path(importlib.util.find_spec("torch").origin).parents[1] / "torchvision" / "_C.so")


def _stand_in_for_cuda(folder: Path) -> None:
    """Loads libraries by the names of CUDA's that define what the compiled operators must find, and do nothing."""
    lines = subprocess.run(["nm", "-D", "-u", _operators()], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1].partition("@")[0] for line in lines.splitlines()}
    wanted = sorted(name for name in names if "cuda" in name.lower() and not name.startswith(("cuda", "__cuda")))
    (folder / "wanted.s").write_text(".data\n" + "".join(f".globl {name}\n{name}: .zero 64\n" for name in wanted))
    (folder / "none.s").write_text("")
    for library, source in (("libc10_cuda.so", "wanted.s"), ("libtorch_cuda.so", "none.s")):
        file = folder / library
        command = ["gcc", "-shared", "-z", "noexecstack", "-o", file, folder / source, f"-Wl,-soname,{library}"]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)


def step_case(side: int) -> list[Case]:
    """Losses and all gradients of Mask R-CNN R50-FPN, one image."""
    from torchvision.models import resnet50
    from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
    from torchvision.models.detection.mask_rcnn import MaskRCNN
    from torchvision.ops import FrozenBatchNorm2d

    torch.manual_seed(1)
    backbone = _resnet_fpn_extractor(resnet50(norm_layer=FrozenBatchNorm2d), 3)
    theirs = MaskRCNN(backbone, 91, min_size=side, max_size=side, image_mean=[0] * 3, image_std=[1] * 3).train()
    spec = MaskRcnn()
    family = family_of(spec, library="torchvision")
    state = {name: tensor.numpy() for name, tensor in theirs.state_dict().items()}
    params, statistics = to_ours(family, spec, state, *jax.eval_shape(spec.init, jax.random.key(0)))
    rng = np.random.default_rng(3)
    low = rng.uniform(0, 0.6 * side, (8, 2))
    box = np.concatenate([low, low + rng.uniform(0.05 * side, 0.35 * side, (8, 2))], 1).astype(np.float32)
    image = rng.normal(size=(1, side, side, 3)).astype(np.float32)
    label = rng.integers(1, 91, (1, 8)).astype(np.int32)
    batch = {"image": image, "box": box[None], "label": label, "object_mask": np.ones((1, 8, 112, 112), bool)}

    @jax.jit
    def update(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            outputs, _ = spec.apply(params, statistics, batch, train=True, key=jax.random.key(0))
            return outputs["loss"].mean()

        return jax.value_and_grad(loss)(params)

    masks = np.zeros((8, side, side), np.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, box.round().astype(int), strict=True):
        mask[y0:y1, x0:x1] = 1
    pictures = [torch.tensor(image[0].transpose(2, 0, 1))]
    truth = [{"boxes": torch.tensor(box), "labels": torch.tensor(label[0]).long(), "masks": torch.tensor(masks)}]

    def torch_step() -> float:
        theirs.zero_grad(set_to_none=True)
        loss = sum(theirs(pictures, truth).values())
        loss.backward()
        return loss.item()

    params, batch = jax.device_put((params, batch))
    ours = lambda: float(jax.block_until_ready(update(params, batch))[0])  # noqa: E731
    first = ours(), torch_step()
    # Not closer: which anchors and regions are drawn differs.
    assert abs(first[0] - first[1]) < 0.2 * first[1], f"not the same model: losses {first}"
    return [(f"Mask R-CNN R50-FPN, one image of {side} x {side}, losses and gradients", ours, torch_step)]


def nms_cases() -> list[Case]:
    """Boxes around a few objects, as an RPN gives them, and boxes anywhere."""
    cases = []
    for number, spread, what in (
        (1000, 8.0, "around 40 objects"),
        (4000, 8.0, "around 40 objects"),
        (4000, 1e3, "anywhere"),
    ):
        rng = np.random.default_rng(number)
        centre = rng.uniform(100, 900, (40, 2)).repeat(number // 40, 0) + rng.normal(0, spread, (number, 2))
        side = rng.uniform(40, 90, (40, 2)).repeat(number // 40, 0) * rng.uniform(0.8, 1.2, (number, 2))
        box = np.concatenate([centre - side / 2, centre + side / 2], 1).astype(np.float32)
        score = rng.permutation(number).astype(np.float32) / number
        run = jax.jit(lambda box, score: nms(box, score, 0.7, count=1000, tile=256))
        ours_box, ours_score, theirs = jnp.asarray(box), jnp.asarray(score), (torch.tensor(box), torch.tensor(score))

        def ours(run=run, box=ours_box, score=ours_score) -> np.ndarray:
            return np.asarray(run(box, score))

        def other(box=theirs[0], score=theirs[1]) -> np.ndarray:
            return torch.ops.torchvision.nms(box, score, 0.7)[:1000].numpy()

        found = ours()
        np.testing.assert_array_equal(found[found >= 0], other())
        cases.append((f"NMS of {number:,} boxes {what}, {len(other())} stay", ours, other))
    return cases


def roi_align_cases() -> list[Case]:
    """Features of 512 boxes from levels 2 to 5 of an image of 800 x 1344: forward, and with gradients of the maps.

    By gathering; the einsums are for accelerators.
    """
    from torchvision.ops import MultiScaleRoIAlign

    rng = np.random.default_rng(5)
    maps = [rng.normal(size=(800 >> level, 1344 >> level, 256)).astype(np.float32) for level in range(2, 6)]
    side = np.exp(rng.uniform(np.log(16), np.log(600), (512, 2)))
    centre = rng.uniform((0, 0), (1344, 800), (512, 2))
    box = np.clip(np.concatenate([centre - side / 2, centre + side / 2], 1), 0, [1344, 800] * 2).astype(np.float32)
    weight = rng.normal(size=(512, 7, 7, 256)).astype(np.float32)
    pool = MultiScaleRoIAlign(["0", "1", "2", "3"], 7, 2)
    # Contiguous by channels, as PyTorch's convolutions leave them.
    wide = {str(k): torch.tensor(one.transpose(2, 0, 1)[None].copy(), requires_grad=True) for k, one in enumerate(maps)}
    boxes, weights = [torch.tensor(box)], torch.tensor(weight.transpose(0, 3, 1, 2).copy())

    def forward(maps: list[jax.Array], box: jax.Array) -> jax.Array:
        return RoiAlign(7).of_pyramid(maps, box, pyramid_level(box) - 2, scales=stride_scales(2, 5))

    def torch_forward() -> torch.Tensor:
        with torch.no_grad():
            return pool(wide, boxes, [(800, 1344)])

    def torch_gradient() -> list[torch.Tensor]:
        return list(torch.autograd.grad((pool(wide, boxes, [(800, 1344)]) * weights).sum(), wide.values()))

    held = jax.device_put((maps, box, weight))
    run = jax.jit(forward)
    back = jax.jit(jax.grad(lambda maps, box, weight: (forward(maps, box) * weight).sum()))
    ours = lambda: jax.block_until_ready(run(*held[:2]))  # noqa: E731
    gradient = lambda: jax.block_until_ready(back(*held))  # noqa: E731
    np.testing.assert_allclose(ours(), torch_forward().permute(0, 2, 3, 1), atol=1e-3)
    for one, other in zip(gradient(), torch_gradient(), strict=True):
        np.testing.assert_allclose(one, other[0].permute(1, 2, 0), atol=1e-2)
    name = "RoIAlign of 512 boxes, 7 x 7"
    return [(name, ours, torch_forward), (f"{name}, gradients", gradient, torch_gradient)]


def scoring_cases(images: int) -> list[Case]:
    """COCO's numbers of boxes and of masks: 80 classes, 7 objects an image, 100 detections."""
    rng = np.random.default_rng(7)
    truth: dict[str, Any] = {
        "images": [{"id": k, "width": 640, "height": 480} for k in range(1, images + 1)],
        "categories": [{"id": k, "name": str(k)} for k in range(1, 81)],
        "annotations": [],
    }
    rows = []
    square = np.pad(np.ones((24, 24)), 2)[None]
    for image in range(1, images + 1):
        objects = rng.integers(1, 14)
        low, side = rng.uniform(0, 350, (objects, 2)), rng.uniform(8, 130, (objects, 2))
        kinds = rng.integers(1, 81, objects)
        for box, kind in zip(np.concatenate([low, side], 1), kinds, strict=True):
            code = encode_masks(square, box[None], 480, 640)[0]
            one = {"id": len(truth["annotations"]) + 1, "image_id": image, "category_id": int(kind), "iscrowd": 0}
            one |= {"bbox": box.tolist(), "area": float(box[2] * box[3]), "segmentation": code}
            truth["annotations"].append(one)
        near = rng.integers(0, objects, 100)
        box = np.concatenate([low[near] + rng.normal(0, 6, (100, 2)), side[near] * rng.uniform(0.7, 1.3, (100, 2))], 1)
        kind = np.where(rng.random(100) < 0.5, kinds[near], rng.integers(1, 81, 100))
        masks = encode_masks(square.repeat(100, 0), box, 480, 640)
        rows.append((np.full(100, image), box, rng.random(100), kind, masks))
    columns = [np.concatenate(column) for column in list(zip(*rows, strict=True))[:4]]
    found = Detections(*columns, mask=tuple(code for row in rows for code in row[4]))
    cases = []
    for kind in ("box", "mask"):

        def ours(kind: str = kind) -> list[float]:
            return list(average_precision(truth, found, kind).values())

        def other(kind: str = kind) -> list[float]:
            return _pycocotools(truth, found, kind)

        np.testing.assert_allclose(ours(), other(), rtol=0, atol=1e-9)
        cases.append((f"scoring {kind}es" if kind == "box" else "scoring masks", ours, other))
    return cases


def _pycocotools(truth: dict[str, Any], found: Detections, kind: str) -> list[float]:
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    with contextlib.redirect_stdout(io.StringIO()):
        right = COCO()
        right.dataset = {**truth, "annotations": [dict(one) for one in truth["annotations"]]}
        right.createIndex()
        rows = zip(found.image.tolist(), found.category.tolist(), found.score.tolist(), strict=True)
        names = ("image_id", "category_id", "score")
        results = [dict(zip(names, row, strict=True)) for row in rows]
        for result, box, code in zip(results, found.box.tolist(), found.mask or (), strict=True):
            result |= {"bbox": box} if kind == "box" else {"segmentation": dict(code)}
        judged = COCOeval(right, right.loadRes(results), "bbox" if kind == "box" else "segm")
        judged.evaluate()
        judged.accumulate()
        judged.summarize()
    return list(judged.stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=["step", "nms", "roi_align", "scoring"])
    parser.add_argument("--side", type=int, default=512, help="of the step's image")
    parser.add_argument("--images", type=int, default=500, help="that are scored")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # pycocotools and NumPy's newest arrays
    load_torchvision()
    print(machine.headline(machine.facts()), flush=True)
    makers = {
        "step": lambda: step_case(options.side),
        "nms": nms_cases,
        "roi_align": roi_align_cases,
        "scoring": lambda: scoring_cases(options.images),
    }
    rows = [machine.paired_row(*case, options.rounds) for name in options.cases for case in makers[name]()]
    print(machine.table(machine.PAIRED, rows))
    print(f"Load average at the end: {machine.facts()['load']}")


if __name__ == "__main__":
    main()
