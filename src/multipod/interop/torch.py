"""For PyTorch programs: gradients of `DistributedDataParallel` summed as a schedule says; Adasum; tensor-train tables.

state = HookState("halving-doubling")
model.register_comm_hook(state, multipod_hook)

optimizer = Adasum(torch.optim.Adam(model.parameters()), model.named_parameters())  # without DDP

bag = TTEmbeddingBag(10_000_000, 64, tt_ranks=16, mode="sum")  # in place of torch.nn.EmbeddingBag
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from typing import Any

import torch
from torch import distributed
from torch.distributed import GradBucket, ProcessGroup
from torch.futures import Future

from multipod.collectives.adasum import halving, node_chips
from multipod.collectives.build import build
from multipod.collectives.schedule import Schedule
from multipod.errors import ScheduleError
from multipod.execute.adasum.operator import Layers, refuse_poisoned
from multipod.execute.adasum.ranks import build_flag_sum
from multipod.execute.engines.torch import (
    TensorMemory,
    adasum,
    all_reduce,
    open_shared_memory,
    require_process_group,
    run,
)
from multipod.interop.torch_tables.module import TTEmbeddingBag as TTEmbeddingBag
from multipod.interop.torch_tables.module import from_jax as from_jax
from multipod.interop.torch_tables.module import to_jax as to_jax
from multipod.topology.topology import Topology

Named = Iterable[tuple[str, torch.nn.Parameter]]

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
        self.group = require_process_group(group)
        ranks = distributed.get_world_size(self.group)
        self.schedule: Schedule | None = None
        self.window: TensorMemory | None = None
        if algorithm == SHARED_MEMORY:
            self.window = open_shared_memory(self.group, **options)
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
        return _later(self._thread, vector, lambda: self.mean(vector))

    def close(self) -> None:
        """Ends the thread and gives back what the sums held."""
        self._thread.shutdown()
        if self.window is not None:
            self.window.close()


def multipod_hook(state: HookState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Averages a bucket of gradients over the ranks: give it to `model.register_comm_hook` with a `HookState`."""
    return state.later(bucket.buffer())


class AdasumState:
    """How `adasum_hook` combines: one for each model, made on all ranks of the group at the same time.

    Args:
      named: `model.named_parameters()`, for messages; tensors go by their numbers without it.
      topology: the machine, rank r being its live chip of rank r; a line of the ranks if None.
      node: so many ranks with consecutive numbers are a node, whose mean is taken first.
      group: the process group; the default group if None.

    Raises:
      ScheduleError: the topology does not fit the group; or there is no group.
    """

    def __init__(
        self,
        named: Named | None = None,
        topology: Topology | None = None,
        node: int = 1,
        group: ProcessGroup | None = None,
    ) -> None:
        self.group = require_process_group(group)
        ranks, rank = self.group.size(), self.group.rank()
        topology = topology or Topology((ranks,))
        if len(topology.chips) != ranks:
            raise ScheduleError(
                f"{topology} has {len(topology.chips)} live chips, and the group has {ranks} ranks. Give a topology "
                f"with {ranks} live chips, or none."
            )
        self.schedule = halving(topology, node)
        self.names = {id(tensor): name for name, tensor in named or ()}
        self._peers = len(node_chips(topology, node)[topology.chips[rank] // node])
        self._thread = ThreadPoolExecutor(1, "multipod-adasum")

    def combine(self, vector: torch.Tensor, layers: Layers) -> torch.Tensor:
        """Adasum of flat tensors over the ranks, in place.

        Raises:
          PoisonedError: on all ranks, if a tensor of any is not finite.
        """
        if self._peers > 1:
            vector.div_(self._peers)
        adasum(vector, self.schedule, layers, self.group)
        return vector

    def sum(self, vector: torch.Tensor) -> torch.Tensor:
        """The sum of short flat tensors over the ranks, in place."""
        run(vector, build_flag_sum(self.schedule), self.group)
        return vector

    def layers(self, tensors: Iterable[torch.Tensor], prefix: str = "") -> Layers:
        """Where these tensors lie when they are joined."""
        listed = list(tensors)
        names = (self.names.get(id(tensor), f"{prefix}tensor {k}") for k, tensor in enumerate(listed))
        return Layers(tuple(tensor.numel() for tensor in listed), tuple(names))

    def later(self, vector: torch.Tensor, layers: Layers) -> Future[torch.Tensor]:
        """`combine`, under way when this returns."""
        return _later(self._thread, vector, lambda: self.combine(vector, layers))

    def close(self) -> None:
        """Ends the thread."""
        self._thread.shutdown()


def adasum_hook(state: AdasumState, bucket: GradBucket) -> Future[torch.Tensor]:
    """Combines a bucket of gradients by Adasum, tensor by tensor: for `model.register_comm_hook`.

    This is Adasum of gradients. For momentum or Adam the paper combines the changes that they make: `Adasum`.
    """
    return state.later(bucket.buffer(), state.layers(bucket.parameters(), f"bucket {bucket.index()} "))


class Adasum(torch.optim.Optimizer):
    """An optimizer whose changes are combined over the ranks by Adasum, for a model without DDP.

    Each rank's `optimizer` sees the gradients of its own batch and makes its change; applied is the combination of all
    changes. Its state (momenta, second moments) stays local: `state_dict` holds this rank's, so every rank saves and
    loads its own. Rates and other settings are those of `optimizer`, and rate schedules work on either. All ranks must
    begin with equal weights.

    A gradient that is not finite on some rank is refused on all ranks before anything is changed, so that a
    program that catches `PoisonedError` may go on with the next batch.

    Args:
      optimizer: any, over parameters that are alike on all ranks.
      named: `model.named_parameters()`, for messages.
      topology: the machine, rank r being its live chip of rank r; a line of the ranks if None.
      node: so many ranks with consecutive numbers are a node, whose mean is taken first.
      group: the process group; the default group if None.
      report: measure `orthogonality` in each step.

    Attributes:
      orthogonality: by name of the tensor, |combined|^2 / sum |change|^2 of the last step: 1 where the ranks' changes
        are orthogonal, 1 / ranks where they are equal.

    Raises:
      ScheduleError: the ranks' parameters differ (names rank and tensor); as `AdasumState`.

    Source: Maleki et al. 2021, arXiv:2006.02924, section 4.1.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named: Named | None = None,
        *,
        topology: Topology | None = None,
        node: int = 1,
        group: ProcessGroup | None = None,
        report: bool = False,
    ) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer = optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.adasum = AdasumState(named, topology, node, group)
        self.orthogonality: dict[str, float] = {}
        self._report = report
        self._check_alike()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """The optimizer's step, with the combined change.

        Raises:
          PoisonedError: on all ranks: a gradient, or a change, of some rank is not finite. Nothing was applied then;
            but if it is a change, then that rank's local state may not be finite either.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._check_gradients()
            parts = [(tensors, [tensor.clone() for tensor in tensors]) for tensors in self._alike()]
            self.optimizer.step()
            try:
                combined = [self._combined(tensors, begun) for tensors, begun in parts]
            except Exception:
                for tensors, begun in parts:
                    torch._foreach_copy_(tensors, begun)
                raise
            for (tensors, begun), changes in zip(parts, combined, strict=True):
                for tensor, start, change in zip(tensors, begun, changes, strict=True):
                    tensor.copy_(start + change.view_as(start))
        return loss

    def close(self) -> None:
        """Gives back what the combination held."""
        self.adasum.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does what `zero_grad` of the optimizer does."""
        self.optimizer.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state of this rank's optimizer."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads what `state_dict` gave on this rank."""
        self.optimizer.load_state_dict(state_dict)
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"] if tensor.requires_grad]

    def _alike(self) -> list[list[torch.Tensor]]:
        """The tensors of one dtype and device at a time: those that can travel together."""
        kinds: dict[tuple[str, str], list[torch.Tensor]] = {}
        for tensor in self._tensors():
            kinds.setdefault((str(tensor.dtype), str(tensor.device)), []).append(tensor)
        return list(kinds.values())

    def _combined(self, tensors: list[torch.Tensor], begun: list[torch.Tensor]) -> list[torch.Tensor]:
        layers = self.adasum.layers(tensors)
        vector = torch.cat([(now - start).reshape(-1) for now, start in zip(tensors, begun, strict=True)])
        squares = _squares(vector, layers) if self._report else None
        parts = self.adasum.combine(vector, layers).split(list(layers.sizes))
        if squares is not None:
            share = (_squares(vector, layers) / self.adasum.sum(squares)).nan_to_num(1.0)
            self.orthogonality |= dict(zip(layers.names, share.tolist(), strict=True))
        return list(parts)

    def _check_gradients(self) -> None:
        """Raises on all ranks if a gradient of any is not finite; one short message if all are."""
        tensors = self._tensors()
        layers = self.adasum.layers(tensors)
        bad = [tensor.grad is not None and not bool(tensor.grad.isfinite().all()) for tensor in tensors]
        if self.adasum.sum(torch.tensor([float(any(bad))], dtype=torch.float64, device=_device(tensors)))[0] == 0:
            return
        ranks, rank = self.adasum.group.size(), self.adasum.group.rank()
        flags = torch.zeros(ranks, len(bad), dtype=torch.float64, device=_device(tensors))
        flags[rank] = torch.tensor(bad, dtype=torch.float64)
        self.adasum.sum(flags.view(-1))
        refuse_poisoned(f"Adasum on rank {rank}: gradients", flags.cpu().numpy(), layers.names)

    def _check_alike(self) -> None:
        tensors = self._tensors()
        names = self.adasum.layers(tensors).names
        mine = [(name, tuple(t.shape), str(t.dtype)) for name, t in zip(names, tensors, strict=True)]
        all_ranks: list[list[tuple[str, tuple[int, ...], str]]] = [[] for _ in range(self.adasum.group.size())]
        distributed.all_gather_object(all_ranks, mine, group=self.adasum.group)
        for rank, theirs in enumerate(all_ranks):
            for k, (ours, other) in enumerate(zip_longest(all_ranks[0], theirs)):
                if ours != other:
                    raise ScheduleError(
                        f"Adasum: parameter {k} is {_told(other)} on rank {rank}, and {_told(ours)} on rank 0. Give "
                        "all ranks the same model."
                    )


def _told(parameter: tuple[str, tuple[int, ...], str] | None) -> str:
    return "absent" if parameter is None else f"{parameter[0]} {list(parameter[1])} {parameter[2]}"


def _device(tensors: list[torch.Tensor]) -> torch.device:
    return tensors[0].device if tensors else torch.device("cpu")


def _squares(vector: torch.Tensor, layers: Layers) -> torch.Tensor:
    return torch.stack([part.double().square().sum() for part in vector.split(list(layers.sizes))])


def _later(thread: ThreadPoolExecutor, vector: torch.Tensor, work: Callable[[], torch.Tensor]) -> Future[torch.Tensor]:
    """What `work` returns, under way when this returns: on `thread` for a tensor in the host's memory."""
    if vector.device.type != "cpu":
        # What is on a stream is under way already; the future remembers the stream.
        future: Future[torch.Tensor] = Future(devices=[vector.device])
        future.set_result(work())
        return future
    future = Future()

    def done() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    thread.submit(done)
    return future
