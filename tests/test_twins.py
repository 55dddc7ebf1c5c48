"""Recipes beside their PyTorch twins: the same weights and batches give one loss curve for 20 updates.

What is allowed is measured: ten times as far as PyTorch's own float32 comes from its float64 on the same way, plain and
with each weight rounded once more, which turns choices over that rounding decides (ReLUs, hard negatives).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from multipod.data.source import ArraySource, Data
from multipod.interop.weights.convert import to_theirs
from multipod.interop.weights.families import family_of
from multipod.layout.mesh import make_mesh
from multipod.metrics.objective import Classification
from multipod.models.resnet import ResNet
from multipod.optim.rates import Constant
from multipod.optim.sgd import Sgd
from multipod.recipe.override import override
from multipod.recipe.recipe import Recipe
from multipod.recipes.find import load
from multipod.step.program import program_of
from multipod.verify.moving import HostStates
from multipod.verify.rounding import EPS, LIMIT, shaken

torch = pytest.importorskip("torch")
twins = pytest.importorskip("torch_twins")
UPDATES, SHAKEN = 20, 3


@dataclass(frozen=True)
class Photos:
    """Noise of 40 x 40, with labels that are learnt by heart."""

    def train(self):
        rng = np.random.default_rng(0)
        image = rng.normal(size=(32, 40, 40, 3)).astype(np.float32)
        return ArraySource({"image": image, "label": rng.integers(0, 7, 32).astype(np.int32)})

    test = train


@dataclass(frozen=True)
class Grainy:
    """Drawn shapes under noise. Without it rounding decides a ReLU in the first update: 1 % of a bias's gradient."""

    shapes: Data

    def train(self):
        rng = np.random.default_rng(0)
        examples = self.shapes.train().read(np.arange(64))
        grain = rng.integers(0, 128, examples["image"].shape).astype(np.uint8)
        return ArraySource(examples | {"image": examples["image"] // 2 + grain})

    test = train


def ours(recipe: Recipe):
    """The weights before the first update, the batches, and the losses of the recipe as it is trained."""
    states = HostStates(program_of(recipe, make_mesh(recipe.layout)))
    source, state = recipe.data.train(), states.write(states.first)
    batches, losses = [], []
    for update in range(UPDATES):
        batch = states.batch(source, update)
        batches.append({name: np.array(array) for name, array in batch.items()})
        state, made = states.made(state, batch)
        losses.append(float(made.sums["loss"]) / float(made.sums["count"]))
    return states.first, batches, np.array(losses)


def theirs(module, recipe: Recipe, batches, dtype) -> np.ndarray:
    """The losses of a module that returns its loss, under PyTorch's optimizer of the same name."""
    module = module.to(dtype).train()
    optimizer = torch_optimizer(module, recipe.optimizer)
    rate = recipe.optimizer.schedule(recipe.updates)
    losses = []
    for update, batch in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = float(rate(update))
        loss = module({name: as_type(array, dtype) for name, array in batch.items()})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses)


def as_type(array, dtype):
    tensor = torch.from_numpy(array)
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def torch_optimizer(module, options):
    """Weight decay is for tensors of two dims and more, as in our rules."""
    tensors = [tensor for tensor in module.parameters() if tensor.requires_grad]
    groups = [
        {"params": [tensor for tensor in tensors if tensor.ndim > 1], "weight_decay": options.weight_decay},
        {"params": [tensor for tensor in tensors if tensor.ndim == 1], "weight_decay": 0.0},
    ]
    if isinstance(options, Sgd):
        return torch.optim.SGD(groups, lr=0.0, momentum=options.momentum, nesterov=options.nesterov)
    return torch.optim.AdamW(groups, lr=0.0, betas=(options.beta1, options.beta2), eps=options.eps)


def loaded(module, params, rename: Callable[[str], str] = lambda name: name):
    """A module with our parameters, by names that differ in their separators and last parts alone."""
    ends = {"kernel": "weight", "scale": "weight"}
    with torch.no_grad():
        here = dict(module.named_parameters())
        for name, array in params.items():
            *path, last = rename(name).split("/")
            tensor = here.pop(".".join([*path, ends.get(last, last)]))
            axes = {4: (3, 2, 0, 1), 2: (1, 0)}.get(array.ndim, (0,))
            tensor.copy_(torch.from_numpy(np.array(array).transpose(axes)))
        assert not here
    return module


def check(recipe: Recipe, build) -> None:
    """One curve: ours is as near PyTorch's float64 as its float32 is, but for rounding; and something was learnt."""
    first, batches, losses = ours(recipe)
    exact = theirs(build(first), recipe, batches, torch.float64)
    rng = np.random.default_rng(0)
    starts = [first, *(first._replace(params=shaken(first.params, rng)) for _ in range(SHAKEN))]
    rounded = [theirs(build(start), recipe, batches, torch.float32) for start in starts]
    noise = np.abs(np.array(rounded) - exact).max(0)
    allowed = LIMIT * np.maximum(np.maximum.accumulate(noise), EPS * exact)
    np.testing.assert_array_less(np.abs(losses - exact), allowed)
    assert losses[-3:].mean() < losses[:3].mean()


def test_digits():
    recipe = override(load("digits"), ["layout.sync.gradient_sum=xla"])
    check(recipe, lambda first: loaded(twins.SmallResNet(), first.params))


class OfTorchvision(torch.nn.Module):
    """The mean loss of a classifier."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        logits = self.model(twins.as_torch(batch["image"]))
        return torch.nn.functional.cross_entropy(logits, batch["label"].long())


@pytest.mark.slow
def test_resnet18():
    """torchvision's own, under momentum."""
    from torchvision_reference import torchvision

    optimizer = Sgd(Constant(0.02), momentum=0.9, nesterov=True, weight_decay=1e-4)
    recipe = Recipe("resnet18", ResNet(18, classes=7), Photos(), Classification(), optimizer, 16, UPDATES)

    def build(first):
        model = torchvision.models.resnet18(num_classes=7)
        state = to_theirs(family_of(recipe.model, library="torchvision"), recipe.model, first.params, first.statistics)
        model.load_state_dict({name: torch.from_numpy(np.array(array)) for name, array in state.items()}, strict=False)
        return OfTorchvision(model)

    check(recipe, build)


@pytest.mark.slow
def test_ssd():
    """Under momentum, as published. (Optax has Adam's 1 - 0.999^t in float32, 3e-5 off at first; PyTorch has not.)"""
    recipe = override(load("ssd-shapes"), ["batch=8"])
    optimizer = Sgd(Constant(1e-3), momentum=0.9, nesterov=False, weight_decay=5e-4)
    recipe = replace(recipe, data=Grainy(recipe.data), optimizer=optimizer)
    boxes = recipe.model.model.boxes

    def rename(name: str) -> str:
        parts = name.replace("body/0/conv", "conv1").replace("body/0/norm", "bn1").replace("body/1/conv", "conv2")
        parts = parts.replace("body/1/norm", "bn2").replace("shortcut/conv", "downsample/0")
        parts = parts.replace("shortcut/norm", "downsample/1").replace("stem/conv", "stem/0")
        parts = parts.replace("stem/norm", "stem/1").replace("squeeze/conv", "0").replace("expand/conv", "2")
        what = parts.split("/")
        return "/".join([what[2], what[1], what[-1]]) if what[0] == "heads" else parts

    def build(first):
        defaults = torch.from_numpy(boxes.corners() * np.float32(boxes.pixels))
        return loaded(twins.Ssd(defaults, classes=4, shapes=boxes.shapes[0]), first.params, rename)

    check(recipe, build)


class OfTransformers(torch.nn.Module):
    """The mean over examples of what their masked tokens cost, a tenth of their sum; packed rows see themselves."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, batch):
        segment = batch["segment"]
        seen = (segment[:, :, None] == segment[:, None, :])[:, None]
        dtype = next(self.model.parameters()).dtype
        mask = torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, torch.finfo(dtype).min)
        logits = self.model(batch["token"].long(), attention_mask=mask, position_ids=batch["position"].long()).logits
        told = torch.take_along_dim(logits, batch["masked"].long()[..., None], 1)
        cost = torch.nn.functional.cross_entropy(told.flatten(0, 1), batch["label"].flatten().long(), reduction="none")
        return (cost.reshape(batch["label"].shape) * (batch["weight"] != 0)).sum(1).div(10).mean()


@pytest.mark.slow
def test_bert_tiny():
    """Hugging Face's, on the standard library's text, packed."""
    from torchvision_reference import torchvision  # noqa: F401  (before transformers)

    transformers = pytest.importorskip("transformers")
    recipe = override(load("stdlib-lm"), ["batch=16"])

    def build(first):
        family = family_of(recipe.model)
        config = transformers.BertConfig(**family.config(recipe.model), attn_implementation="eager")
        state = to_theirs(family, recipe.model, first.params, {})
        model = transformers.BertForMaskedLM(config)
        left = model.load_state_dict(
            {name: torch.from_numpy(np.array(array)) for name, array in state.items()}, strict=False
        )
        assert not left.unexpected_keys
        return OfTransformers(model)

    check(recipe, build)
