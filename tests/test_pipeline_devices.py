"""Pipelines on virtual devices: synchronous ones against plain training, asynchronous ones against the simulator."""

import functools
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from pipeline_models import ADAMW, ROWS, N, batches, first, last, middle, pipe_of, some_weights, trained
from processes import clean_environment

from multipod.errors import LayoutError
from multipod.execute.pipeline.delays import begin_simulation, newest_weights, simulate_update
from multipod.execute.pipeline.pipe import Pipe
from multipod.optim.pipemare import PipeMare


def plain(count: int, updates: int, optimizer: optax.GradientTransformation) -> tuple[Any, Any]:
    def loss(weights, batch):
        aux = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), batch)
        x = functools.reduce(lambda x, w: middle(w, x, aux)[0], weights[1:-1], first(weights[0], (), aux)[0])
        return last(weights[-1], x, aux)[0]

    def step(carry, batch):
        weights, state = carry
        value, gradient = jax.value_and_grad(loss)(weights, batch)
        changes, state = optimizer.update(gradient, state, weights)
        return (optax.apply_updates(weights, changes), state), value

    weights = some_weights(count)
    run = jax.jit(lambda w: jax.lax.scan(step, (w, optimizer.init(w)), batches(updates)))
    (weights, _), losses = run(weights)
    return weights, losses


@pytest.mark.parametrize(
    ("name", "stages", "data"),
    [("gpipe", 3, 1), ("1f1b", 4, 2), ("eager-1f1b", 3, 1), ("interleaved", 2, 1)],
)
def test_synchronous_pipelines_train_as_the_whole_model(name, stages, data):
    pipe = pipe_of(name, stages, data)
    known, losses = plain(len(pipe.setup.parts), 3, ADAMW)
    state, update, found = pipe.begin(pipe.setup.weights), pipe.compiled(pipe.setup.weights), []
    for k in range(3):
        state, sums = jax.block_until_ready(update(state, jax.tree.map(lambda b, k=k: b[k], batches(3)), True))
        found.append(float(sums["loss"]))
        assert int(sums["count"]) == N * ROWS
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    for own, right in zip(pipe.unpack(state.weights), known, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), own, right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stages", "data", "techniques"),
    [
        ("pipemare", 4, 2, PipeMare(anneal=5, decay=0.135, warmup=2)),
        ("pipedream", 3, 1, PipeMare(warmup=1)),
    ],
)
def test_asynchronous_pipelines_are_the_delay_simulator(name, stages, data, techniques):
    updates, optimizer = 7, optax.sgd(0.1, momentum=0.5)
    pipe = pipe_of(name, stages, data, optimizer, techniques)
    history = begin_simulation(pipe.setup.parts, pipe.setup.weights, 8)
    simulate = jax.jit(
        lambda h, b, late: simulate_update(
            pipe.setup.parts, h, b, pipe.setup.tables.delays, stashed=name == "pipedream", delayed=late
        )
    )
    state, update, drain = pipe.begin(pipe.setup.weights), pipe.compiled(pipe.setup.weights), jax.jit(pipe.drain)
    for k in range(updates):
        batch, late = jax.tree.map(lambda b, k=k: b[k], batches(updates)), k >= techniques.warmup
        history, _ = simulate(history, batch, late)
        state, _ = jax.block_until_ready(update(state, batch, late))  # never two in flight: docs/design/runtime.md
        if k in (techniques.warmup - 1, 3, updates - 1):  # a drained copy; the run goes on undrained
            drained = jax.block_until_ready(drain(state)[0])
            for own, right in zip(pipe.unpack(drained.weights), newest_weights(history), strict=True):
                jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-4, atol=2e-6), own, right)
    assert update._cache_size() == 1  # T3's switch compiles nothing anew


def test_what_does_not_fit_is_listed():
    good = pipe_of("1f1b", 4, 2, optax.sgd(0.1))
    with pytest.raises(
        LayoutError, match=r"the model is in 3 parts, and the schedule has 4; mesh axis y has 0 devices"
    ):
        replace(good.setup, parts=good.setup.parts[:3], weights=good.setup.weights[:3], stage_axis="y")


@pytest.mark.slow
def test_half_way_it_goes_on_with_the_same_bits(tmp_path):
    """Saved with micro-batches under way, restored into a new pipe, it ends with the bits of one that went on."""
    straight = trained(pipe_of("pipemare", 3, 1, techniques=PipeMare(decay=0.3)), batches(5))
    pipe = pipe_of("pipemare", 3, 1, techniques=PipeMare(decay=0.3))
    state, update = pipe.begin(pipe.setup.weights), pipe.compiled(pipe.setup.weights)
    for k in range(5):
        state, _ = jax.block_until_ready(update(state, jax.tree.map(lambda b, k=k: b[k], batches(5)), True))
        if k == 2:
            np.savez(tmp_path / "state.npz", *jax.tree.leaves(state))
            pipe = pipe_of("pipemare", 3, 1, techniques=PipeMare(decay=0.3))
            fresh, update = pipe.begin(pipe.setup.weights), pipe.compiled(pipe.setup.weights)
            held = np.load(tmp_path / "state.npz")
            leaves = [jax.device_put(held[f"arr_{n}"], leaf.sharding) for n, leaf in enumerate(jax.tree.leaves(fresh))]
            state = jax.tree.structure(fresh).unflatten(leaves)
    state, _ = jax.block_until_ready(jax.jit(pipe.drain)(state))
    jax.tree.map(np.testing.assert_array_equal, pipe.unpack(state.weights), straight)


def test_tied_weights_stay_equal_and_learn_as_one():
    """Parts 1 and 2 of four share both of their tensors: as plain training with one pair of tensors."""
    tied = (((1, "kernel"), (2, "kernel")), ((1, "out"), (2, "out")))
    base = pipe_of("1f1b", 4, 1, optax.sgd(0.1))
    weights = [base.setup.weights[0], base.setup.weights[1], base.setup.weights[1], base.setup.weights[3]]
    pipe = Pipe(replace(base.setup, weights=weights, data_axes=(), tied=tied))
    found = trained(pipe, batches(2))

    def loss(weights, batch):
        aux = jax.tree.map(lambda a: a.reshape(-1, a.shape[-1]), batch)
        x = first(weights[0], (), aux)[0]
        for _ in range(2):
            x = middle(weights[1], x, aux)[0]
        return last(weights[2], x, aux)[0]

    known = [base.setup.weights[0], base.setup.weights[1], base.setup.weights[3]]
    step = jax.jit(lambda w, b: jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, b)))
    for k in range(2):
        known = step(known, jax.tree.map(lambda b, k=k: b[k], batches(2)))
    jax.tree.map(np.testing.assert_array_equal, found[1], found[2])
    for own, right in zip([found[0], found[1], found[3]], known, strict=True):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), own, right)


@pytest.mark.parametrize("name", ["1f1b", "pipemare"])
def test_a_pass_that_is_not_due_is_not_computed(name):
    """XLA must leave the products of a pass inside its loop of one round or none (`in_flight.run_in_turn`)."""
    pipe = pipe_of(name, 2, 1)
    state = pipe.begin(pipe.setup.weights)
    batch = jax.tree.map(lambda b: b[0], batches(1))
    program = pipe.compiled(pipe.setup.weights).lower(state, batch, True).compile().as_text()
    loops, calls, found = set(), {}, {}
    for line in program.splitlines():
        if opened := re.match(r"^(?:ENTRY )?(%[\w.\-]+) \(", line):
            calls[inside := opened[1]], found[inside] = [], []
        loops |= set(re.findall(r"body=(%[\w.\-]+)", line))
        if found:
            calls[inside] += re.findall(r"(?:calls|to_apply|body)=(%[\w.\-]+)", line)
            calls[inside] += re.findall(r"%[\w.\-]+", "".join(re.findall(r"branch_computations=\{(.*?)\}", line)))
            found[inside] += re.findall(r" (dot|while)\(", line)

    def all_of(one, nested):
        inner = [more for call in calls[one] if nested or call not in loops for more in all_of(call, nested)]
        return [*found[one], *inner]

    ticks = [body for body in loops if "while" in all_of(body, nested=False)]
    assert len(ticks) == 1
    assert "dot" not in all_of(ticks[0], nested=False)
    assert "dot" in all_of(ticks[0], nested=True)


def test_parts_that_update_alike_share_a_branch():
    """Two parts of four have equal trees: one branch for both with one optimizer, whatever their functions."""

    def roots(optimizers):
        base = pipe_of("gpipe", 4, 1)
        parts = [
            replace(part, kind=None, optimizer=own) for part, own in zip(base.setup.parts, optimizers, strict=True)
        ]
        pipe = Pipe(replace(base.setup, parts=parts, data_axes=()))
        batch = jax.tree.map(lambda b: b[0], batches(1))
        return str(jax.make_jaxpr(pipe.update)(jax.eval_shape(pipe.fresh, pipe.setup.weights), batch)).count("= sqrt ")

    assert roots([ADAMW] * 4) == 1 + 2 + 2
    assert roots([optax.adamw(1e-2) for _ in range(4)]) == 1 + 2 + 2 + 2


@pytest.mark.slow
@pytest.mark.processes
def test_real_processes_train_as_virtual_devices(tmp_path):
    known = jax.tree.leaves([trained(pipe_of(name, 2, 1), batches(3)) for name in ("1f1b", "pipemare")])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("pipeline_ranks.py")
    command = [sys.executable, str(script), str(port), "2"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "w.npz")], env=clean_environment()) for rank in range(2)
    ]
    try:
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
    found = np.load(tmp_path / "w.npz")
    for n, right in enumerate(known):
        np.testing.assert_allclose(found[f"arr_{n}"], right, rtol=1e-5, atol=1e-6)
