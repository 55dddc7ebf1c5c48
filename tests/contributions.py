"""A second checker beside `verify`, as plain as can be: for each chip and piece, the set of chips summed in it."""

from multipod.collectives.schedule import ADD, COPY, Schedule

GARBAGE = -1


def check(schedule: Schedule, root: int | None = None) -> None:
    """Follows every contribution, one bit a chip; an AssertionError says what is wrong."""
    chips = schedule.topology.chips
    pieces = range(schedule.pieces)
    state = {(chip, piece): 1 << chip for chip in chips for piece in pieces}
    if schedule.collective == "all-gather":
        right = sum(1 << chip for chip in chips)
        mine = set(_owned(schedule))
        state = {cell: right if cell in mine else GARBAGE for cell in state}
    for number, step in enumerate(schedule.steps):
        written = {}
        for src, dst, first, stop, op in zip(*(column.tolist() for column in step), strict=True):
            assert src != dst, f"step {number}: chip {src} sends to itself"
            assert 0 <= first < stop <= schedule.pieces, f"step {number}: {src} sends pieces {first} to {stop - 1}"
            for piece in range(first, stop):
                cell, sent = (dst, piece), state[src, piece]
                assert cell not in written, f"step {number}: two writes to piece {piece} on chip {dst}"
                if op == ADD:
                    assert sent != GARBAGE, f"step {number}: garbage added"
                    assert not state[cell] & sent, f"step {number}: piece {piece} added twice on chip {dst}"
                    sent |= state[cell]
                else:
                    assert op == COPY, f"step {number}: op {op}"
                written[cell] = sent
        state.update(written)
    if schedule.collective == "broadcast":
        source = 1 << (chips[0] if root is None else root)
        expected = {(chip, piece): source for chip in chips for piece in pieces}
    else:
        sums = {chip: sum(1 << other for other in group) for group in schedule.groups for chip in group}
        cells = _owned(schedule) if schedule.collective == "reduce-scatter" else state
        expected = {cell: sums[cell[0]] for cell in cells}
    for cell, value in expected.items():
        assert state[cell] == value, f"at the end chip {cell[0]} has {state[cell]:b}, not {value:b}, in piece {cell[1]}"


def _owned(schedule: Schedule) -> list[tuple[int, int]]:
    """The cells of the part of each chip: from rank/p to (rank + 1)/p."""
    p = len(schedule.topology.chips)
    ends = [int(end) * p for end in schedule.bounds]
    return [
        (chip, piece)
        for rank, chip in enumerate(schedule.topology.chips)
        for piece in range(schedule.pieces)
        if ends[piece] < (rank + 1) * schedule.denominator and ends[piece + 1] > rank * schedule.denominator
    ]
