"""Where each tensor of a model stands in another library's state dict, read in both directions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from multipod.interop.weights.forms import CONVOLUTION, FLAT, SAME, Form, Matrix, Pointwise, Shape

Tensors = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Place:
    """Where a tensor of ours stands.

    Attributes:
      names: of theirs, which are one unless they are `stacked` or `slices`.
      form: what lies otherwise in each of theirs.
      stacked: ours has a dim more, in front, which counts theirs.
      slices: the first row and the number of rows of each of theirs in ours, whose other rows are zero.
    """

    names: tuple[str, ...]
    form: Form = SAME
    stacked: bool = False
    slices: tuple[tuple[int, int], ...] = ()

    def ours(self, theirs: Sequence[np.ndarray], shape: Shape) -> np.ndarray:
        """Our tensor, of this shape, made of theirs."""
        if self.slices:
            whole = np.zeros(shape, theirs[0].dtype)
            for part, (begin, count) in zip(theirs, self.slices, strict=True):
                whole[begin : begin + count] = self.form.ours(part, (count, *shape[1:]))
            return whole
        if self.stacked:
            return np.stack([self.form.ours(x, shape[1:]) for x in theirs])
        return self.form.ours(theirs[0], shape)

    def theirs(self, ours: np.ndarray) -> list[np.ndarray]:
        """Their tensors, by `names`, made of ours."""
        if self.slices:
            return [self.form.theirs(ours[begin : begin + count]) for begin, count in self.slices]
        return [self.form.theirs(part) for part in (ours if self.stacked else [ours])]


Kind = Mapping[str, tuple[str, Form]]
"""A kind of layer: its parameters' last parts here, and the last part and form of each there."""


class NamedLayer(NamedTuple):
    """A layer of ours, the one of theirs that it is, and what kind of layer that is.

    Attributes:
      ours: the path of its parameters, without the last part.
      theirs: likewise.
      kind: one of those below.
    """

    ours: str
    theirs: str
    kind: Kind


CONV: Kind = {"kernel": ("weight", CONVOLUTION), "bias": ("bias", SAME)}
SQUEEZE: Kind = {"kernel": ("weight", Pointwise()), "bias": ("bias", SAME)}
LINEAR: Kind = {"kernel": ("weight", Matrix()), "bias": ("bias", SAME)}
TO_HEADS: Kind = {"kernel": ("weight", Matrix()), "bias": ("bias", FLAT)}
FROM_HEADS: Kind = {"kernel": ("weight", Matrix(2)), "bias": ("bias", SAME)}
NORM: Kind = {
    "scale": ("weight", SAME),
    "bias": ("bias", SAME),
    "mean": ("running_mean", SAME),
    "var": ("running_var", SAME),
}
TABLE: Kind = {"table": ("weight", SAME)}


def places_of(layers: Iterable[NamedLayer]) -> dict[str, Place]:
    """The place of every parameter that such layers can have."""
    return {f"{one.ours}/{ours}": place for one in layers for ours, place in _of_layer(one)}


def _of_layer(layer: NamedLayer) -> Iterator[tuple[str, Place]]:
    for ours, (theirs, form) in layer.kind.items():
        yield ours, Place((f"{layer.theirs}.{theirs}",), form)


def keep_names(tensors: Tensors) -> Tensors:
    """The tensors as they are: every name is today's."""
    return tensors


def no_objection(model: object, config: Mapping[str, object]) -> list[str]:
    """Nothing against a model: shapes tell all."""
    return []


def no_config(model: object) -> dict[str, object]:
    """No configuration: the library keeps none beside its weights."""
    return {}


@dataclass(frozen=True)
class Family:
    """Models of ours that another library has too.

    Attributes:
      library: whose they are, as `--to` names it.
      models: the classes of ours.
      places: the places of a model's tensors, by our names; those that it does not have are passed over.
      modern: theirs by today's names, of a state dict with former names, prefixes or a tensor twice.
      ignored: patterns of names of theirs that hold nothing learnt.
      part: theirs is a part of ours: the rest of ours stays as it is, and so does the rest of theirs.
      objections: what of their configuration our model computes otherwise, in words.
      config: their configuration of a model of ours; empty where they have none.
      aside: tensors of theirs that say nothing of ours, for a state dict that they load whole.
    """

    library: str
    models: tuple[type, ...]
    places: Callable[..., dict[str, Place]]
    modern: Callable[[Tensors], Tensors] = keep_names
    ignored: tuple[str, ...] = ()
    part: bool = False
    objections: Callable[..., list[str]] = no_objection
    config: Callable[..., dict[str, object]] = no_config
    aside: Callable[[Tensors], dict[str, np.ndarray]] = field(default=lambda tensors: {})
