"""Gradients of PyTorch's `DistributedDataParallel`, summed as a multipod schedule says.

state = HookState("halving-doubling")
model.register_comm_hook(state, multipod_hook)
"""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import distributed
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future

from multipod.collectives.build import build
from multipod.collectives.schedule import Schedule
from multipod.errors import ScheduleError
from multipod.execute.torch import TensorMemory, all_reduce, process_group, shared_memory
from multipod.topology.topology import Topology

SHARED_MEMORY = "shared-memory"


class HookState:
    """How `multipod_hook` sums: one for each model, made on all ranks of the group at the same time.

    Args:
      algorithm: a name in `multipod.collectives.build.ALGORITHMS`; or `shared-memory`, for CPU ranks on one host.
      topology: the machine, rank r being its live chip of rank r; a ring of the ranks if None.
      group: the process group that the model was wrapped with; the default group if None.
      options: of the algorithm, or of `SharedMemory`.

    Raises:
      ScheduleError: no such algorithm, or it does not fit the topology, or the topology does not fit the group; or
        there is no group.
      ClusterError: `shared-memory`, and the ranks are not on one host.
    """

    def __init__(
        self,
        algorithm: str = "ring",
        topology: Topology | None = None,
        group: ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        self.group = process_group(group)
        ranks = distributed.get_world_size(self.group)
        self.schedule: Schedule | None = None
        self.window: TensorMemory | None = None
        if algorithm == SHARED_MEMORY:
            self.window = shared_memory(self.group, **options)
        else:
            topology = topology or Topology((ranks,), wrap=(True,))
            if len(topology.chips) != ranks:
                raise ScheduleError(
                    f"{topology} has {len(topology.chips)} live chips, and the group has {ranks} ranks. Give a "
                    f"topology with {ranks} live chips, or none."
                )
            self.schedule = build(algorithm, topology, **options)
        # One thread, so that buckets are summed in the order in which all ranks fill them, beside the backward pass.
        self._thread = ThreadPoolExecutor(1, "multipod-hook")

    def mean(self, vector: torch.Tensor) -> torch.Tensor:
        """Averages a flat tensor over the ranks in place, and returns it."""
        vector.div_(distributed.get_world_size(self.group))  # before the sum, as DDP does
        if self.window is not None:
            self.window.all_reduce(vector)
        elif self.schedule is not None:
            all_reduce(vector, self.schedule, self.group)
        return vector

    def later(self, vector: torch.Tensor) -> Future[torch.Tensor]:
        """`mean`, under way when this returns."""
        if vector.device.type != "cpu":
            # What is on a stream is under way already; the future remembers the stream.
            future: Future[torch.Tensor] = Future(devices=[vector.device])
            future.set_result(self.mean(vector))
            return future
        future = Future()

        def work() -> None:
            try:
                future.set_result(self.mean(vector))
            except Exception as error:
                future.set_exception(error)

        self._thread.submit(work)
        return future

    def close(self) -> None:
        """Ends the thread and gives back what the sums held."""
        self._thread.shutdown()
        if self.window is not None:
            self.window.close()


def multipod_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks: give it to `model.register_comm_hook` with a `HookState`."""
    return state.later(bucket.buffer())
