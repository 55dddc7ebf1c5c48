"""Schedules as text: the JSON form `multipod-schedule-1`, which docs/schedule-format.md describes."""

import json
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

import msgspec
import numpy as np

from multipod.collectives.checks import tile_peers
from multipod.collectives.files import save
from multipod.collectives.schedule import COLLECTIVES, OPS, Schedule, Step, Steps, make_step
from multipod.errors import ScheduleError, TopologyError, nearest
from multipod.topology.machines import from_data, to_data
from multipod.topology.topology import Topology

FORMAT = "multipod-schedule-1"
MOST = 2**31 - 1
"""The largest number of a chip or of a piece."""
HEAD_BYTES = 1 << 16

Number = Annotated[int, msgspec.Meta(ge=0, le=MOST)]
Position = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Text = Annotated[str, msgspec.Meta(max_length=10_000)]
Sent = tuple[Number, Number, Number, Literal["add", "copy", "adasum"]]

NEEDED: dict[str, Any] = {
    "format": str,
    "collective": str,
    "algorithm": Text,
    "topology": msgspec.Raw,
    "denominator": Position,
    "pieces": list[tuple[Position, Position]],
    "steps": list[msgspec.Raw],
}
OPTIONAL: dict[str, Any] = {"tile": list[Number], "notes": list[Text]}

_OP = {name: op for op, name in enumerate(OPS)}
_SENDS = msgspec.json.Decoder(list[Sent])
_NOTHING = make_step([], [], [])
T = TypeVar("T")


def write(schedule: Schedule, file: str | Path) -> None:
    """Writes a schedule as JSON, step by step, one entry for each piece sent; some 20 bytes each.

    A file of that name is replaced when the new one is whole, and stays as it is if anything fails before.

    Raises:
      OSError: it cannot be written.
    """
    save(file, _lines(schedule))


def read(file: str | Path | BinaryIO) -> Schedule:
    """The schedule in a file. It is well-formed, but not proven: `verify` does that.

    Entries that follow each other in a step, with the same ends and op and with consecutive pieces, become one message.
    Takes twice the file's size in memory, ten times if most of it is a single step.

    Raises:
      ScheduleError: there is no such file, or it holds no schedule; says what is wrong and where.
    """
    name = str(file) if isinstance(file, str | Path) else str(getattr(file, "name", "schedule"))
    try:
        return parse(_content(file), name)
    except ScheduleError:
        raise
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ScheduleError(f"{name}: cannot be read: {why}. Give the file of a schedule.") from error
    except MemoryError as error:
        raise ScheduleError(f"{name}: takes more memory than there is. Read it on a larger machine.") from error


def parse(data: bytes, name: str = "schedule") -> Schedule:
    """The schedule in the bytes of a file; `name` is what to call it in messages.

    Raises:
      ScheduleError: they hold no schedule.
    """
    fields = _fields(data, name)
    if fields["format"] != FORMAT:
        raise ScheduleError(f"{name}: its format is {fields['format'][:50]!r}, not {FORMAT!r}. Convert it first.")
    if fields["collective"] not in COLLECTIVES:
        raise ScheduleError(
            f'{name}: "collective" is {fields["collective"][:50]!r}. {nearest(fields["collective"][:50], COLLECTIVES)}'
        )
    for text in (fields["algorithm"], *fields["notes"]):
        if not text.isprintable():  # it will be shown on terminals
            raise ScheduleError(f"{name}: the text {text[:50]!r} has characters that cannot be printed. Take them out.")
    topology = _topology(fields["topology"], name)
    bounds = _bounds(fields["pieces"], fields["denominator"], name)
    tile = tuple(fields["tile"])
    tile_peers(name, topology, fields["collective"], tile)
    return Schedule(
        collective=fields["collective"],
        algorithm=fields["algorithm"],
        topology=topology,
        denominator=fields["denominator"],
        bounds=bounds,
        steps=_steps(fields["steps"], name, topology, len(bounds) - 1),
        tile=tile,
        notes=tuple(fields["notes"]),
    )


def _content(file: str | Path | BinaryIO) -> bytes:
    """All of a file; of one that is no JSON object from the first character on, which may be endless, the beginning."""
    if isinstance(file, str | Path):
        with Path(file).open("rb") as opened:
            return _content(opened)
    start = file.read(HEAD_BYTES)
    return start if start.lstrip()[:1] not in (b"", b"{") else start + file.read()


def _lines(schedule: Schedule) -> Iterator[bytes]:
    bounds = schedule.bounds.tolist()
    head: dict[str, Any] = {
        "format": FORMAT,
        "collective": schedule.collective,
        "algorithm": schedule.algorithm,
        "topology": to_data(schedule.topology),
        "denominator": schedule.denominator,
    }
    if schedule.tile:
        head["tile"] = list(schedule.tile)
    if schedule.notes:
        head["notes"] = list(schedule.notes)
    head["pieces"] = list(pairwise(bounds))
    encode = msgspec.json.Encoder().encode
    yield b"{"
    for key, value in head.items():
        yield encode(key) + b": " + encode(value) + b",\n"
    yield b'"steps": ['
    for number, step in enumerate(schedule.steps):
        yield (b",\n" if number else b"\n") + encode(_entries(step))
    yield b"]}\n"


def _entries(step: Step) -> list[tuple[int, int, int, str]]:
    count = step.stop - step.first
    row = np.repeat(np.arange(len(count)), count)
    piece = np.arange(len(row)) + np.repeat(step.first - (np.cumsum(count) - count), count)
    op = [OPS[code] for code in step.op[row].tolist()]
    return list(zip(step.src[row].tolist(), step.dst[row].tolist(), piece.tolist(), op, strict=True))


def _fields(data: bytes, name: str) -> dict[str, Any]:
    """The decoded fields of the file; those that are not JSON all the way down yet are `msgspec.Raw`."""
    if not data or data.isspace():
        raise ScheduleError(f"{name}: is empty. Give the file of a schedule.")
    raw = _decode(data, dict[str, msgspec.Raw], name, "it")
    known = [*NEEDED, *OPTIONAL]
    for key in raw:
        if key not in known:
            raise ScheduleError(f"{name}: there is no field {key[:50]!r}. {nearest(key[:50], known)}")
    missing = [key for key in NEEDED if key not in raw]
    if missing:
        raise ScheduleError(f"{name}: lacks {', '.join(missing)}. Add what docs/schedule-format.md says of it.")
    _check_no_doubles(data, raw, name)
    fields: dict[str, Any] = {key: [] for key in OPTIONAL}
    return fields | {
        key: value if kind is msgspec.Raw else _decode(value, kind, name, f'"{key}"')
        for key, kind in (NEEDED | OPTIONAL).items()
        if (value := raw.get(key)) is not None
    }


def _check_no_doubles(data: bytes, raw: dict[str, msgspec.Raw], name: str) -> None:
    """Refuses a key that is there twice: the decoder takes the last, and other readers may take the first."""
    begin = np.frombuffer(data, np.uint8).ctypes.data
    spans = []
    for value in raw.values():  # each lies in `data` itself
        view = np.frombuffer(value, np.uint8)
        spans.append((view.ctypes.data - begin, len(view)))
    rest, at = [], 0
    for start, length in sorted(spans):
        rest.append(data[at:start])
        at = start + length
    _load_once(b"0".join([*rest, data[at:]]), name, "it")


def _load_once(data: bytes, name: str, where: str) -> Any:
    def once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise ScheduleError(f"{name}: {where} has the field {key[:50]!r} twice. Leave one.")
        return fields

    try:
        return json.loads(data, object_pairs_hook=once)
    except ScheduleError:
        raise
    except (ValueError, RecursionError) as error:
        raise _not_json(error, name, where) from error


def _decode(data: bytes | msgspec.Raw, kind: type[T], name: str, where: str) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_json(error, name, where) from error


def _not_json(error: Exception, name: str, where: str) -> ScheduleError:
    why = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)[:200]
    return ScheduleError(f"{name}: {where} is not as docs/schedule-format.md says: {why}. Mend the file.")


def _topology(raw: msgspec.Raw, name: str) -> Topology:
    try:
        return from_data(_load_once(bytes(raw), name, '"topology"'))
    except TopologyError as error:
        raise ScheduleError(f"{name}: {error}") from error


def _bounds(pieces: Sequence[tuple[int, int]], denominator: int, name: str) -> np.ndarray:
    if not denominator:
        raise ScheduleError(f'{name}: "denominator" is 0. Give a positive one.')
    if not 0 < len(pieces) <= MOST:
        raise ScheduleError(f"{name}: there are {len(pieces)} pieces. Give 1 to {MOST}.")
    ends = np.array(pieces, np.int64)
    bounds = np.append(ends[:, 0], ends[-1, 1])
    whole = bounds[0] == 0 and bounds[-1] == denominator and (ends[1:, 0] == ends[:-1, 1]).all()
    if not whole or (ends[:, 0] > ends[:, 1]).any():
        raise ScheduleError(
            f"{name}: the pieces do not cover the vector from 0 to {denominator} in order, once. "
            "Let each begin where the one before it ends."
        )
    return bounds


def _steps(raws: Sequence[msgspec.Raw], name: str, topology: Topology, pieces: int) -> Steps:
    """The steps, kept as five long columns: an array each for every column of every step would be mostly overhead."""
    whole = [array("i") for _ in Step._fields]
    ends = [0]
    for number, raw in enumerate(raws):
        for column, values in zip(whole, _step(raw, f"{name}: step {number}", topology, pieces), strict=True):
            column.frombytes(values.tobytes())
        ends.append(len(whole[0]))
    columns = [np.frombuffer(column, np.int32) if column else np.zeros(0, np.int32) for column in whole]
    return Steps(len(raws), lambda k: Step(*(column[ends[k] : ends[k + 1]] for column in columns)))


def _step(raw: msgspec.Raw, where: str, topology: Topology, pieces: int) -> Step:
    try:
        entries = _SENDS.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise _not_json(error, where, "it") from error
    if not entries:
        return _NOTHING
    source, target, number, name = zip(*entries, strict=True)
    src, dst, piece = (np.array(column, np.int32) for column in (source, target, number))
    op = np.fromiter(map(_OP.__getitem__, name), np.int32, len(name))
    for column in (src, dst):
        if (column >= topology.size).any():
            k = int(np.argmax(column >= topology.size))
            raise ScheduleError(
                f"{where}: entry {k} names chip {column[k]}; {topology} has 0 to {topology.size - 1}. Mend it."
            )
    if (piece >= pieces).any():
        k = int(np.argmax(piece >= pieces))
        raise ScheduleError(f"{where}: entry {k} sends piece {piece[k]}; there are 0 to {pieces - 1}. Mend it.")
    goes_on = (src[1:] == src[:-1]) & (dst[1:] == dst[:-1]) & (op[1:] == op[:-1]) & (piece[1:] == piece[:-1] + 1)
    begin = np.flatnonzero(np.append(True, ~goes_on))
    end = np.append(begin[1:], len(piece)) - 1
    return Step(src[begin], dst[begin], piece[begin], piece[end] + 1, op[begin])
