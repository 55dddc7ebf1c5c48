"""How much of a model ZeRO-1 and FSDP split over how many devices: by the rule that the step splits by."""

import math
from functools import lru_cache
from typing import NamedTuple

from multipod.layout.axes import DATA_AXES
from multipod.layout.layout import Layout, default_shape
from multipod.plan.workload import Workload


class SharedElements(NamedTuple):
    """Parameters of a replica's device, as its data devices share them.

    Attributes:
      kept: those that a device updates and keeps the state of, padding and what stays whole included.
      sent: those of the vectors that are summed and gathered, padding included.
      gathered: those of flat tensors that the optimizer must see whole (`TakesFlatTensors`).
    """

    kept: float
    sent: float
    gathered: float


def shared_elements(workload: Workload, layout: Layout, replicas: int) -> SharedElements:
    """The shares of the weights of `workload` between `replicas`; of one whose tensors nobody knows, equal ones.

    Splits within a replica divide each tensor evenly here; whether they leave it a dim that divides is not looked at.
    """
    split = layout.split
    parts = split.model if workload.splits_weights else 1
    if not workload.tensors or split.expert > 1:  # what no expert is lies on the devices of `expert` too
        return SharedElements(workload.parameters / (parts * split.expert * replicas), workload.held(split), 0.0)
    shape = layout.mesh if layout.mesh and math.prod(layout.mesh) == replicas else default_shape(replicas)
    return _shared(workload, shape, parts)


@lru_cache(maxsize=256)
def _shared(workload: Workload, mesh: tuple[int, int], parts: int) -> SharedElements:
    # A workload with tensors was traced, so JAX is there; the command line comes before it.
    from multipod.layout.mesh import is_split
    from multipod.layout.shares import share_of

    sizes, devices = dict(zip(DATA_AXES, mesh, strict=True)), mesh[0] * mesh[1]
    kept = sent = gathered = 0.0
    for shape, count in workload.tensors:
        share = share_of(shape, sizes)
        size = count * math.prod(share.kept) / parts
        kept += size / devices if is_split(share.spec) or devices == 1 else size
        sent += size
        gathered += 0.0 if workload.flattens or not share.is_flat else size
    return SharedElements(kept, sent, gathered)
