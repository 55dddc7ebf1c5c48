"""What a small shuffle buffer does: batches of like examples, and runs that differ more from each other."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from multipod.data.digits import Digits
from multipod.data.order import FilesThenBuffer, batch_correlation
from multipod.experiments.outcome import Claim, Outcome, Section

BUFFERS = (1, 16, 64, 256, 2048)
"""Examples; the last holds all 1,437."""
SEEDS = 24
BATCH, EPOCHS, EVERY, TARGET = 32, 40, 4, 0.95
PAPER = "arXiv:2011.03641 (BERT): small buffers increase the run-to-run spread of the steps to the target"


def run(report: Callable[[str], None]) -> Outcome:
    """Trains a perceptron on the digits, kept in one file a class, from `SEEDS` seeds with each buffer."""
    images, labels, ends, test = _data()
    results, correlations = {}, {}
    for buffer in BUFFERS:
        report(f"buffer of {buffer}: {SEEDS} runs")
        orders = [_order(ends, buffer, seed) for seed in range(SEEDS)]
        correlations[buffer] = float(np.mean([batch_correlation(labels[one], BATCH) for one in orders]))
        results[buffer] = np.asarray(_updates_to_target(images, labels, np.stack(orders), *test))
    section = _section(correlations, results)
    claims = claims_of(correlations, results)
    return Outcome(
        "What a small shuffle buffer does to a perceptron on digits", claims, (section,), {"updates": _figure(results)}
    )


def claims_of(correlations: dict[int, float], results: dict[int, np.ndarray]) -> tuple[Claim, ...]:
    """Correlation in batches, and updates to the target, by buffer."""
    return (_correlation_claim(correlations), *_spread_claims(results))


def _correlation_claim(correlations: dict[int, float]) -> Claim:
    """Small buffers make batches of like examples."""
    return Claim(
        f"correlation within batches, buffer of {BUFFERS[1]} less buffer of all",
        PAPER,
        correlations[BUFFERS[1]] - correlations[BUFFERS[-1]],
        "> 0, falling at every step",
        bool(np.all(np.diff([correlations[b] for b in BUFFERS[1:]]) < 0)),
        tuple(range(SEEDS)),
        fails_if="a larger buffer does not mix the classes better",
    )


def _spread_claims(results: dict[int, np.ndarray]) -> tuple[Claim, ...]:
    """Small buffers make runs differ, and take longer."""
    small, full = results[BUFFERS[1]], results[BUFFERS[-1]]
    small_std, full_std = float(np.std(small, ddof=1)), float(np.std(full, ddof=1))
    behind = f"buffer of {BUFFERS[1]} over buffer of all"

    def claim(text: str, ratio: float, fails_if: str) -> Claim:
        return Claim(f"{text}, {behind}", PAPER, ratio, "> 1", ratio > 1, tuple(range(SEEDS)), fails_if=fails_if)

    in_proportion = float(small_std / small.mean() / (full_std / full.mean()))
    longer = float(small.mean() / full.mean())
    deviation = f"standard deviation of the updates to {TARGET:.0%}"
    return (
        claim(deviation, small_std / max(full_std, 1e-9), "runs with all examples in the buffer differ as much"),
        claim("the same in proportion to the mean", in_proportion, "runs differ more only because they are longer"),
        claim(f"mean updates to {TARGET:.0%}", longer, "a small buffer costs no updates"),
    )


def _data() -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Training digits sorted into a file for each class, where the files end, and the test digits."""
    digits = Digits(shift=0)
    train, test = digits.train().arrays, digits.test().arrays
    order = np.argsort(train["label"], kind="stable")
    labels = train["label"][order]
    ends = np.append(np.flatnonzero(np.diff(labels)) + 1, len(labels))
    return train["image"][order].reshape(-1, 64), labels, ends, (test["image"].reshape(-1, 64), test["label"])


def _order(ends: np.ndarray, buffer: int, seed: int) -> np.ndarray:
    """The examples of all epochs: four files read in turn, as Google's BERT read them, then the buffer."""
    order = np.concatenate([FilesThenBuffer(4, buffer).epoch(ends, seed, epoch) for epoch in range(EPOCHS)])
    return order[: len(order) // BATCH * BATCH]


@jax.jit
def _updates_to_target(
    images: jax.Array, labels: jax.Array, orders: jax.Array, test: jax.Array, right: jax.Array
) -> jax.Array:
    """For each row of `orders` the first update after which the test accuracy reaches the target, or the last one."""

    def loss(params: dict[str, jax.Array], numbers: jax.Array) -> jax.Array:
        logits = _logits(params, images[numbers])
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[numbers][:, None], 1).mean()

    def chunk(carry: tuple, numbers: jax.Array) -> tuple[tuple, jax.Array]:
        def update(carry: tuple, own: jax.Array) -> tuple[tuple, None]:
            params, momentum = carry
            gradient = jax.grad(loss)(params, own)
            momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)
            return (jax.tree.map(lambda p, m: p - 0.03 * m, params, momentum), momentum), None

        carry, _ = jax.lax.scan(update, carry, numbers)
        return carry, (_logits(carry[0], test).argmax(-1) == right).mean()

    def one(order: jax.Array, key: jax.Array) -> jax.Array:
        a, b = jax.random.split(key)
        params = {
            "in": jax.random.normal(a, (64, 32)) / 8,
            "out": jax.random.normal(b, (32, 10)) / 6,
            "bias": jnp.zeros(32),
        }
        batches = order.reshape(-1, BATCH)
        chunks = batches[: len(batches) // EVERY * EVERY].reshape(-1, EVERY, BATCH)
        _, accuracy = jax.lax.scan(chunk, (params, jax.tree.map(jnp.zeros_like, params)), chunks)
        reached = accuracy >= TARGET
        return jnp.where(reached.any(), reached.argmax() + 1, len(chunks)) * EVERY

    return jax.vmap(one)(orders, jax.random.split(jax.random.key(0), len(orders)))


def _logits(params: dict[str, jax.Array], images: jax.Array) -> jax.Array:
    return jnp.tanh(images @ params["in"] + params["bias"]) @ params["out"]


def _section(correlations: dict[int, float], results: dict[int, np.ndarray]) -> Section:
    rows = [
        (
            f"{buffer:,}",
            f"{correlations[buffer]:.3f}",
            f"{found.mean():.0f}",
            f"{found.std(ddof=1):.0f}",
            f"{found.min()} to {found.max()}",
        )
        for buffer, found in results.items()
    ]
    return Section(
        "Updates to the target",
        f"A perceptron (64-32-10, SGD with momentum, batch {BATCH}) on 1,437 digits that lie in one file for each "
        f"class; files in random order, four read in turn, then a buffer. {SEEDS} seeds of order and parameters; test "
        f"accuracy is looked at every {EVERY} updates, and the target is {TARGET:.0%}; a run that does not reach it "
        "counts with its length, so the first rows would be longer and wider still. Buffers smaller than a batch are "
        "all alike. In proportion to their mean the runs of a small buffer do not differ more.",
        ("buffer", "correlation in a batch", "mean updates", "standard deviation", "from, to"),
        rows,
        "updates",
    )


def _figure(results: dict[int, np.ndarray]) -> object:
    figure = Figure(figsize=(6, 3.4), layout="constrained")
    axes = figure.add_subplot()
    axes.boxplot(list(results.values()), tick_labels=[f"{buffer:,}" for buffer in results])
    axes.set(xlabel="buffer, examples", ylabel=f"updates to {TARGET:.0%}")
    axes.grid(alpha=0.3)
    return figure
