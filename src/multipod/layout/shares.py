"""`Share`: how one tensor is kept in equal shares by the data devices. ZeRO-1 and FSDP keep everything so.

A tensor with dims that the data axes divide is split there and keeps its shape. Any other is flattened, padded with
zeros to a multiple of the devices, and split evenly (arXiv:2004.13336 pads too). The flat form has as many dims as the
tensor, nearly all of size 1, so that an optimizer's rules by the number of dims still hold; and the axes inside a
replica go on to split it as they split the tensor.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

WHOLE = PartitionSpec()

SMALL = 256
"""Elements, 1 KiB of float32: a tensor of so few that nothing divides stays whole. Its message would be mostly padding:
on 8,192 devices a bias of 64 would travel as 8,192 numbers."""


@dataclass(frozen=True)
class Share:
    """How the devices of a mesh keep a tensor.

    Attributes:
      shape: of the tensor.
      spec: how the mesh splits what is kept, which has the shape `kept`.
      parts: of each dim, into how many parts axes inside a replica split it; empty is 1 of each.
      lead: leading dims that are not flattened.
      devices: those that the flat rest is padded for; 0 where the tensor is kept in its own shape.
      axes: of these devices; empty where the tensor is kept in its own shape.
    """

    shape: tuple[int, ...]
    spec: PartitionSpec = field(default=WHOLE, compare=False)
    parts: tuple[int, ...] = ()
    lead: int = 0
    devices: int = 0
    axes: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", self.parts or (1,) * len(self.shape))

    @property
    def is_flat(self) -> bool:
        """Whether the tensor is kept flattened and padded."""
        return self.devices > 0

    @property
    def kept(self) -> tuple[int, ...]:
        """The shape of what is kept: [lead..., parts..., padded rest]."""
        if not self.is_flat:
            return self.shape
        *parts, last = self.parts[self.lead :]
        return (*self.shape[: self.lead], *parts, last * (self._rest + self.padding))

    @property
    def padding(self) -> int:
        """Zeros behind each part of the flat rest."""
        return -self._rest % self.devices if self.is_flat else 0

    @property
    def _rest(self) -> int:
        return math.prod(n // p for n, p in zip(self.shape[self.lead :], self.parts[self.lead :], strict=True))

    @property
    def local(self) -> "Share":
        """How one part is kept: a tensor as programs that are manual over the axes of `parts` see it."""
        each = tuple(n // p for n, p in zip(self.shape, self.parts, strict=True))
        return replace(self, shape=each, parts=())

    def flatten(self, tensor: Any) -> Any:
        """`tensor` as it is kept; for arrays of NumPy and JAX."""
        if not self.is_flat:
            return tensor
        opened, order = self._opened()
        lead, parts = self.shape[: self.lead], self.parts[self.lead :]
        rows = tensor.reshape(opened).transpose(order).reshape(*lead, *parts, self._rest)
        xp = np if isinstance(tensor, np.ndarray) else jnp
        rows = xp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, self.padding)]) if self.padding else rows
        return self._devices_first(rows).reshape(self.kept)

    def unflatten(self, kept: Any) -> Any:
        """The tensor of what `flatten` made of it; for arrays of NumPy and JAX."""
        if not self.is_flat:
            return kept
        opened, order = self._opened()
        lead, parts = self.shape[: self.lead], self.parts[self.lead :]
        rows = kept
        if parts[-1] > 1:
            rows = rows.reshape(*lead, *parts[:-1], self.devices, parts[-1], -1).swapaxes(-3, -2)
        rows = rows.reshape(*lead, *parts, -1)[..., : self._rest]
        back = sorted(range(len(order)), key=order.__getitem__)
        return rows.reshape([opened[k] for k in order]).transpose(back).reshape(self.shape)

    def _devices_first(self, rows: Any) -> Any:
        """[..., parts of the last dim, padded rest] with each device's piece of all these parts in one place.

        A program that is manual over the data axes cuts the last dim for its devices, and the axes of the parts go on
        to split what each of them has.
        """
        if self.parts[-1] == 1:
            return rows
        return rows.reshape(*rows.shape[:-1], self.devices, -1).swapaxes(-3, -2)

    def _opened(self) -> tuple[list[int], list[int]]:
        """The shape with each dim behind `lead` cut into (parts, rest), and the order that puts the parts first."""
        opened, firsts, rests = list(self.shape[: self.lead]), [], []
        for n, parts in zip(self.shape[self.lead :], self.parts[self.lead :], strict=True):
            firsts.append(len(opened))
            rests.append(len(opened) + 1)
            opened += [parts, n // parts]
        return opened, [*range(self.lead), *firsts, *rests]

    def to_json(self) -> dict[str, Any]:
        """What `from_json` needs to read such a tensor elsewhere: all but the mesh's axes."""
        return {"shape": self.shape, "parts": self.parts, "lead": self.lead, "devices": self.devices}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "Share":
        """The share of `to_json`, without a spec."""
        shape, parts = tuple(saved["shape"]), tuple(saved["parts"])
        return Share(shape, parts=parts, lead=saved["lead"], devices=saved["devices"])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FlatTensor:
    """A tensor in a state that is kept flat, with what says how: a node of the tree with one leaf.

    Attributes:
      array: of shape `share.kept`.
      share: how it is kept.
    """

    array: Any
    share: Share = field(metadata={"static": True})


def is_flat_tensor(node: Any) -> bool:
    """Whether a node of a tree is a `FlatTensor`."""
    return isinstance(node, FlatTensor)


def share_of(
    shape: Sequence[int],
    sizes: Mapping[str, int],
    base: PartitionSpec = WHOLE,
    base_sizes: Mapping[str, int] | None = None,
    lead: int = 0,
) -> Share:
    """How a tensor of `shape` is kept on data axes of `sizes`: a function of its arguments alone.

    base: how other axes, of `base_sizes`, split the tensor anyway. lead: leading dims that an optimizer must see as
    they are, as the layers of a stack.

    A device then keeps at most ceil(rest / devices) elements for each of the leading dims; or all of a tensor of at
    most `SMALL` elements a part, or without dims.
    """
    shape, devices = tuple(shape), math.prod(sizes.values())
    spec = update_spec(shape, sizes, base)
    taken = (*base, *[None] * (len(shape) - len(base)))
    parts = tuple(math.prod((base_sizes or {})[axis] for axis in _names(names)) for names in taken)
    each = math.prod(shape) // math.prod(parts)
    if spec != base or devices == 1 or each <= SMALL:
        return Share(shape, spec, parts)
    # Leading dims that are many, or split already, are flattened with the rest: they would be padded one by one.
    lead = lead if math.prod(shape[:lead]) <= SMALL and math.prod(parts[:lead]) == 1 and lead < len(shape) else 0
    last = (*sizes, *_names(taken[-1]))
    return Share(shape, PartitionSpec(*taken[:-1], last), parts, lead, devices, tuple(sizes))


def update_spec(shape: Sequence[int], sizes: Mapping[str, int], base: PartitionSpec = WHOLE) -> PartitionSpec:
    """How axes of `sizes` split a tensor of `shape` along its dims; `base` where they cannot.

    `base` is how the tensor is split anyway, by other axes; the dims that it splits are left alone. Is the first dim
    free and divides over all axes, they take it: each share then lies in one piece, and is sent without being
    packed. Else the first way is taken in which each axis divides a dim, larger dims first.
    """
    taken = (*base, *[None] * (len(shape) - len(base)))
    if shape and taken[0] is None and shape[0] % math.prod(sizes.values()) == 0:
        return PartitionSpec(tuple(sizes) or None, *taken[1:])
    free = sorted((dim for dim, names in enumerate(taken) if names is None), key=lambda dim: -shape[dim])
    for dims in itertools.product(free, repeat=len(sizes)):
        by_dim = {d: tuple(axis for axis, dim in zip(sizes, dims, strict=True) if dim == d) for d in set(dims)}
        if all(shape[dim] % math.prod(sizes[axis] for axis in axes) == 0 for dim, axes in by_dim.items()):
            return PartitionSpec(*(own or by_dim.get(dim) for dim, own in enumerate(taken)))
    return base


def _names(entry: Any) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else tuple(entry or ())
