"""Sequences of many lengths, side by side in rows of one length.

Packed rows say by `segment` which sequence a token belongs to (1, 2, ... in each row, 0: padding) and by `position`
where it stands in it. Attention by segments (`multipod.nn.text.segments.Segments`) then computes for every
sequence what it would compute for it alone.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from multipod.data.source import HostBatch
from multipod.errors import RecipeError

Sequences = Sequence[np.ndarray]


def first_fit_decreasing(sizes: np.ndarray, room: Sequence[int]) -> list[list[int]]:
    """Which sequences share a row: for each row their numbers, in the order in which they were put there.

    `sizes` is [sequences, kinds] and `room` [kinds]: a row holds so many tokens of each kind (source and target, say).
    The longest go first, measured by the kind that fills most of a row, each to the first row with room for it;
    among equals the lower number goes first, so the result depends on nothing else. With one kind it takes at most
    11/9 of the fewest rows possible, plus 6/9 (Dosa, 2007, doi:10.1007/978-3-540-74450-4_1). Sequences without tokens
    take no room and still have a place. Time: sequences x rows, in NumPy.

    Raises:
      RecipeError: a sequence is longer than a row.
    """
    sizes, limits = np.asarray(sizes, np.int64), np.asarray(room, np.int64)
    long = np.flatnonzero((sizes > limits).any(1))
    if len(long):
        worst = int(long[(sizes[long] / limits).max(1).argmax()])
        raise RecipeError(
            f"packing: {len(long)} of {len(sizes)} sequences do not fit a row of {_spell(limits)} tokens; sequence "
            f"{worst} has {_spell(sizes[worst])}. Cut or drop them, or take longer rows."
        )
    rows: list[list[int]] = []
    free = np.empty((max(len(sizes), 1), len(limits)), np.int64)
    for number in np.argsort(-(sizes / limits).max(1, initial=0), kind="stable"):
        fits = (free[: len(rows)] >= sizes[number]).all(1)
        row = int(fits.argmax()) if fits.any() else len(rows)
        if row == len(rows):
            rows.append([])
            free[row] = limits
        rows[row].append(int(number))
        free[row] -= sizes[number]
    return rows


def pack_rows(sequences: Mapping[str, Sequences], lengths: Mapping[str, int]) -> HostBatch:
    """Rows of `sequences`, one list of token arrays for each name, of `lengths` tokens each.

    Sequence i of every name belongs together: they share a row and their segment's number. For a name `source` the
    result has `source`, `source_segment` and `source_position`, int32 [rows, lengths["source"]]; for the name "token",
    `token`, `segment` and `position`. Tokens that fill a row, their segments and positions are 0.

    Raises:
      RecipeError: lists of different lengths, or a sequence that is longer than a row.
    """
    counts = {name: len(several) for name, several in sequences.items()}
    if len(set(counts.values())) != 1:
        found = ", ".join(f"{count} of {name}" for name, count in counts.items())
        raise RecipeError(f"packing: {found or 'no sequences'}. Give as many sequences of each name; they go in pairs.")
    sizes = np.array([[len(one) for one in several] for several in sequences.values()], np.int64).T
    rows = first_fit_decreasing(sizes.reshape(-1, len(sequences)), [lengths[name] for name in sequences])
    result: HostBatch = {}
    for name, several in sequences.items():
        prefix = "" if name == "token" else f"{name}_"
        arrays = np.zeros((3, len(rows), lengths[name]), np.int32)
        for row, numbers in enumerate(rows):
            place = 0
            for segment, number in enumerate(numbers, 1):
                end = place + len(several[number])
                arrays[0, row, place:end] = several[number]
                arrays[1, row, place:end] = segment
                arrays[2, row, place:end] = np.arange(end - place)
                place = end
        result |= {name: arrays[0], f"{prefix}segment": arrays[1], f"{prefix}position": arrays[2]}
    return result


def shift_right(tokens: np.ndarray, segment: np.ndarray, position: np.ndarray, start: int) -> np.ndarray:
    """What a decoder reads to tell `tokens`: each sequence one place to the right, behind the token `start`.

    All are [rows, length], as `pack_rows` gives them. The last token of a sequence is only told, never read.
    """
    before = np.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
    return np.where(segment == 0, 0, np.where(position == 0, start, before)).astype(tokens.dtype)


def _spell(sizes: np.ndarray) -> str:
    return " + ".join(map(str, sizes))
