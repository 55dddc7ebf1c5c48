"""One GPU or TPU: digits, ResNet-50, BERT-large beside plain JAX and PyTorch, and whether the rest works there.

    python benchmarks/accelerator.py [--updates 20] [--small] [--only NAME] [--out FOLDER]

Rates are of the compiled update on a batch that lies on the device, in rounds that alternate; the data are made up.
FLOPs are those that XLA counts in the plain loop; MFU is of the device's peak in bfloat16 (`multipod.topology.chips`).
Then come parts that a single device can try: ways of summing and sharding, experts, tensor trains, Adasum, export.

On a device it writes `accelerator.json` and the page accelerator.md to docs/results, elsewhere only to `--out`:
figures of a CPU are no results. `--small` runs the same at sizes for tests. It has not been run on a GPU yet.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from multipod import runtime

if __name__ == "__main__":
    runtime.prepare(cpu_devices=1, cache=runtime.default_cache())  # before JAX is imported

import jax
import machine
import numpy as np
import optax

from multipod.data.clicks.synthetic import Synthetic
from multipod.data.source import ArraySource
from multipod.errors import MultipodError
from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.layout.sync import Sync
from multipod.metrics.objective import Classification, TokenClassification, masked_sums
from multipod.metrics.sparse import SparseTokens
from multipod.micro.exporter import export
from multipod.micro.interpreter import Interpreter
from multipod.models.bert import Bert
from multipod.models.dlrm import Dlrm
from multipod.models.resnet import ResNet, SmallResNet
from multipod.models.st_moe import small_st_moe
from multipod.recipe.recipe import Recipe
from multipod.recipes.digits import digits
from multipod.recipes.find import load
from multipod.step.inspect import attention_choices
from multipod.step.program import program_of
from multipod.topology.chips import CHIPS

RESULTS = Path(__file__).parents[1] / "docs" / "results"
ONE = Layout((1, 1))
Updates = Callable[[int], float]
"""Does so many updates, waits for them, and returns the loss of the last."""


@dataclass(frozen=True)
class MadeUp:
    """Arrays of noise in the shapes of a data set: what is learnt does not matter here."""

    kind: str
    examples: int
    size: int

    def train(self) -> ArraySource:
        """The examples, the same at each call."""
        rng = np.random.default_rng(0)
        if self.kind == "images":
            image = rng.normal(size=(self.examples, self.size, self.size, 3)).astype(np.float32)
            return ArraySource({"image": image, "label": rng.integers(0, 10, self.examples).astype(np.int32)})
        tokens = rng.integers(1, 60, (self.examples, self.size)).astype(np.int32)
        if self.kind == "pairs":
            weight = np.ones_like(tokens)
            return ArraySource({"source": tokens, "target": tokens, "label": tokens, "weight": weight})
        places = np.sort(rng.permuted(np.tile(np.arange(self.size), (self.examples, 1)), axis=1)[:, : self.size // 7])
        label = np.take_along_axis(tokens, places, 1)
        arrays = {"token": tokens, "masked": places.astype(np.int32), "label": label, "weight": np.ones_like(label)}
        return ArraySource(arrays)

    test = train


def recipes(small: bool) -> dict[str, tuple[Recipe, int, str]]:
    """By name: a recipe on one device, what is counted of an example, and what that is called."""
    base = replace(digits(), layout=ONE)
    rows, pixels, length = (4, 32, 28) if small else (256, 224, 128)
    net = ResNet(18, width=8, classes=10) if small else ResNet(dtype="bfloat16")
    bert = Bert(next_sentence=False, dtype="float32" if small else "bfloat16")
    bert = replace(bert, vocab=64, features=16, hidden=32, heads=2, layers=1) if small else bert
    rows_of_text = 4 if small else 64
    images = replace(base, model=net, data=MadeUp("images", rows, pixels), objective=Classification(), batch=rows)
    text = replace(base, data=MadeUp("tokens", rows_of_text, length), objective=TokenClassification())
    text = replace(text, model=bert, batch=rows_of_text)
    return {
        "digits": (replace(base, model=SmallResNet(width=8, blocks=(1,)), batch=32) if small else base, 1, "images"),
        "resnet50": (images, 1, "images"),
        "bert-large": (text, length, "tokens"),
        "bert-large, no dropout": (replace(text, model=replace(bert, dropout=0.0)), length, "tokens"),
    }


def first_batch(recipe: Recipe) -> dict[str, np.ndarray]:
    """The first rows of the training data."""
    return recipe.data.train().read(np.arange(recipe.batch))


def ours(recipe: Recipe) -> Updates:
    """The update as a run compiles it, on a batch that lies on the device."""
    program = program_of(recipe, make_mesh(recipe.layout))
    update, state = program.compile_update(), program.init()
    batch = program.place_batch(first_batch(recipe), np.arange(program.rows), program.rows)

    def run(updates: int) -> float:
        nonlocal state
        for _ in range(updates):
            state, sums = update(state, batch, program.controls())
        return float(sums["loss"]) / float(sums["count"])

    return run


def plain(recipe: Recipe) -> tuple[Updates, float]:
    """A recipe's model, loss and optimizer in a bare `jax.jit`, and the FLOPs of an update by XLA's count."""
    optimizer, key = recipe.optimizer.build(recipe.updates), jax.random.key(recipe.seed)
    params, statistics = jax.jit(recipe.model.init)(key)
    batch = jax.device_put(first_batch(recipe))

    def step(state: Any, key: jax.Array) -> tuple[Any, jax.Array]:
        params, statistics, moments = state

        def loss(params: Any) -> tuple[jax.Array, Any]:
            outputs, new = recipe.model.apply(params, statistics, batch, train=True, key=key)
            return masked_sums(recipe.objective(outputs, batch), None)["loss"] / recipe.batch, new

        (value, statistics), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), statistics, moments), value

    state = params, statistics, jax.jit(optimizer.init)(params)
    compiled = jax.jit(step, donate_argnums=0).lower(state, key).compile()

    def run(updates: int) -> float:
        nonlocal state, key
        for _ in range(updates):
            key, own = jax.random.split(key)
            state, value = compiled(state, own)
        return float(value)

    return run, float((compiled.cost_analysis() or {}).get("flops", 0.0))


def in_torch(recipe: Recipe) -> Updates | None:
    """Updates of a recipe's model in PyTorch. None where PyTorch has not the model, or cannot use the device."""
    try:
        import torch
        from torch_models import TorchBert, torch_resnet, torch_updates
    except ImportError:
        return None
    if torch.cuda.is_available() != (jax.devices()[0].platform == "gpu"):
        return None
    batch, model = first_batch(recipe), recipe.model
    if isinstance(model, ResNet):
        net = torch_resnet(model.depth)
        images = batch | {"image": batch["image"].transpose(0, 3, 1, 2)}
        return None if net is None else torch_updates(net, images, ("image",))
    if isinstance(model, Bert) and model.dropout:
        bert = TorchBert(model.vocab, model.features, model.hidden, model.heads, model.layers, model.positions)
        return torch_updates(bert, batch, ("token", "masked"))
    return None


def seconds_of(cases: dict[str, Updates], updates: int, rounds: int) -> dict[str, float]:
    """Median seconds of an update of each case, in rounds that alternate; the first call of each is left out."""
    for run in cases.values():
        run(1)
    taken: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, run in cases.items():
            start_s = time.perf_counter()
            run(updates)
            taken[name].append((time.perf_counter() - start_s) / updates)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def peak_flop_per_s(kind: str) -> float | None:
    """The device's peak in bfloat16; None where the catalogue does not have it."""
    words = kind.lower().replace(" lite", "e").replace("tpu ", "tpu-").split()
    return next((chip.flop_per_s.get("bfloat16") for word in words if (chip := CHIPS.get(word.split("-sxm")[0]))), None)


def rates(small: bool, only: str, updates: int, rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each model: examples or tokens a second and MFU, ours and plain."""
    peak = peak_flop_per_s(jax.devices()[0].device_kind)
    for name, (recipe, count, unit) in recipes(small).items():
        if only not in ("", name):
            continue
        bare, flops = plain(recipe)
        cases = {"multipod": ours(recipe), "plain JAX": bare}
        peer = in_torch(recipe)
        cases |= {} if peer is None else {"PyTorch": peer}
        seconds = seconds_of(cases, updates, rounds)
        choices = attention_choices(program_of(recipe, make_mesh(recipe.layout)))
        yield {
            "model": name,
            "unit": unit,
            "per_s": {case: recipe.batch * count / one for case, one in seconds.items()},
            "mfu": {case: flops / one / peak for case, one in seconds.items()} if peak else {},
            "flops": flops,
            "attention": {str(choice): times for choice, times in choices.items()},
        }


def checks() -> dict[str, Callable[[], str]]:
    """What else is to work, by name: a function that says what is wrong, or nothing."""
    base = recipes(small=True)["digits"][0]
    whole = Layout((1, jax.device_count()))

    def layout(sync: Sync) -> Callable[[], str]:
        def check() -> str:
            reference, loss = (ours(replace(base, layout=one))(3) for one in (ONE, replace(whole, sync=sync)))
            return "" if abs(loss / reference - 1) < 1e-2 else f"loss {loss:.6f} for {reference:.6f} on one device"

        return check

    def finite(recipe: Recipe) -> Callable[[], str]:
        def check() -> str:
            loss = ours(recipe)(2)
            return "" if np.isfinite(loss) else f"loss {loss}"

        return check

    rows = Synthetic(rows=(5000, 30), examples=64, tests=32)
    clicks = Dlrm(rows=rows.rows, bottom=(8,), top=(8,), features=8, tt_rows=1000, tt_rank=2)
    experts = small_st_moe(64, features=16, hidden=32, heads=2, kv=8, layers=1, every=1)
    text = MadeUp("pairs", 8, 16)
    sums = ("xla", "ordered", "torus", "direct", "ring", "adasum")
    return {
        **{f"gradient sum {name}": layout(Sync(name)) for name in sums},
        **{f"sharding {name}": layout(Sync(sharding=name)) for name in ("zero1", "fsdp")},
        "experts": finite(
            replace(base, model=experts, data=text, objective=SparseTokens(), batch=8, evaluation_batch=8)
        ),
        "tensor trains": finite(
            replace(load("dlrm-small"), data=rows, model=clicks, layout=ONE, batch=32, evaluation_batch=32)
        ),
        "export": exported,
    }


def exported() -> str:
    """Compares a `.tflite` file, run by the project's own interpreter, with the device's own outputs."""
    weights = jax.random.normal(jax.random.key(0), (8, 4))
    function = lambda x: jax.nn.relu(x @ weights)  # noqa: E731
    x = np.linspace(-1, 1, 8, dtype=np.float32)[None]
    told = Interpreter(export(function, x)).run(x)
    expected = np.asarray(jax.jit(function)(x))
    far = float(np.abs(np.asarray(told[0]) - expected).max())
    return "" if far < 1e-2 else f"differs by {far:g}"  # matrix units round to 10 bits


def said(check: Callable[[], str]) -> str:
    """What is wrong, in one line; `ok` if nothing."""
    try:
        return check() or "ok"
    except (MultipodError, jax.errors.JaxRuntimeError, NotImplementedError, ValueError, TypeError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"


def measure(small: bool, only: str, updates: int, rounds: int) -> dict[str, Any]:
    """All rates and checks of the first device, with what they were measured on."""
    device = jax.devices()[0]
    about = {"device": device.device_kind, "platform": device.platform, "devices": jax.device_count()}
    rows = list(rates(small, only, updates, rounds))
    return {
        **about,
        "small": small,
        "commit": machine.commit(),
        "machine": machine.facts(),
        "rates": rows,
        "checks": {name: said(check) for name, check in checks().items() if only in ("", name)},
    }


def page(record: dict[str, Any]) -> str:
    """The page of a record."""
    rows = [
        [
            f"{row['model']}: {case}",
            f"{per_s:,.0f} {row['unit']}",
            f"{row['mfu'][case]:.1%}" if row["mfu"] else "-",
            f"{per_s / row['per_s']['plain JAX']:.2f}",
        ]
        for row in record["rates"]
        for case, per_s in row["per_s"].items()
    ]
    attention = [f"- {row['model']}: {n} x {why}" for row in record["rates"] for why, n in row["attention"].items()]
    parts = [[name, result] for name, result in record["checks"].items()]
    return "\n".join(
        [
            f"# On one {record['device']}",
            "",
            f"`python benchmarks/accelerator.py`{' --small' if record['small'] else ''}, commit {record['commit']}; "
            f"{machine.headline(record['machine'])}.",
            "",
            machine.table(["model", "a second", "MFU", "over plain JAX"], rows),
            "",
            *(["Attention:", "", *attention, ""] if attention else []),
            machine.table(["part", "result"], parts),
            "",
        ]
    )


def main(words: list[str] | None = None) -> dict[str, Any]:
    """Measures, prints the page, and writes it where there is a device or `--out`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="", help="this model or part alone")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    record = measure(asked.small, asked.only, asked.updates, asked.rounds)
    folder = asked.out or (None if record["platform"] == "cpu" or asked.small or asked.only else RESULTS)
    print(page(record))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "accelerator.json").write_text(json.dumps(record, indent=1) + "\n")
        (folder / "accelerator.md").write_text(page(record))
    return record


if __name__ == "__main__":
    main()
