"""A model in parts of different shapes, for the tests of pipelines."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from multipod.execute.pipeline.delays import PipelinePart
from multipod.execute.pipeline.pipe import Pipe
from multipod.execute.pipeline.setup import PipelineSetup
from multipod.optim.pipemare import PipeMare
from multipod.pipelines.build import build
from multipod.pipelines.check import PipelineProof, check

N, ROWS, WIDTH = 4, 6, 5
ADAMW = optax.adamw(1e-2, weight_decay=0.1)


def first(weights, x, aux):
    return jnp.tanh(aux["x"] @ weights["in"]), {}


def middle(weights, x, aux):
    return x + jax.nn.relu(x @ weights["kernel"]) @ weights["out"], {}


def last(weights, x, aux):
    error = x @ weights["kernel"] + weights["bias"] - aux["y"]
    loss = 0.5 * jnp.sum(error**2) / (N * ROWS)
    return loss, {"loss": loss, "count": jnp.int32(len(x))}


def some_weights(parts: int) -> list[Any]:
    random = np.random.default_rng(0)
    draw = lambda *shape: 0.5 * random.standard_normal(shape, np.float32)  # noqa: E731
    inner = [{"kernel": draw(WIDTH, 7), "out": draw(7, WIDTH)} for _ in range(parts - 2)]
    return [{"in": draw(3, WIDTH)}, *inner, {"kernel": draw(WIDTH, 2), "bias": draw(2)}]


def batches(updates: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    shape = updates, N, ROWS
    return {"x": random.standard_normal((*shape, 3), np.float32), "y": random.standard_normal((*shape, 2), np.float32)}


def parts_of(count: int, optimizer: optax.GradientTransformation, techniques: PipeMare | None, delays: Any) -> Any:
    functions = (first, *[middle] * (count - 2), last)
    if techniques is None:
        return [PipelinePart(f, optimizer, kind=f) for f in functions]
    return [
        PipelinePart(
            function,
            techniques.wrap(optimizer, delay),
            lambda w, s, on, delay=delay: techniques.backward_weights(w, s, delay * on),
            kind=function,
        )
        for function, delay in zip(functions, delays, strict=True)
    ]


def proven(name: str, stages: int) -> PipelineProof:
    return check(build(name, stages, N, 1 if name in ("gpipe", "1f1b", "eager-1f1b", "interleaved") else 8))


def pipe_of(name: str, stages: int, data: int, optimizer: Any = ADAMW, techniques: PipeMare | None = None) -> Pipe:
    proof = proven(name, stages)
    mesh = Mesh(
        np.array(jax.devices()[: stages * data]).reshape(stages, data),
        ("stage", "data"),
        axis_types=(AxisType.Auto,) * 2,
    )
    count = proof.schedule.parts
    delays = [float(proof.mean_delay(p)) for p in range(count)]
    aux = {
        "x": jax.ShapeDtypeStruct((ROWS // data, 3), "float32"),
        "y": jax.ShapeDtypeStruct((ROWS // data, 2), "float32"),
    }
    parts = parts_of(count, optimizer, techniques, delays)
    return Pipe(PipelineSetup(proof, parts, some_weights(count), aux, mesh, data_axes=("data",)))


def trained(pipe: Pipe, given: dict[str, np.ndarray]) -> list[Any]:
    """Each part's weights after as many updates as there are batches, drained, whole on every process."""
    whole = NamedSharding(pipe.setup.mesh, PartitionSpec())
    state, update = pipe.begin(pipe.setup.weights), pipe.compiled(pipe.setup.weights)
    for k in range(len(given["x"])):
        batch = {name: jax.device_put(b[k], whole) for name, b in given.items()}
        state, _ = jax.block_until_ready(update(state, batch, True))  # never two in flight: docs/design/runtime.md
    state, _ = jax.block_until_ready(jax.jit(pipe.drain, out_shardings=(pipe.shardings(state), None))(state))
    return jax.tree.map(np.asarray, jax.jit(pipe.unpack, out_shardings=whole)(state.weights))
