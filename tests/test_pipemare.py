"""PipeMare: the two passes, the corrections, and the delay simulator against the same written out in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from multipod.errors import RecipeError
from multipod.execute.pipeline.delays import PipelinePart, begin_simulation, newest_weights, simulate_update
from multipod.execute.pipeline.passes import trace_passes
from multipod.optim.optimizers import OPTIMIZERS
from multipod.optim.pipemare import PipeMare, correct_weights, gamma_of, reschedule, track_velocity
from multipod.optim.rates import Constant
from multipod.pipelines import stability
from multipod.pipelines.build import pipedream, pipemare
from multipod.pipelines.check import check
from multipod.pipelines.model import tau

P, N, ROWS, WIDTH = 4, 2, 4, 5


def stage(weights, x, aux):
    """x + relu(x W); the first reads the batch, the last adds the loss."""
    return x + jax.nn.relu(x @ weights), {}


def first(weights, x, aux):
    return aux["x"] @ weights, {}


def last(weights, x, aux):
    error = x @ weights - aux["y"]
    loss = 0.5 * jnp.sum(error**2) / (N * ROWS)
    return loss, {"loss": loss}


FUNCTIONS = (first, *[stage] * (P - 2), last)


def some_weights():
    keys = jax.random.split(jax.random.key(1), P)
    return [0.5 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]


def some_batches(updates):
    x, y = (jax.random.normal(jax.random.key(n), (updates, N, ROWS, WIDTH)) for n in (2, 3))
    return {"x": x, "y": y}


def in_numpy(method, updates, rate, momentum, anneal=0, decay=0.0, warmup=0):
    """The update rule written out: the sum over micro-batches with explicit versions, per stage and per update."""
    history = [[np.asarray(w, np.float64)] for w in some_weights()]
    speed = [np.zeros((WIDTH, WIDTH)) for _ in range(P)]
    delta = [np.zeros((WIDTH, WIDTH)) for _ in range(P)]
    batches = jax.tree.map(lambda a: np.asarray(a, np.float64), some_batches(updates))
    for k in range(updates):
        gradients = [np.zeros((WIDTH, WIDTH)) for _ in range(P)]
        late = method != "gpipe" and k >= warmup
        for j in range(N):
            seen = []
            for i in range(1, P + 1):
                version = max(k - -(-(2 * (P - i) + 1 - j) // N), min(warmup, k)) if late else k
                seen.append(history[i - 1][version])
            used = [h[k] for h in history]
            if method == "pipedream" and late:
                used = seen
            elif decay and late:
                used = [w - float(tau(P, N, i)) * d for i, (w, d) in enumerate(zip(used, delta, strict=True), 1)]
            x = batches["x"][k, j]
            kept = []
            a = x @ seen[0]
            for w in seen[1:-1]:
                kept.append((a, a @ w))
                a = a + np.maximum(a @ w, 0)
            d = (a @ seen[-1] - batches["y"][k, j]) / (N * ROWS)
            gradients[-1] += a.T @ d
            d = d @ used[-1].T
            for i in range(P - 2, 0, -1):
                a, z = kept[i - 1]
                dz = d * (z > 0)
                gradients[i] += a.T @ dz
                d = d + dz @ used[i].T
            gradients[0] += x.T @ d
        for i in range(1, P + 1):
            delay = float(tau(P, N, i))
            p = 1 - min((k - warmup) / anneal, 1) if anneal and k >= warmup else 0
            speed[i - 1] = momentum * speed[i - 1] + gradients[i - 1]
            change = -rate / max(delay, 1) ** p * speed[i - 1]
            history[i - 1].append(history[i - 1][-1] + change)
            if decay:
                gamma = decay ** (1 / delay)
                delta[i - 1] = gamma * delta[i - 1] + (1 - gamma) * change
    return [h[-1] for h in history]


@functools.cache
def delays_of(name):
    proof = check({"pipemare": pipemare, "pipedream": pipedream}[name](P, N, 12))
    return np.array([proof.forward_delays(p) for p in range(P)])


def simulated(method, updates, optimizer, techniques=PipeMare()):  # noqa: B008
    delays = [float(tau(P, N, i)) for i in range(1, P + 1)]
    parts = [
        PipelinePart(
            function,
            techniques.wrap(optimizer, delay),
            lambda w, state, on, delay=delay: techniques.backward_weights(w, state, delay * on),
        )
        for function, delay in zip(FUNCTIONS, delays, strict=True)
    ]

    def run(weights, batches):
        def step(history, batch):
            late = (method != "gpipe") & (history.update >= techniques.warmup)
            return simulate_update(
                parts, history, batch, delays_of("pipemare"), stashed=method == "pipedream", delayed=late
            )

        history, sums = jax.lax.scan(step, begin_simulation(parts, weights, P), batches)
        return newest_weights(history), sums

    return jax.jit(run)(some_weights(), some_batches(updates))[0]


@pytest.mark.parametrize(
    ("method", "techniques"),
    [
        ("gpipe", PipeMare()),
        ("pipedream", PipeMare()),
        ("pipemare", PipeMare()),
        ("pipemare", PipeMare(anneal=6)),
        ("pipemare", PipeMare(decay=0.135)),
        ("pipemare", PipeMare(anneal=6, decay=0.3, warmup=4)),
    ],
)
def test_the_simulator_is_the_papers_update_rule(method, techniques):
    found = simulated(method, 12, optax.sgd(0.05, momentum=0.6), techniques)
    options = {"anneal": techniques.anneal, "decay": techniques.decay, "warmup": techniques.warmup}
    for own, known in zip(found, in_numpy(method, 12, 0.05, 0.6, **options), strict=True):
        np.testing.assert_allclose(own, known, rtol=2e-4, atol=2e-5)


def test_synchronous_simulation_is_plain_training():
    def loss(weights, batch):
        x = jax.vmap(lambda b: functools.reduce(lambda a, w: a + jax.nn.relu(a @ w), weights[1:-1], b @ weights[0]))(
            batch["x"]
        )
        return 0.5 * jnp.sum((x @ weights[-1] - batch["y"]) ** 2) / (N * ROWS)

    optimizer = optax.adamw(1e-2, weight_decay=0.1)
    weights = some_weights()

    @jax.jit
    def step(carry, batch):
        weights, state = carry
        changes, state = optimizer.update(jax.grad(loss)(weights, batch), state, weights)
        return (optax.apply_updates(weights, changes), state), None

    plain = jax.lax.scan(step, (weights, optimizer.init(weights)), some_batches(6))[0][0]
    for own, known in zip(simulated("gpipe", 6, optimizer), plain, strict=True):
        np.testing.assert_allclose(own, known, rtol=1e-5, atol=1e-6)


def test_a_backward_pass_multiplies_by_the_weights_it_is_given():
    """For y = relu(x A) B: dx = (dy B'^T * mask) A'^T with new weights, dB = relu(x A)^T dy with old activations."""

    def function(weights, x, aux):
        return jax.nn.relu(jnp.einsum("be,ef->bf", x, weights["a"])) @ weights["b"], {}

    random = np.random.default_rng(0)
    draw = lambda *shape: random.standard_normal(shape, np.float32)  # noqa: E731
    old, new = ({"a": draw(4, 8), "b": draw(8, 3)} for _ in range(2))
    x, dy = draw(5, 4), draw(5, 3)
    both = trace_passes(function, old, x, ())
    assert {leaf.shape for leaf in both.saved} == {(5, 4), (5, 8)}  # no weights are kept
    _, _, saved = jax.jit(both.forward)(old, x, ())
    own, dx = jax.jit(both.backward)(new, saved, dy)
    hidden = x @ old["a"]
    dh = (dy @ new["b"].T) * (hidden > 0)
    np.testing.assert_allclose(dx, dh @ new["a"].T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(own["b"], np.maximum(hidden, 0).T @ dy, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(own["a"], x.T @ dh, rtol=1e-5, atol=1e-5)


def test_rescheduling_anneals_from_one_over_tau_to_one():
    transformation = reschedule(8.0, anneal=4, start=2)
    state, scales = transformation.init(0.0), []
    for _ in range(8):
        scaled, state = transformation.update(jnp.ones(()), state)
        scales.append(float(scaled))
    assert scales == pytest.approx([1, 1, 8**-1, 8**-0.75, 8**-0.5, 8**-0.25, 1, 1])
    assert float(reschedule(0.25, 4).update(jnp.ones(()), state)[0]) == 1  # a delay below one does not raise the rate


@pytest.mark.parametrize("name", ["sgd", "adamw", "lamb", "lion"])
def test_the_velocity_follows_the_weights_under_any_optimizer(name):
    optimizer = OPTIMIZERS[name](Constant(0.1), weight_decay=0.1).build(10)
    chained = optax.chain(optimizer, track_velocity(gamma := gamma_of(0.135, 3.5)))
    weights = {"kernel": jnp.arange(6.0).reshape(2, 3)}
    state, delta = chained.init(weights), np.zeros((2, 3))
    step = jax.jit(chained.update)
    for k in range(4):
        changes, state = step({"kernel": jnp.sin(weights["kernel"] + k)}, state, weights)
        moved = optax.apply_updates(weights, changes)
        delta = gamma * delta + (1 - gamma) * np.asarray(moved["kernel"] - weights["kernel"])
        weights = moved
    np.testing.assert_allclose(state[-1].velocity["kernel"], delta, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(
        correct_weights(weights, state[-1].velocity, 3.5)["kernel"],
        weights["kernel"] - 3.5 * delta,
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_hundred_stages_on_one_device():
    """107 stages of one number each: w moves as the delayed recurrence says, stable below the closed-form limit."""
    stages = 107
    parts = [PipelinePart(lambda w, x, aux: (x, {}), optax.sgd(0.0)) for _ in range(stages - 1)]
    parts.append(PipelinePart(lambda w, x, aux: (0.5 * x**2 + 0 * w, {}), optax.sgd(0.0)))
    delays = np.zeros((stages, 1), int)
    delays[0] = 20
    ends = []
    for share in (0.97, 1.03):
        parts[0] = PipelinePart(lambda w, x, aux: (w, {}), optax.sgd(share * stability.limit(20)))

        def run(parts=tuple(parts)):
            start = begin_simulation(parts, [jnp.ones(())] * stages, 20)
            return newest_weights(
                jax.lax.scan(lambda h, b: simulate_update(parts, h, b, delays), start, {"none": jnp.zeros((1500, 1))})[
                    0
                ]
            )[0]

        ends.append(abs(float(jax.jit(run)())))
    assert ends[0] < 1 < ends[1]


def test_bad_numbers():
    with pytest.raises(
        RecipeError, match=r"pipemare.anneal=-1 must be at least 0; pipemare.decay=1.0 must be at least"
    ):
        PipeMare(anneal=-1, decay=1.0)
