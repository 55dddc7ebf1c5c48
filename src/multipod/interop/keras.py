"""Adasum for Keras programs with TensorFlow or JAX, over MPI. Needs the extra `keras`, and `mpirun` to start the ranks.

optimizer = adasum(keras.optimizers.Adam(1e-3))
model.compile(optimizer, loss, jit_compile=False)
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from multipod.collectives.adasum import halving, node_chips
from multipod.errors import LayoutError, ScheduleError
from multipod.execute.adasum.operator import Layers
from multipod.execute.engines.mpi import adasum as combine
from multipod.topology.topology import Topology


def adasum(optimizer: Any, comm: MPI.Intracomm | None = None, node: int = 1, topology: Topology | None = None) -> Any:
    """`optimizer`, whose changes of the variables are from now on combined over the ranks by Adasum.

    Each rank's optimizer sees the gradients of its own batch and makes its change; applied is the combination of all
    changes. Its own variables (momenta) stay local. All ranks must begin with equal weights: `broadcast` makes them
    so. Compile the model with `jit_compile=False`, since XLA cannot call MPI; with JAX behind Keras, steps then run
    operation by operation.

    Args:
      optimizer: of Keras 3; it is changed in place.
      comm: the ranks; all of MPI's world if None.
      node: so many ranks with consecutive numbers are a node, whose mean is taken first.
      topology: the machine, rank r being its live chip of rank r; a line of the ranks if None.

    Raises:
      ScheduleError: the topology does not fit the ranks; when applied, the ranks' variables differ (names rank and
        tensor).
      LayoutError: when applied inside a program that is compiled and not TensorFlow's.
      PoisonedError: when applied eagerly: a change is not finite on some rank. Inside `model.fit` TensorFlow turns it
        into an error of its own with the same words.

    Source: Maleki et al. 2021, arXiv:2006.02924, section 4.1.
    """
    comm = comm or MPI.COMM_WORLD
    combiner = _Combiner(comm, node, topology or Topology((comm.size,)))
    plain = type(optimizer)

    class Combined(plain):  # type: ignore[valid-type, misc]
        """The optimizer's own class, with another `apply`."""

        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            """The optimizer's change of each variable, combined over the ranks."""
            variables = list(self._trainable_variables if trainable_variables is None else trainable_variables)
            begun = [_copied(variable) for variable in variables]
            done = super().apply(grads, trainable_variables)
            changes = combiner.combined(
                [variable - start for variable, start in zip(variables, begun, strict=True)],
                [getattr(variable, "path", variable.name) for variable in variables],
            )
            for variable, start, change in zip(variables, begun, changes, strict=True):
                variable.assign(start + change)
            return done

    Combined.__name__, Combined.__qualname__, Combined.__module__ = plain.__name__, plain.__qualname__, plain.__module__
    optimizer.__class__ = Combined
    return optimizer


def broadcast(variables: Sequence[Any], comm: MPI.Intracomm | None = None) -> None:
    """Gives `variables` the values that they have on rank 0: `broadcast(model.variables)`."""
    comm = comm or MPI.COMM_WORLD
    for variable in variables:
        variable.assign(comm.bcast(np.asarray(variable) if comm.rank == 0 else None))


class _Combiner:
    def __init__(self, comm: MPI.Intracomm, node: int, topology: Topology) -> None:
        if len(topology.chips) != comm.size:
            raise ScheduleError(
                f"{topology} has {len(topology.chips)} live chips, and there are {comm.size} ranks. Give a topology "
                f"with {comm.size} live chips, or none."
            )
        self._comm, self._schedule = comm, halving(topology, node)
        self._peers = len(node_chips(topology, node)[topology.chips[comm.rank] // node])

    def combined(self, changes: list[Any], names: list[str]) -> list[Any]:
        """The changes, combined: at once, or when the program runs that they are part of."""

        def run(*arrays: Any) -> list[np.ndarray]:
            return self._run([np.asarray(array) for array in arrays], names)

        if all(_is_there(change) for change in changes):
            return list(run(*changes))
        try:
            import tensorflow as tf
        except ImportError:
            tf = None
        if tf is None or not all(tf.is_tensor(change) for change in changes):
            raise LayoutError(
                "adasum: the optimizer is traced by a framework that cannot call MPI. Compile the model with "
                "jit_compile=False, or with JAX take multipod's own training (--gradient-sum adasum)."
            )
        found = tf.numpy_function(run, changes, [change.dtype for change in changes])
        for one, change in zip(found, changes, strict=True):
            one.set_shape(change.shape)
        return list(found)

    def _run(self, arrays: list[np.ndarray], names: list[str]) -> list[np.ndarray]:
        found = [array.reshape(-1) for array in arrays]
        for dtype in sorted({str(array.dtype) for array in arrays}):
            places = [k for k, array in enumerate(arrays) if str(array.dtype) == dtype]
            vector = np.concatenate([found[k] for k in places])
            if self._peers > 1:
                vector /= self._peers
            layers = Layers(tuple(arrays[k].size for k in places), tuple(names[k] for k in places))
            combine(vector, self._schedule, layers, self._comm)
            for k, part in zip(places, np.split(vector, layers.ends[1:-1]), strict=True):
                found[k] = part
        return [part.reshape(array.shape) for part, array in zip(found, arrays, strict=True)]


def _copied(variable: Any) -> Any:
    """The value, which the optimizer is about to overwrite."""
    return variable + 0


def _is_there(value: Any) -> bool:
    """Whether it is a value and not a place in a program."""
    try:
        np.asarray(value)
    except Exception:
        return False
    return True
