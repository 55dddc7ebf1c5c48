"""Bags of rows of a tensor train in PyTorch's own operations: the kernel's reference, on every device and dtype."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

NO_PADDING = -1


class Bags(NamedTuple):
    """Bags of ids: integers [bags, ids a bag] without offsets, or [ids] with them.

    Attributes:
      ids: int32 or int64.
      offsets: where bags begin, [bags], and where the last ends too if `last`; of the ids' dtype.
      weights: a number for each id, shaped like `ids`; None is all ones.
      padding: an id that counts as not there, or `NO_PADDING`.
      mean: whether a bag is the mean of its rows, and not their sum.
      last: whether the last offset is where the last bag ends; ids from there on are not read.
    """

    ids: torch.Tensor
    offsets: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    padding: int = NO_PADDING
    mean: bool = False
    last: bool = False

    @property
    def number(self) -> int:
        """The number of bags."""
        return self.ids.shape[0] if self.offsets is None else self.offsets.shape[0] - self.last


def materialize(cores: Sequence[torch.Tensor]) -> torch.Tensor:
    """The table that the cores stand for, [m_1 .. m_d, n_1 .. n_d]: its last rows are padding. Takes its memory."""
    table = cores[0].new_ones(1, 1, 1)
    for core in cores:
        table = torch.einsum("Iar,irbs->Iiabs", table, core)
        table = table.reshape(table.shape[0] * table.shape[1], -1, table.shape[-1])
    return table[:, :, 0]


def look_up(cores: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """The rows with these numbers, [ids, features], each computed for itself; nothing is checked."""
    digits: list[torch.Tensor] = []
    for core in reversed(cores):
        digits.insert(0, ids % len(core))
        ids = ids // len(core)
    rows = cores[0].new_ones(len(ids), 1, 1)
    for core, digit in zip(cores, digits, strict=True):
        rows = torch.einsum("xar,xrbs->xabs", rows, core[digit])
        rows = rows.flatten(1, 2)
    return rows[:, :, 0]


def bag(cores: Sequence[torch.Tensor], bags: Bags) -> torch.Tensor:
    """The sums or means of bags, [bags, features]; ids and offsets are not checked. Differentiable any number of times.

    Every distinct id is looked up once; the kernel shares the products of equal first digits, too.
    """
    numbers = bag_numbers(bags)
    used = (numbers < bags.number) & (bags.ids.reshape(-1) != bags.padding)
    distinct, place = torch.unique(bags.ids.reshape(-1)[used], return_inverse=True)
    rows = look_up(cores, distinct)[place]
    if bags.weights is not None:
        rows = rows * bags.weights.reshape(-1)[used, None]
    sums = rows.new_zeros(bags.number, rows.shape[-1]).index_add(0, numbers[used], rows)
    if not bags.mean:
        return sums
    counts = torch.bincount(numbers[used], minlength=bags.number).clamp(min=1)
    return sums / counts[:, None].to(sums.dtype)


def bag_numbers(bags: Bags) -> torch.Tensor:
    """Which bag each id belongs to, int64 [ids]; those behind the last bag get the number of bags."""
    places = torch.arange(bags.ids.numel(), device=bags.ids.device)
    if bags.offsets is None:
        return places // max(bags.ids.shape[1], 1)
    return torch.searchsorted(bags.offsets, places.to(bags.offsets.dtype), right=True) - 1
