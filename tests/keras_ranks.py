"""One of two ranks of `test_keras.py`: trains with a combined optimizer, at once and inside `fit`; prints what differs.

KERAS_BACKEND=jax mpirun -n 2 python keras_ranks.py
"""

import keras
import numpy as np
import pytest
from mpi4py import MPI

from multipod.errors import LayoutError
from multipod.execute.adasum.operator import tree
from multipod.interop.keras import adasum, broadcast

COMM = MPI.COMM_WORLD
X = np.random.default_rng(COMM.rank).normal(size=(16, 5)).astype(np.float32)
Y = X.sum(1, keepdims=True)


def model() -> keras.Model:
    keras.utils.set_random_seed(COMM.rank)
    made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3, activation="tanh"), keras.layers.Dense(1)])
    broadcast(made.variables)
    return made


def gradients(made: keras.Model) -> list:
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((made(X) - Y) ** 2)
        return tape.gradient(loss, made.trainable_variables)
    import jax

    def loss(values: list) -> jax.Array:
        return ((made.stateless_call(values, [], X)[0] - Y) ** 2).mean()

    return jax.grad(loss)([variable.value for variable in made.trainable_variables])


def worst(found: list, right: list) -> float:
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(found, right, strict=True))


plain, ours, fitted = model(), model(), model()
begun = [np.asarray(v) for v in ours.trainable_variables]
local = keras.optimizers.Adam(0.01)
local.apply_gradients(zip(gradients(plain), plain.trainable_variables, strict=True))
changes = COMM.allgather([np.asarray(v) - b for v, b in zip(plain.trainable_variables, begun, strict=True)])
expected = [b + tree(dict(enumerate(both))) for b, *both in zip(begun, *changes, strict=True)]
combined = adasum(keras.optimizers.Adam(0.01))
combined.apply_gradients(zip(gradients(ours), ours.trainable_variables, strict=True))
fitted.compile(adasum(keras.optimizers.Adam(0.01)), "mse", jit_compile=False)
fitted.fit(X, Y, batch_size=16, epochs=1, verbose=0)
print(
    f"rank {COMM.rank}: at once {worst(ours.trainable_variables, expected):.1e}, "
    f"fit {worst(fitted.trainable_variables, expected):.1e}, "
    f"slots {len(combined.variables)}",
    flush=True,
)
assert worst(ours.trainable_variables, expected) < 1e-6
assert worst(fitted.trainable_variables, expected) < 1e-6
if keras.backend.backend() == "jax":
    traced = model()
    traced.compile(adasum(keras.optimizers.Adam(0.01)), "mse", jit_compile=True)
    with pytest.raises(LayoutError, match="jit_compile=False"):
        traced.fit(X, Y, batch_size=16, epochs=1, verbose=0)
