"""PipeMare on a small Transformer over the bytes of Python's standard library, one layer a stage."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from multipod.data.stdlib_text import library
from multipod.execute.pipeline.delays import PipelinePart, begin_simulation, newest_weights, simulate_update
from multipod.experiments.pipemare.digits import Arm
from multipod.optim.pipemare import correct_weights, gamma_of, reschedule, track_velocity
from multipod.pipelines.build import pipemare
from multipod.pipelines.check import check
from multipod.pipelines.model import tau

WIDTH, HEADS, LENGTH, BATCH = 32, 2, 32, 16
STAGES, UPDATES, WARMUP = 8, 200, 20
"""An embedding, six blocks and a head; Adam's rate rises over WARMUP updates and falls linearly to 0."""
SYNCHRONOUS = 40
"""Updates of T3."""
HELD_OUT = 256
METHODS = ("sync", "async", "T1+T2", "T1+T2+T3")


def losses(micro_batches: int, arms: Sequence[Arm], seeds: Sequence[int], report: Callable[[str], None]) -> np.ndarray:
    """Held-out nats a byte after training, [arms, seeds]; infinite where weights are no longer finite."""
    run, found = _program(micro_batches), []
    for arm in arms:
        knobs = {name: jnp.asarray(value) for name, value in _knobs(arm).items()}
        found.append(np.asarray(run(jnp.asarray(seeds), knobs)))
        report(f"text, {micro_batches} micro-batches, {arm.method} at rate {arm.rate:g}: {found[-1].mean():.3f}")
    return np.stack(found)


def _knobs(arm: Arm) -> dict[str, float]:
    used = arm.method.split("+")
    synchronous = UPDATES + 1.0 if arm.method == "sync" else SYNCHRONOUS * float("T3" in used)
    return {
        "rate": arm.rate,
        "decay": arm.decay,
        "t1": float("T1" in used),
        "t2": float("T2" in used),
        "warmup": synchronous,
    }


@functools.cache
def _program(micro_batches: int) -> Callable[[jax.Array, Any], jax.Array]:
    """From seeds and an arm's knobs to the loss of each seed."""
    proof = check(pipemare(STAGES, micro_batches, 3 + 2 * -(-2 * STAGES // micro_batches)))
    delays = np.array([proof.forward_delays(p) for p in range(STAGES)], np.int32)
    train, test = _text()

    def run(seed: jax.Array, knobs: Any) -> jax.Array:
        key = jax.random.key(seed)
        parts = [_part(f, float(tau(STAGES, micro_batches, i)), knobs) for i, f in enumerate(_functions(), 1)]

        def step(history: Any, key: jax.Array) -> tuple[Any, None]:
            starts = jax.random.randint(key, (BATCH,), 0, len(train) - LENGTH - 1)
            batch = _rows(train, starts)
            batch = jax.tree.map(lambda a: a.reshape(micro_batches, -1, LENGTH), batch)
            return simulate_update(parts, history, batch, delays, delayed=history.update >= knobs["warmup"])[0], None

        start = begin_simulation(parts, _weights(key), int(delays.max()))
        history, _ = jax.lax.scan(step, start, jax.random.split(jax.random.fold_in(key, 1), UPDATES))
        places = jnp.linspace(0, len(test) - LENGTH - 2, HELD_OUT).astype(jnp.int32)
        total = _whole(newest_weights(history), _rows(test, places)) / HELD_OUT * BATCH
        return jnp.where(jnp.isfinite(total), total, jnp.inf)

    return jax.jit(jax.vmap(run, (0, None)))


def _part(function: Any, delay: float, knobs: Any) -> PipelinePart:
    ramp = optax.schedules.warmup_constant_schedule(0.0, 1.0, WARMUP)

    def rate(count: jax.Array) -> jax.Array:
        return knobs["rate"] * ramp(count) * (1 - count / UPDATES)

    optimizer = optax.chain(
        optax.adamw(rate, b2=0.98, weight_decay=0.01),
        reschedule(jnp.where(knobs["t1"] > 0, delay, 1.0), 5 * WARMUP, knobs["warmup"]),
        track_velocity(gamma_of(knobs["decay"], delay)),
    )
    return PipelinePart(
        function,
        optimizer,
        lambda w, state, on: correct_weights(w, state[-1].velocity, delay * on * knobs["t2"]),
        function,
    )


def _functions() -> tuple[Any, ...]:
    return (_embed, *[_block] * (STAGES - 2), _head)


def _whole(weights: Sequence[Any], batch: Any) -> jax.Array:
    x: Any = ()
    for function, own in zip(_functions(), weights, strict=True):
        x, _ = function(own, x, batch)
    return x


def _embed(w: Any, x: Any, aux: Any) -> tuple[jax.Array, Any]:
    return jnp.take(w["table"], aux["token"], axis=0) + w["position"], {}


def _block(w: Any, x: jax.Array, aux: Any) -> tuple[jax.Array, Any]:
    rows = x.shape[0]
    q, k, v = ((_norm(x) @ w[name]).reshape(rows, LENGTH, HEADS, -1) for name in ("query", "key", "value"))
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) * (WIDTH // HEADS) ** -0.5
    scores = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), scores, -1e9)
    mixed = jnp.einsum("nhqk,nkhd->nqhd", jax.nn.softmax(scores, -1), v).reshape(rows, LENGTH, WIDTH)
    x = x + mixed @ w["out"]
    return x + jax.nn.relu(_norm(x) @ w["up"]) @ w["down"], {}


def _head(w: Any, x: jax.Array, aux: Any) -> tuple[jax.Array, Any]:
    nats = optax.softmax_cross_entropy_with_integer_labels(_norm(x) @ w["kernel"], aux["label"])
    return nats.sum() / (BATCH * LENGTH), {}


def _norm(x: jax.Array) -> jax.Array:
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def _weights(key: jax.Array) -> list[Any]:
    keys = iter(jax.random.split(key, 3 + 6 * STAGES))

    def draw(rows: int, columns: int, scale: float = 1.0) -> jax.Array:
        return scale * rows**-0.5 * jax.random.normal(next(keys), (rows, columns))

    small = (2 * STAGES) ** -0.5
    blocks = [
        {
            **{name: draw(WIDTH, WIDTH) for name in ("query", "key", "value")},
            "out": draw(WIDTH, WIDTH, small),
            "up": draw(WIDTH, 4 * WIDTH),
            "down": draw(4 * WIDTH, WIDTH, small),
        }
        for _ in range(STAGES - 2)
    ]
    embedding = {"table": draw(256, WIDTH, 256**0.5 * 0.1), "position": draw(LENGTH, WIDTH, LENGTH**0.5 * 0.1)}
    return [embedding, *blocks, {"kernel": draw(WIDTH, 256)}]


def _rows(text: jax.Array, starts: jax.Array) -> dict[str, jax.Array]:
    places = starts[:, None] + jnp.arange(LENGTH)
    return {"token": text[places].astype(jnp.int32), "label": text[places + 1].astype(jnp.int32)}


def _text() -> tuple[jax.Array, jax.Array]:
    """The bytes of the library's top-level modules in the order of their names: nine tenths, and the rest."""
    joined = b"".join(path.read_bytes() for path in sorted(library().glob("*.py")))
    whole = np.frombuffer(joined, np.uint8)
    cut = len(whole) * 9 // 10
    return jnp.asarray(whole[:cut]), jnp.asarray(whole[cut:])
