"""What a save does: nothing is compiled in it, and each array is written once."""

from contextlib import closing, contextmanager

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from tiny_recipe import tiny

from multipod.layout.layout import Layout
from multipod.layout.mesh import make_mesh
from multipod.step.program import Program, program_of
from multipod.train.checkpoints.checkpoint import Checkpoints

COMPILED = "/jax/core/compile/backend_compile_duration"


@contextmanager
def counted_compilations():
    """A list with an item for each program that JAX compiles within."""
    compiled: list[str] = []

    def note(event: str, seconds: float, **facts) -> None:
        if event == COMPILED:
            compiled.append(str(facts))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(scope="module")
def program() -> Program:
    return program_of(tiny(), make_mesh(Layout((2, 4))))


def test_the_counter_counts():
    with counted_compilations() as compiled:
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7))
    assert compiled


def test_a_save_compiles_nothing_and_gives_back_every_bit(program, tmp_path):
    replicated = NamedSharding(program.mesh, PartitionSpec())
    state = program.init()
    params = {f"{rows}": jax.device_put(jnp.full((rows, 24), 0.1 * rows), replicated) for rows in (8, 16, 24, 40)}
    state = state._replace(params=params, update=state.update + 1)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    jax.block_until_ready(state)
    with closing(Checkpoints(tmp_path / "checkpoints", 3)) as store:
        with counted_compilations() as compiled:
            store.save(state, 1)
            store.wait()
        assert compiled == []
        restored = store.restore(shapes)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()) and a.sharding == b.sharding, state, restored))
