"""Data-parallel training of small models for experiments: all ranks, and many runs, in one program on one device.

What a run on a mesh does between devices is done here between rows of arrays: `jax.vmap` over the ranks in place of
`jax.shard_map`. So hundreds of short runs (rates x seeds) take seconds, and need no devices. A test holds one run here
to `multipod.step.program.Program` on a mesh.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from multipod.layout.axes import DATA_AXES
from multipod.metrics.objective import Objective, masked_sums
from multipod.nn.model import Model
from multipod.pytrees import Batch

Arrays = Mapping[str, np.ndarray]
Settings = dict[str, jax.Array]
"""Numbers of one run by name; `seed` among them."""


@dataclass(frozen=True)
class Study:
    """What all runs of a study have in common.

    Attributes:
      model: as for a recipe.
      objective: of which `loss` is minimised.
      optimizer: a run's settings to its Optax transformation; these are traced, so they must be plain arithmetic.
      train: the examples, by name.
      judged: the sets on which the objective's means are taken after each epoch, by name.
      ranks: how many there are.
      examples: of one rank in one update.
      epochs: length of the runs. The examples that do not fill a last update sit that epoch out.
      adasum: whether each rank has an optimizer of its own and Adasum combines their changes; else one optimizer sees
        the mean of the gradients.
    """

    model: Model
    objective: Objective
    optimizer: Callable[[Settings], optax.GradientTransformation]
    train: Arrays
    judged: Mapping[str, Arrays]
    ranks: int
    examples: int
    epochs: int
    adasum: bool = False

    @property
    def batch(self) -> int:
        """Examples of an update, over all ranks."""
        return self.ranks * self.examples

    @property
    def updates(self) -> int:
        """Updates of an epoch."""
        return len(next(iter(self.train.values()))) // self.batch


Curves = dict[str, dict[str, np.ndarray]]
"""By set, then by value: [runs, epochs], the means of the objective's values after each epoch."""


def curves(study: Study, settings: Mapping[str, Any]) -> Curves:
    """Trains all runs at once; `settings` holds arrays of shape [runs]."""
    columns = {name: jnp.asarray(column) for name, column in settings.items()}
    return jax.tree.map(np.asarray, jax.device_get(jax.jit(jax.vmap(lambda one: _run(study, one)))(columns)))


def grid(**choices: Any) -> dict[str, np.ndarray]:
    """All combinations of the choices as settings; the last named changes fastest."""
    columns = [np.asarray(choice) for choice in choices.values()]
    columns = [column.astype(np.float32) if column.dtype == np.float64 else column for column in columns]
    table = np.meshgrid(*columns, indexing="ij")
    return {name: column.ravel() for name, column in zip(choices, table, strict=True)}


def tree(vectors: jax.Array) -> jax.Array:
    """Adasum of [2^k, ...] in float32, the formula as it stands: `execute.adasum.operator.tree` of equal sides."""
    dims = tuple(range(1, vectors.ndim))
    while len(vectors) > 1:
        a, b = vectors[::2], vectors[1::2]
        d, aa, bb = (jnp.sum(x * y, dims, keepdims=True) for x, y in ((a, b), (a, a), (b, b)))
        factors = (jnp.where(n > 0, 1 - d / (2 * jnp.where(n > 0, n, 1)), 1) for n in (aa, bb))
        vectors = next(factors) * a + next(factors) * b
    return vectors[0]


def start(study: Study, optimizer: optax.GradientTransformation, key: jax.Array) -> "Carry":
    """The state before the first update, of one run."""
    params, statistics = study.model.init(key)
    states = jax.vmap(lambda _: optimizer.init(params))(jnp.arange(study.ranks if study.adasum else 1))
    return Carry(params, statistics, states)


def step(study: Study, optimizer: optax.GradientTransformation, carry: "Carry", batch: Batch) -> "Carry":
    """One update of one run, from a batch of arrays [ranks, examples, ...]."""
    params, _, states = carry
    gradients, statistics = _gradients(study, params, carry.statistics, batch)
    if not study.adasum:
        gradients = jax.tree.map(lambda g: g.mean(0, keepdims=True), gradients)
    changes, states = jax.vmap(optimizer.update, in_axes=(0, 0, None))(gradients, states, params)
    params = jax.tree.map(lambda w, c: w + tree(c), params, changes)  # of one change `tree` is that change
    return Carry(params, statistics, states)


class Carry(NamedTuple):
    """What one update leaves to the next.

    Attributes:
      params: of the model.
      statistics: of the model.
      states: of the optimizers, [ranks, ...] under Adasum, else [1, ...].
    """

    params: Any
    statistics: Any
    states: Any


def _run(study: Study, settings: Settings) -> dict[str, dict[str, jax.Array]]:
    train = {name: jnp.asarray(array) for name, array in study.train.items()}
    judged = {name: jax.tree.map(jnp.asarray, dict(arrays)) for name, arrays in study.judged.items()}
    optimizer = study.optimizer(settings)
    key, order = jax.random.split(jax.random.key(settings["seed"]))

    def update(carry: Carry, rows: jax.Array) -> tuple[Carry, None]:
        return step(study, optimizer, carry, {name: array[rows] for name, array in train.items()}), None

    def epoch(carry: Carry, key: jax.Array) -> tuple[Carry, Any]:
        rows = jax.random.permutation(key, len(next(iter(train.values()))))[: study.updates * study.batch]
        carry, _ = lax.scan(update, carry, rows.reshape(study.updates, study.ranks, study.examples))
        return carry, {name: means(study, carry, arrays) for name, arrays in judged.items()}

    return lax.scan(epoch, start(study, optimizer, key), jax.random.split(order, study.epochs))[1]


def _gradients(study: Study, params: Any, statistics: Any, batch: Batch) -> tuple[Any, Any]:
    """[ranks, ...] gradients of each rank's own mean loss, and the statistics that all agree on."""

    def loss(params: Any, batch: Batch) -> tuple[jax.Array, Any]:
        outputs, new = study.model.apply(params, statistics, batch, train=True, key=jax.random.key(0))
        return study.objective(outputs, batch)["loss"].mean(), new

    ranks = jax.vmap(jax.grad(loss, has_aux=True), in_axes=(None, 0), axis_name=DATA_AXES[1])
    mesh = jax.vmap(ranks, in_axes=(None, 0), axis_name=DATA_AXES[0])  # one row of chips
    found: Any = jax.tree.map(lambda leaf: leaf[0], mesh(params, {name: array[None] for name, array in batch.items()}))
    return found[0], jax.tree.map(lambda leaf: leaf.mean(0), found[1])


def means(study: Study, carry: Carry, batch: Batch) -> dict[str, jax.Array]:
    """The means of the objective's values over examples [count, ...], as evaluation has them."""
    outputs, _ = study.model.apply(carry.params, carry.statistics, batch, train=False, key=jax.random.key(0))
    sums = masked_sums(study.objective(outputs, batch))
    return {name: value / sums["count"] for name, value in sums.items() if name != "count"}


def first_epochs(losses: np.ndarray, target: float) -> np.ndarray:
    """[runs]: the first epoch, from 1, after which the loss is at most `target`; infinite where it never is."""
    reached = losses <= target
    return np.where(reached.any(-1), reached.argmax(-1) + 1.0, np.inf)
