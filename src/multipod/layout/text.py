"""A layout as one line of text: `data=2x2,model=4,update`."""

import re
from collections.abc import Callable

from multipod.errors import LayoutError, nearest
from multipod.layout.layout import Layout

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def _sizes(field: str) -> Callable[[str], str]:
    return lambda text: f"{field}={text}"


def _flag(field: str) -> Callable[[str], str]:
    return lambda text: f"{field}={text or 'true'}"


def _bytes(text: str) -> str:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)i?b?", text.lower())
    if not found:
        raise LayoutError(f"--layout: buckets={text!r} is no number of bytes. Write 4MB, 500KB or 4000000.")
    return f"bucket_bytes={round(float(found[1]) * UNITS[found[2]])}"


WORDS: dict[str, Callable[[str], str]] = {
    "data": lambda text: f"mesh={'' if text == '-1' else text}",
    "spatial": _sizes("spatial"),
    "model": _sizes("model"),
    "expert": _sizes("expert"),
    "stage": _sizes("stage"),
    "schedule": _sizes("schedule"),
    "micro": _sizes("micro_batches"),
    "chunks": _sizes("chunks"),
    "cut": _sizes("cut"),
    "tile": _sizes("tile"),
    "sum": _sizes("gradient_sum"),
    "update": _flag("shard_update"),
    "weights": _flag("shard_weights"),
    "gather": _sizes("gather_dtype"),
    "wire": _sizes("sum_dtype"),
    "buckets": _bytes,
}
"""What may stand in the text: a word, and how its value becomes a change to a field of `Layout`."""


def layout_changes(text: str) -> list[str]:
    """The changes to a recipe, `layout.model=4` and so on, that `text` asks for.

    Raises:
      LayoutError: a word that means nothing here.
    """
    changes = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        word, _, value = part.partition("=")
        if word not in WORDS:
            raise LayoutError(f"--layout: no {word!r} in a layout. {nearest(word, WORDS)} As data=2x2,model=4,update.")
        changes.append("layout." + WORDS[word](value.strip()))
    return sorted(changes, key=_order)


def _order(change: str) -> int:
    """Fields change one after the other, and those that need others come last in a layout."""
    return list(Layout.__dataclass_fields__).index(change.removeprefix("layout.").partition("=")[0])


def spelled(layout: Layout) -> str:
    """The text of a layout; rules, failed tiles and what is as always are left out."""
    words = {
        "data": "x".join(map(str, layout.mesh)),
        "spatial": "x".join(map(str, layout.spatial)),
        **{axis: str(getattr(layout, axis)) for axis in ("model", "expert", "stage") if getattr(layout, axis) > 1},
        **_of_stages(layout),
        "sum": layout.gradient_sum if layout.gradient_sum != Layout.gradient_sum else "",
        "gather": layout.gather_dtype,
        "wire": layout.sum_dtype,
        "buckets": str(layout.bucket_bytes or ""),
    }
    flags = [word for word, on in (("update", layout.shard_update), ("weights", layout.shard_weights)) if on]
    return ",".join([*(f"{word}={value}" for word, value in words.items() if value), *flags])


def _of_stages(layout: Layout) -> dict[str, str]:
    """What a pipeline adds."""
    if layout.stage == 1:
        return {}
    chunks = str(layout.chunks) if layout.schedule == "interleaved" else ""
    cut = "x".join(map(str, layout.cut))
    return {"schedule": layout.schedule, "micro": str(layout.micro_batches or ""), "chunks": chunks, "cut": cut}
