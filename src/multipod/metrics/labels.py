"""Checks labels on the host that read them, where a rank and a row still have names. Nothing here needs JAX."""

import numpy as np
from numpy.typing import ArrayLike

from multipod.errors import MetricError


def check_labels(
    labels: ArrayLike, classes: int, mask: ArrayLike | None = None, name: str = "label", rank: int = 0
) -> None:
    """Refuses labels outside 0 to classes - 1. One pass over the labels.

    Args:
      labels: integers of any shape, as this rank read them.
      classes: how many there are.
      mask: true where an example counts, of the same shape or of its first dimensions; None: all count.
      name: the tensor's name in the batch.
      rank: the process that read it.

    Raises:
      MetricError: a label is no integer, or no class; the first is named.
    """
    labels = np.asarray(labels)
    if labels.dtype.kind not in "iu":
        raise MetricError(f"rank {rank}: {name} has dtype {labels.dtype}. Labels are integers from 0 to {classes - 1}.")
    wrong = (labels < 0) | (labels >= classes)
    if mask is not None:
        given = np.asarray(mask, bool)
        wrong &= given.reshape(*given.shape, *(1,) * (labels.ndim - given.ndim))
    if not wrong.any():
        return
    place = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    raise MetricError(
        f"rank {rank}: {name}[{', '.join(map(str, place))}] is {labels[place]}, the first of {wrong.sum():,} outside "
        f"the {classes} classes 0 to {classes - 1}. Mend the data, give the model more classes, or mask the padding."
    )
