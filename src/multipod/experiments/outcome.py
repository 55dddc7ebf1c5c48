"""The `Outcome` of an experiment, as plain data: claims that hold or do not, tables and plots."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Claim:
    """A sentence that an experiment tried, and what came out.

    Attributes:
      claim: the sentence, with its units.
      source: who says so: `arXiv:2011.03641`.
      measured: a number, or a few words where no number says it.
      threshold: what `measured` was held against.
      holds: whether the claim held.
      fails_if: what would make it fail, in one line. A claim that nothing could make fail says nothing.
      seeds: the seeds it was tried with.
      spread: of `measured` over the seeds, in its units: largest minus smallest.

    Raises:
      ValueError: `fails_if` is empty.
    """

    claim: str
    source: str
    measured: float | str
    threshold: float | str
    holds: bool
    seeds: tuple[int, ...] = ()
    spread: float | None = None
    fails_if: str = field(kw_only=True)

    def __post_init__(self) -> None:
        if not self.fails_if.strip():
            raise ValueError(f"claim {self.claim!r}: fails_if is empty. Say in one line what would make it fail.")
        # JSON has no NaN, and `bool(numpy.bool_)` is what JSON takes.
        object.__setattr__(self, "holds", bool(self.holds))
        for name in ("measured", "threshold", "spread"):
            object.__setattr__(self, name, _plain(getattr(self, name)))
        object.__setattr__(self, "seeds", tuple(map(int, self.seeds)))


@dataclass(frozen=True)
class Section:
    """A part of the page: a heading, text, a table, and the name of a figure of the outcome.

    Attributes:
      heading: one line.
      text: Markdown; what was done, and what was tried where a claim does not hold.
      head: the table's columns; empty if there is none.
      rows: its rows, as text.
      figure: a name in `Outcome.figures`; empty if there is none.
    """

    heading: str
    text: str = ""
    head: tuple[str, ...] = ()
    rows: Sequence[Sequence[str]] = ()
    figure: str = ""


@dataclass(frozen=True)
class Outcome:
    """What an experiment returns.

    Attributes:
      title: of the page.
      claims: in the order of the page.
      sections: the page below the table of claims.
      figures: Matplotlib figures by name; `loss` of the experiment `adasum` becomes `adasum_loss.svg`.
      data: further entries of the JSON file, beside the claims.
    """

    title: str
    claims: tuple[Claim, ...]
    sections: tuple[Section, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    number = float(value)
    return number if math.isfinite(number) else str(number)
