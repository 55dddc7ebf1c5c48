"""How data of span corruption cut text, so that tasks are cut in the same way for fine-tuning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True, eq=False)
class TextTokens:
    """The tokens of a pre-training.

    Attributes:
      encode: texts to int32 tokens, without special ones.
      decode: the text of a row of tokens, without special ones and sentinels, up to the first that ends it.
      start: what the decoder reads first.
      end: behind a text.
      sentinel: the first sentinel.
    """

    encode: Callable[[Sequence[str]], list[np.ndarray]]
    decode: Callable[[np.ndarray], str]
    start: int
    end: int
    sentinel: int


@runtime_checkable
class HidesSpans(Protocol):
    """Data of text of which spans are hidden, to be told."""

    def text_tokens(self) -> TextTokens | None:
        """The tokens; None if these data hide no spans."""
        ...
