"""Lines of Criteo's click logs, parsed many at a time.

A line is a label (0 or 1), 13 integers and 26 hexadecimal numbers of up to 8 digits, between tabs. An empty number is
0. Anything else is a malformed line, and its reason is told.
"""

from dataclasses import dataclass

import numpy as np

DENSE, FIELDS = 13, 26
COLUMNS = 1 + DENSE + FIELDS
REASONS = (
    "",
    "not 40 columns",
    "label not 0 or 1",
    "a count that is no 32-bit integer",
    "a field that is not 8 hex digits",
)
"""Why a line is malformed, by code; code 0 is a good line."""

_LONGEST_COUNT = 11  # -2147483648
_HEX = np.full(256, 255, np.uint8)
_HEX[list(b"0123456789")] = range(10)
_HEX[list(b"abcdef")] = _HEX[list(b"ABCDEF")] = range(10, 16)


@dataclass(frozen=True)
class Lines:
    """Parsed lines, in order.

    Attributes:
      labels: int32 [good lines].
      counts: int32 [good lines, 13].
      fields: uint32 [good lines, 26].
      codes: uint8 [lines], an index into `REASONS`.
    """

    labels: np.ndarray
    counts: np.ndarray
    fields: np.ndarray
    codes: np.ndarray

    def __len__(self) -> int:
        return len(self.codes)


def parse(text: bytes) -> Lines:
    """The lines of `text`, which ends with a line's end. About a microsecond and ten times the text's size a line.

    A carriage return before the line's end is not part of the line; empty lines are malformed.
    """
    raw = np.frombuffer(text, np.uint8)
    ends = np.flatnonzero(raw == ord("\n"))
    starts = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)[: len(ends)]
    stops = ends - ((ends > starts) & (raw[np.maximum(ends - 1, 0)] == ord("\r")))
    tabs = np.flatnonzero(raw == ord("\t"))
    first, last = np.searchsorted(tabs, starts), np.searchsorted(tabs, ends)
    codes = (last - first != COLUMNS - 1).astype(np.uint8)
    whole = np.flatnonzero(codes == 0)
    inner = tabs[first[whole, None] + np.arange(COLUMNS - 1)] if len(whole) else np.zeros((0, COLUMNS - 1), np.int64)
    begin = np.concatenate([starts[whole, None], inner + 1], 1)
    end = np.concatenate([inner, stops[whole, None]], 1)
    labels, label_good = _labels(raw, begin[:, 0], end[:, 0])
    counts, counts_good = _integers(raw, begin[:, 1 : 1 + DENSE], end[:, 1 : 1 + DENSE])
    fields, fields_good = _hexadecimal(raw, begin[:, 1 + DENSE :], end[:, 1 + DENSE :])
    codes[whole] = np.select([~label_good, ~counts_good.all(1), ~fields_good.all(1)], [2, 3, 4], 0)
    good = codes[whole] == 0
    return Lines(labels[good], counts[good], fields[good], codes)


def _at(raw: np.ndarray, places: np.ndarray) -> np.ndarray:
    return raw[np.minimum(places, len(raw) - 1)]


def _labels(raw: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    digit = _at(raw, begin).astype(np.int32) - ord("0")
    return digit, (end - begin == 1) & (digit >= 0) & (digit <= 1)


def _integers(raw: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    negative = (end > begin) & (_at(raw, begin) == ord("-"))
    begin = begin + negative
    good = (end - begin <= _LONGEST_COUNT) & ~(negative & (end == begin))
    value = np.zeros(begin.shape, np.int64)
    for k in range(min(int((end - begin).max(initial=0)), _LONGEST_COUNT)):
        here = begin + k < end
        digit = _at(raw, begin + k).astype(np.int64) - ord("0")
        good &= ~here | ((digit >= 0) & (digit <= 9))
        value = np.where(here, value * 10 + digit, value)
    value = np.where(negative, -value, value)
    good &= (value >= -(2**31)) & (value < 2**31)
    return np.where(good, value, 0).astype(np.int32), good


def _hexadecimal(raw: np.ndarray, begin: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    good = end - begin <= 8
    value = np.zeros(begin.shape, np.uint32)
    for k in range(min(int((end - begin).max(initial=0)), 8)):
        here = begin + k < end
        digit = _HEX[_at(raw, begin + k)]
        good &= ~here | (digit < 16)
        value = np.where(here, (value << np.uint32(4)) | (digit & 15), value)
    return value, good
