"""PipeMare on handwritten digits: a residual network with one weight matrix a stage, in the delay simulator.

All arms and all seeds of a pipeline shape run in one compiled program: what tells arms apart (rate, method, T1, T2, T3,
D, momentum) is data, and so are the delays.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from multipod.data.digits import Digits
from multipod.execute.pipeline.delays import PipelinePart, begin_simulation, newest_weights, simulate_update
from multipod.optim.pipemare import correct_weights, gamma_of, reschedule, track_velocity
from multipod.pipelines.build import pipemare
from multipod.pipelines.check import check
from multipod.pipelines.model import tau

WIDTH, CLASSES, BATCH, EPOCHS = 64, 10, 64, 20
SEEDS = (0, 1, 2, 3, 4)
WARMUP_SHARE = 0.1
"""Share of the updates that are synchronous with T3."""

GROUP = 7
"""Arms in a call of the program."""

METHODS = ("sync", "stash", "async", "T1", "T2", "T1+T2", "T1+T2+T3")


@dataclass(frozen=True)
class Arm:
    """One way to train.

    Attributes:
      method: `sync`, `stash` (PipeDream), `async`, or the techniques used, joined by `+`.
      rate: the peak of the cosine schedule.
      decay: D of T2.
      momentum: of SGD.
    """

    method: str
    rate: float
    decay: float = 0.135
    momentum: float = 0.0


def accuracies(stages: int, micro_batches: int, arms: Sequence[Arm], seeds: Sequence[int] = SEEDS) -> np.ndarray:
    """Test accuracy after 20 epochs, [arms, seeds]; 0 where the weights are no longer finite.

    Arms run in groups of one size, filled up, so that one compiled program serves all.
    """
    run, found = _program(stages, micro_batches), []
    for first in range(0, len(arms), GROUP):
        group = [_knobs(arm) for arm in arms[first : first + GROUP]]
        filled = group + group[-1:] * (GROUP - len(group))
        knobs = {name: jnp.asarray([each[name] for each in filled]) for name in filled[0]}
        found.append(np.stack([np.asarray(run(seed, knobs)) for seed in seeds], axis=1)[: len(group)])
    return np.concatenate(found)


def _knobs(arm: Arm) -> dict[str, float]:
    updates = EPOCHS * (1437 // BATCH)
    used = arm.method.split("+")
    return {
        "rate": arm.rate,
        "momentum": arm.momentum,
        "decay": arm.decay,
        "t1": float("T1" in used),
        "t2": float("T2" in used),
        "stash": float(arm.method == "stash"),
        "warmup": updates + 1.0 if arm.method == "sync" else round(WARMUP_SHARE * updates) * float("T3" in used),
    }


@functools.cache
def _program(stages: int, micro_batches: int) -> Callable[[int, Any], jax.Array]:
    """From a seed and arms' knobs (arrays) to their accuracies."""
    proof = check(pipemare(stages, micro_batches, 3 + 2 * -(-2 * stages // micro_batches)))
    delays = np.array([proof.forward_delays(p) for p in range(stages)], np.int32)
    train, test = (_arrays(part) for part in (Digits().train(), Digits().test()))
    mean = train["image"].mean(0)  # centred, the rates of all directions are nearer to each other
    train, test = ({**part, "image": part["image"] - mean} for part in (train, test))

    def arm(knobs: Any, seed: jax.Array) -> jax.Array:
        key = jax.random.key(seed)
        parts = _parts(stages, micro_batches, knobs)
        start = begin_simulation(parts, _weights(stages, key), int(delays.max()))

        def step(history: Any, numbers: jax.Array) -> tuple[Any, None]:
            batch = jax.tree.map(lambda a: a[numbers.reshape(micro_batches, -1)], train)
            late = history.update >= knobs["warmup"]
            return simulate_update(parts, history, batch, delays, stashed=knobs["stash"] > 0, delayed=late)[0], None

        order = _order(jax.random.fold_in(key, 1), len(train["label"]))
        return _accuracy(newest_weights(jax.lax.scan(step, start, order)[0]), test)

    return jax.jit(lambda seed, knobs: jax.vmap(arm, (0, None))(knobs, seed))


def _parts(stages: int, micro_batches: int, knobs: Any) -> list[PipelinePart]:
    updates = EPOCHS * (1437 // BATCH)
    functions = (_first, *[_middle] * (stages - 2), _last)
    return [
        _part(function, float(tau(stages, micro_batches, i)), updates, knobs) for i, function in enumerate(functions, 1)
    ]


def _part(function: Any, delay: float, updates: int, knobs: Any) -> PipelinePart:
    def rate(count: jax.Array) -> jax.Array:
        return knobs["rate"] * 0.5 * (1 + jnp.cos(jnp.pi * count / updates))

    optimizer = optax.chain(
        optax.trace(knobs["momentum"]),
        optax.scale_by_learning_rate(rate),
        # T1 ends half-way, T2 reads its buffer always; a knob of 0 takes their effect away.
        reschedule(jnp.where(knobs["t1"] > 0, delay, 1.0), updates / 2, knobs["warmup"]),
        track_velocity(gamma_of(knobs["decay"], delay)),
    )
    return PipelinePart(
        function,
        optimizer,
        lambda w, state, on: correct_weights(w, state[-1].velocity, delay * on * knobs["t2"]),
        function,
    )


def _first(weights: jax.Array, x: Any, aux: Any) -> tuple[jax.Array, Any]:
    return aux["image"] @ weights, {}


def _middle(weights: jax.Array, x: jax.Array, aux: Any) -> tuple[jax.Array, Any]:
    return x + jax.nn.relu(x @ weights), {}


def _last(weights: jax.Array, x: jax.Array, aux: Any) -> tuple[jax.Array, Any]:
    return optax.softmax_cross_entropy_with_integer_labels(x @ weights, aux["label"]).sum() / BATCH, {}


def _weights(stages: int, key: jax.Array) -> list[jax.Array]:
    """He's normal for the first; the residual branches are small, so that the sum over stages does not grow."""
    keys = jax.random.split(key, stages)
    sizes = [(WIDTH, WIDTH)] * (stages - 1) + [(WIDTH, CLASSES)]
    scales = [WIDTH**-0.5, *[(2 / WIDTH / stages) ** 0.5] * (stages - 2), WIDTH**-0.5]
    return [scale * jax.random.normal(k, size) for k, size, scale in zip(keys, sizes, scales, strict=True)]


def _order(key: jax.Array, examples: int) -> jax.Array:
    """Numbers of the examples of each minibatch, [updates, BATCH]; every epoch in an order of its own."""
    whole = examples // BATCH * BATCH
    epochs = [jax.random.permutation(k, examples)[:whole] for k in jax.random.split(key, EPOCHS)]
    return jnp.concatenate(epochs).reshape(-1, BATCH)


def _accuracy(weights: Sequence[jax.Array], test: Any) -> jax.Array:
    x = functools.reduce(lambda a, w: a + jax.nn.relu(a @ w), weights[1:-1], test["image"] @ weights[0])
    logits = x @ weights[-1]
    finite = jnp.isfinite(logits).all()
    return jnp.where(finite, (logits.argmax(-1) == test["label"]).mean(), 0.0)


def _arrays(source: Any) -> dict[str, jax.Array]:
    held = source.read(np.arange(len(source)))
    return {"image": jnp.asarray(held["image"].reshape(-1, WIDTH)), "label": jnp.asarray(held["label"])}
