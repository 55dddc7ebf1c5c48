"""All families of weights, and which of them a model and a state dict are of."""

from collections.abc import Iterable

from multipod.errors import WeightsError, nearest
from multipod.interop.weights import bert, dlrm, efficientnet, marian, resnet, t5
from multipod.interop.weights.places import Family

FAMILIES: tuple[Family, ...] = (
    *resnet.TORCHVISION,
    *resnet.TIMM,
    *efficientnet.TORCHVISION,
    *efficientnet.TIMM,
    *bert.TRANSFORMERS,
    *t5.TRANSFORMERS,
    *marian.TRANSFORMERS,
    *dlrm.FACEBOOK,
)
"""Every family. Of those of one model the first is taken where names do not tell."""


def family_of(model: object, *, library: str = "", names: Iterable[str] = ()) -> Family:
    """The family of a model: of this library, or else the one whose tables have most of `names`.

    Raises:
      WeightsError: no library, or not this one, has such a model.
    """
    kind = type(model).__name__
    known = [family for family in FAMILIES if isinstance(model, family.models)]
    if not known:
        models = sorted({one.__name__ for family in FAMILIES for one in family.models})
        raise WeightsError(
            f"no table of names says what another library calls the tensors of a {kind}. There are tables for "
            f"{', '.join(models)} (docs/weights.md says how to write one)."
        )
    chosen = [family for family in known if library in ("", family.library)]
    if not chosen:
        raise WeightsError(f"{library} has no {kind}. {nearest(library, [family.library for family in known])}")
    given = {*names}
    return max(chosen, key=lambda family: _named(family, model, given)) if len(chosen) > 1 else chosen[0]


def _named(family: Family, model: object, names: set[str]) -> int:
    return sum(name in names for place in family.places(model).values() for name in place.names)
