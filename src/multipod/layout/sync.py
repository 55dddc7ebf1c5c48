"""How the replicas of a model are kept the same: who sums their gradients, and what each keeps of the weights."""

from dataclasses import dataclass
from typing import Literal

from multipod.collectives.build import ALGORITHMS
from multipod.errors import LayoutError, nearest

BUILT_IN_SUMS = ("xla", "torus", "ordered", "direct")
"""The sums that are no schedules: the names of `multipod.execute.sums.SUMS`, which lies on this floor."""

COMBINATIONS = ("adasum", "adasum-rows", "adasum-gradients")
"""The ways of combining that are no sums, and change what is learnt: Adasum of the changes that every device's own
optimizer makes; the same between rows of the mesh, with the mean inside each row; Adasum of the gradients."""

Sharding = Literal["none", "zero1", "fsdp"]


@dataclass(frozen=True)
class Sync:
    """What devices that hold the same weights tell each other in an update.

    Attributes:
      gradient_sum: a name in `BUILT_IN_SUMS`, or a schedule's in `multipod.collectives.build.ALGORITHMS`, or one in
        `COMBINATIONS`.
      sharding: "none" keeps weights and optimizer state whole on every data device. "zero1" leaves the gradient sum
        scattered, lets each device update its share of the weights and of the optimizer state, then gathers the weights
        (arXiv:2004.13336; ZeRO-1, arXiv:1910.02054). "fsdp" keeps the weights split over the data axes, too; those of a
        layer are gathered before they are used, and again in the backward pass (ZeRO-3). Their gradients are summed
        where they are made.
      gather_dtype: (zero1, fsdp) weights travel as this type and are used as this type, while what is kept and updated
        stays float32 and split.
      sum_dtype: the type that gradients have on the wire; empty is their own. They are added in it.
      bucket_bytes: sums gradients in messages of about so many bytes, in the order in which the backward pass makes
        them, so that the sum of one overlaps the making of the next; 0 sums all in one message.
      report_orthogonality: (Adasum) report |combined|^2 / sum |g_i|^2 of each tensor at every update: 1 where the
        devices' gradients are orthogonal, 1 / devices where they are equal.
    """

    gradient_sum: str = "xla"
    sharding: Sharding = "none"
    gather_dtype: Literal["", "bfloat16"] = ""
    sum_dtype: Literal["", "float32", "bfloat16"] = ""
    bucket_bytes: int = 0
    report_orthogonality: bool = False

    def __post_init__(self) -> None:
        wrong = []
        if self.gradient_sum not in ALGORITHMS and self.gradient_sum not in (*BUILT_IN_SUMS, *COMBINATIONS):
            known = (*BUILT_IN_SUMS, *ALGORITHMS, *COMBINATIONS)
            wrong.append(
                f"layout.gradient_sum: no sum is called {self.gradient_sum!r}. {nearest(self.gradient_sum, known)}"
            )
        if self.sharding not in ("none", "zero1", "fsdp"):
            wrong.append(f"layout.sharding={self.sharding!r} is no sharding. Take none, zero1 or fsdp.")
        if self.bucket_bytes < 0:
            wrong.append(f"layout: bucket_bytes={self.bucket_bytes}. Give 0 or more.")
        if wrong:
            raise LayoutError("\n".join(wrong))

    @property
    def combines(self) -> bool:
        """Whether gradients are combined by Adasum, and not summed."""
        return self.gradient_sum in COMBINATIONS

    @property
    def local_state(self) -> bool:
        """Whether every device has an optimizer state of its own."""
        return self.gradient_sum in ("adasum", "adasum-rows")

    @property
    def zero1(self) -> bool:
        """Whether the optimizer state is split over the data axes, and the weights are not."""
        return self.sharding == "zero1"

    @property
    def fsdp(self) -> bool:
        """Whether the weights are split over the data axes, and gathered where they are used."""
        return self.sharding == "fsdp"

    @property
    def shards_update(self) -> bool:
        """Whether each device updates only its share of the weights: ZeRO-1 or FSDP."""
        return self.sharding != "none"

    @property
    def stores_shards(self) -> bool:
        """Whether the weights stay split between updates: FSDP, or ZeRO-1 whose gathered weights have another type."""
        return self.fsdp or (self.zero1 and bool(self.gather_dtype))


PLAIN = Sync()
"""XLA sums the gradients, and every device keeps all."""
