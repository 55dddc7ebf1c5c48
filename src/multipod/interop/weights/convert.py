"""State dicts to parameters and back: what fits goes over number for number, what does not is listed, all of it."""

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches

import numpy as np

from multipod.errors import WeightsError
from multipod.interop.weights.places import Family, Place, Tensors
from multipod.pytrees import Params, Statistics


def to_ours(
    family: Family,
    model: object,
    tensors: Tensors,
    params: Params,
    statistics: Statistics,
    *,
    fresh: Sequence[str] = (),
    without: Sequence[str] = (),
) -> tuple[Params, Statistics]:
    """`params` and `statistics` with every tensor that the other library's model has replaced by its own.

    Args:
      family: of the model, with the table of names.
      model: ours.
      tensors: their state dict, as NumPy arrays.
      params: flat, of the shapes and types that the model has; arrays, or shapes where all are replaced.
      statistics: likewise.
      fresh: patterns of names of ours, as `head/*`, that stay as they are.
      without: patterns of names of theirs that are left out.

    Raises:
      WeightsError: every name that is missing or left over, with the nearest, and every shape that differs.
    """
    tensors = {k: v for k, v in family.modern(tensors).items() if not _matches(k, without)}
    known = {**params, **statistics}
    places = {k: v for k, v in _places(family, model, known).items() if not _matches(k, fresh)}
    ours = [name for name in params if name not in places and not _matches(name, fresh)]
    used = {name for place in places.values() for name in place.names}
    rest = [] if family.part else [name for name in tensors if name not in used and not _is_ignored(family, name)]
    wrong = [*_unnamed(family, ours), *_misfits(places, tensors, known, rest), *_left_over(rest, used - {*tensors})]
    if wrong:
        listed = "\n  ".join(wrong)
        raise WeightsError(
            f"{type(model).__name__}: {len(wrong)} tensors of {family.library}'s do not fit:\n  {listed}\nTake the "
            "weights of the same network, change the recipe's model, or let ours begin fresh (--fresh 'head/*') and "
            "leave theirs out (--without 'fc.*')."
        )
    found = {
        name: np.ascontiguousarray(
            place.ours([np.asarray(tensors[theirs]) for theirs in place.names], known[name].shape)
        ).astype(known[name].dtype)
        for name, place in places.items()
    }
    return {k: found.get(k, v) for k, v in params.items()}, {k: found.get(k, v) for k, v in statistics.items()}


def to_theirs(family: Family, model: object, params: Params, statistics: Statistics) -> dict[str, np.ndarray]:
    """The state dict that the other library's model loads: host arrays in our types, contiguous."""
    ours = {name: np.asarray(array) for name, array in {**params, **statistics}.items()}
    found = {
        theirs: np.ascontiguousarray(array)
        for name, place in _places(family, model, ours).items()
        for theirs, array in zip(place.names, place.theirs(ours[name]), strict=True)
    }
    return found | family.aside(found)


def _places(family: Family, model: object, known: Iterable[str]) -> dict[str, Place]:
    known = {*known}
    return {name: place for name, place in family.places(model).items() if name in known}


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _is_ignored(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.ignored)


def _unnamed(family: Family, ours: Sequence[str]) -> list[str]:
    return [] if family.part else [f"{name}: {family.library} has no such tensor" for name in ours]


def _misfits(
    places: Mapping[str, Place], tensors: Tensors, known: Mapping[str, np.ndarray], rest: Sequence[str]
) -> list[str]:
    """Names that are missing, and shapes that differ."""
    wrong = []
    for ours, place in places.items():
        wanted = [x.shape for x in place.theirs(np.zeros(known[ours].shape, np.bool_))]
        for name, shape in zip(place.names, wanted, strict=True):
            if name not in tensors:
                wrong.append(f"{name}: missing, for our {ours}{_nearest(name, rest)}")
            elif np.shape(tensors[name]) != shape:
                wrong.append(f"{name}: {np.shape(tensors[name])}, and the model needs {shape}")
    return wrong


def _left_over(rest: Sequence[str], missing: Iterable[str]) -> list[str]:
    wanted = [*missing]
    return [f"{name}: the model has no place for it{_nearest(name, wanted)}" for name in rest]


def _nearest(name: str, others: Sequence[str]) -> str:
    alike = get_close_matches(name, others, n=1, cutoff=0.6)
    return f" (nearest: {alike[0]})" if alike else ""
