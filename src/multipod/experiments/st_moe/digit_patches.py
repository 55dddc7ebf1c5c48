"""Digits as 16 patches each, told by a dense or a sparse layer: who learns faster, who overfits (claim M10)."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

from multipod.experiments.outcome import Claim, Section
from multipod.experiments.st_moe.byte_lm import merged_as
from multipod.nn.dense import Dense, GatedMlp, RMSNorm
from multipod.nn.experts.layer import ExpertSpec, SparseMlp
from multipod.nn.experts.routing import Routing
from multipod.nn.text.attention import Attention

COUNTS = (250, 1437)
"""Training images: few, and all but the held-out ones."""

SEEDS, WIDTH, HIDDEN, BATCH, STEPS, EVERY = (0, 1, 2), 48, 96, 64, 400, 20


class Reader(nnx.Module):
    """Patches [n, 16, 4] to logits [n, 10] and a balance loss."""

    def __init__(self, sparse: bool, rngs: nnx.Rngs) -> None:
        self.inward = Dense({"pixels": 4}, {"embed": WIDTH}, rngs=rngs)
        self.places = nnx.Param(0.3 * jax.random.normal(rngs.params(), (16, WIDTH)))
        self.attention = Attention(WIDTH, 4, rngs=rngs)
        self.norms = nnx.List([RMSNorm(WIDTH), RMSNorm(WIDTH)])
        routing = Routing(8, 1, group=0, dropless=True)
        spec = ExpertSpec(routing, HIDDEN)
        self.mlp = SparseMlp(spec, WIDTH, rngs) if sparse else GatedMlp(WIDTH, HIDDEN, rngs=rngs)
        self.out = Dense({"embed": WIDTH}, {"classes": 10}, rngs=rngs)

    def __call__(self, patches: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits and the balance loss."""
        x = self.inward(patches) + self.places[...]
        y = self.norms[0](x)
        x = x + self.attention(y, self.attention.memory(y))
        made = self.mlp(self.norms[1](x))
        y, balance = (made[0], made[1]["balance"]) if isinstance(made, tuple) else (made, jnp.zeros(()))
        return self.out((x + y).mean(1)), balance


@lru_cache(maxsize=1)
def _digits() -> tuple[np.ndarray, np.ndarray]:
    found = load_digits()
    images = found.images.astype(np.float32) / 16
    patches = images.reshape(-1, 4, 2, 4, 2).transpose(0, 1, 3, 2, 4).reshape(-1, 16, 4)
    order = np.random.default_rng(0).permutation(len(patches))
    return patches[order], found.target[order].astype(np.int32)


@partial(jax.jit, static_argnums=0)
def _fit(sparse: bool, seed: jax.Array, x: jax.Array, y: jax.Array, tx: jax.Array, ty: jax.Array) -> Any:
    """Accuracy on training and test images after each `EVERY` steps."""
    weights = nnx.split(Reader(sparse, nnx.Rngs(jax.random.key(seed))), nnx.Param, ...)[1]
    transformation = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))

    def model(weights: Any, images: jax.Array) -> tuple[jax.Array, jax.Array]:
        return merged_as(lambda: Reader(sparse, nnx.Rngs(0)), weights, train=True)(images)

    def loss(weights: Any, rows: jax.Array) -> jax.Array:
        logits, balance = model(weights, x[rows])
        return optax.softmax_cross_entropy_with_integer_labels(logits, y[rows]).mean() + 1e-2 * balance

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        weights, state = carry
        gradients = jax.grad(loss)(weights, jax.random.randint(key, (BATCH,), 0, len(x)))
        changes, state = transformation.update(gradients, state, weights)
        return (optax.apply_updates(weights, changes), state), None

    def several(carry: Any, keys: jax.Array) -> tuple[Any, Any]:
        carry, _ = jax.lax.scan(step, carry, keys)
        right = [(model(carry[0], a)[0].argmax(-1) == b).mean() for a, b in ((x, y), (tx, ty))]
        return carry, jnp.stack(right)

    keys = jax.random.split(jax.random.key(seed + 100), STEPS).reshape(STEPS // EVERY, EVERY)
    return jax.lax.scan(several, (weights, transformation.init(weights)), keys)[1]


def small_data(report: Callable[[str], None]) -> tuple[list[Claim], Section]:
    """M10."""
    x, y = _digits()
    reached: dict[tuple[str, int], list[float]] = {}
    told: dict[tuple[str, int], list[float]] = {}
    for count in COUNTS:
        for name, sparse in (("dense", False), ("sparse", True)):
            report(f"M10: {name} on {count} digits")
            curves = [np.asarray(_fit(sparse, seed, x[:count], y[:count], x[1437:], y[1437:])) for seed in SEEDS]
            reached[name, count] = [_first(curve[:, 0]) for curve in curves]
            told[name, count] = [float(curve[-1, 1]) for curve in curves]
    rows = [
        (
            f"{name}, {count}",
            f"{np.mean(reached[name, count]):.0f}",
            f"{np.mean(several):.4f}",
            f"{np.ptp(several):.4f}",
        )
        for (name, count), several in told.items()
    ]
    text = "One block, 48 features, 96 hidden; 8 experts of which each patch uses one, so that the work is the same."
    head = ("model, images", "steps to 99 % in training", "held-out accuracy", "spread over seeds")
    return digit_claims(reached, told), Section("M10: small and large data", text, head, rows)


def digit_claims(
    reached: Mapping[tuple[str, int], list[float]], told: Mapping[tuple[str, int], list[float]]
) -> list[Claim]:
    """M10, from steps to 99 % in training and held-out accuracies, by model and number of images."""
    earlier = min(np.mean(reached["dense", n]) - np.mean(reached["sparse", n]) for n in COUNTS)
    gaps = [float(np.mean(told["sparse", n]) - np.mean(told["dense", n])) for n in COUNTS]
    return [
        Claim("M10: steps by which the sparse model reaches 99 % of the training images earlier, the lesser of 250 and "
              "1,437 images", "arXiv:2202.08906", float(earlier), "above 0", bool(earlier > 0), SEEDS,
              fails_if="the dense model fits the training images as early"),
        Claim("M10: held-out accuracy, sparse minus dense, on 1,437 images minus the same on 250 (the gap; sparse is "
              f"ahead on 1,437: {'yes' if gaps[1] > 0 else 'no'})", "arXiv:2202.08906", gaps[1] - gaps[0], "above 0",
              gaps[1] > gaps[0], SEEDS, fails_if="more data does not help the sparse model more than the dense one"),
    ]  # fmt: skip


def _first(accuracy: np.ndarray) -> float:
    """The step at which 99 % are right; one more than there are if they never are."""
    there = np.flatnonzero(accuracy >= 0.99)
    return float(EVERY * (there[0] + 1)) if len(there) else float(STEPS + EVERY)
