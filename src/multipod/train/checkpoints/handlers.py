"""How Orbax writes and reads the arrays of a state.

By default Orbax lets every replica of an array write a slice of it. It cuts the slices on the devices, one program for
each shape and place: 40 replicated arrays on 8 local devices took 14.7 s at the first save, against 0.05 s here, where
one replica writes a shard whole. Each process still writes the shards that it alone holds; what all hold is written by
the process that has the first replica. Files and metadata are as before, so that each reads what the other wrote.
"""

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.handlers import DefaultCheckpointHandlerRegistry

ITEM = "default"
"""Orbax's name for what a checkpoint holds when that is one tree."""


def make_handlers() -> DefaultCheckpointHandlerRegistry:
    """The handlers of a `CheckpointManager`: saves a tree of arrays; restores it, or parts of it."""
    types = ocp.type_handlers
    arrays = types.create_type_handler_registry(
        (np.ndarray, types.NumpyHandler()), (jax.Array, types.ArrayHandler(use_replica_parallel=False))
    )
    trees = ocp.PyTreeCheckpointHandler(type_handler_registry=arrays)
    handlers = DefaultCheckpointHandlerRegistry()
    handlers.add(ITEM, ocp.args.PyTreeSave, trees)
    handlers.add(ITEM, ocp.args.PyTreeRestore, trees)
    handlers.add(ITEM, ocp.args.StandardRestore, ocp.StandardCheckpointHandler())
    return handlers
