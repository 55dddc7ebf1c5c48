"""The message `tf.train.Example`, in which TFRecord and ArrayRecord files keep named fields: to bytes and back.

Wire format: https://protobuf.dev/programming-guides/encoding. The message is `Example{1: Features{1: map<string,
Feature>}}`, and a `Feature` holds one of `{1: BytesList, 2: FloatList, 3: Int64List}`, each with its values in field 1.
Nothing else of protocol buffers is needed here, so nothing else is read.
"""

import struct
from collections.abc import Iterator

import numpy as np

from multipod.data.files.disk import Damaged
from multipod.data.files.records import Record

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def decode(message: bytes) -> Record:
    """The fields of an Example. One value stands alone; several, or none, become a list of bytes or an array.

    Raises:
      Damaged: it is no Example.
    """
    record: Record = {}
    try:
        for features in _fields(memoryview(message), 1):
            for entry in _fields(features, 1):
                name = b"".join(_fields(entry, 1)).decode()
                for feature in _fields(entry, 2):
                    record[name] = _values(feature)
    except (ValueError, IndexError, struct.error) as error:
        raise Damaged(f"it is no tf.train.Example ({error})") from error
    if not record:
        raise Damaged("it is a tf.train.Example without fields, or none at all")
    return record


def encode(record: Record) -> bytes:
    """An Example of these fields: bytes and texts, whole numbers, other numbers, or arrays of one of these."""
    entries = b"".join(
        _field(1, _field(1, name.encode()) + _field(2, _feature(value))) for name, value in sorted(record.items())
    )
    return _field(1, entries)


def _fields(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """The contents of all length-delimited fields with this number."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        kind = tag & 7
        if kind == _BYTES:
            size, place = _varint(message, place)
            if place + size > len(message):
                raise ValueError(f"a field of {size} bytes where {len(message) - place} are left")
            if tag >> 3 == wanted:
                yield message[place : place + size]
            place += size
        elif kind == _VARINT:
            _, place = _varint(message, place)
        elif kind in (_FIXED32, _FIXED64):
            place += 4 if kind == _FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind}")


def _varint(message: memoryview, place: int) -> tuple[int, int]:
    value = shift = 0
    while shift < 70:
        byte = message[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
        shift += 7
    raise ValueError("a number of more than ten bytes")


def _values(feature: memoryview) -> bytes | int | float | list[bytes] | np.ndarray:
    for content in _fields(feature, 1):
        several = [bytes(value) for value in _fields(content, 1)]
        return several[0] if len(several) == 1 else several
    for content in _fields(feature, 2):
        floats = np.frombuffer(b"".join(_numbers(content, 4)), "<f4")
        return float(floats[0]) if len(floats) == 1 else floats
    for content in _fields(feature, 3):
        packed = memoryview(b"".join(_numbers(content, 0)))
        whole, place = [], 0
        while place < len(packed):
            value, place = _varint(packed, place)
            whole.append(value - 2**64 if value >= 2**63 else value)
        return whole[0] if len(whole) == 1 else np.array(whole, np.int64)
    return []


def _numbers(content: memoryview, width: int) -> Iterator[memoryview]:
    """The bytes of packed numbers, or of such as are written one by one; `width` 0: varints."""
    place = 0
    while place < len(content):
        tag, place = _varint(content, place)
        if tag & 7 == _BYTES:
            size, place = _varint(content, place)
        elif width:
            size = width
        else:
            size = _varint(content, place)[1] - place
        yield content[place : place + size]
        place += size


def _feature(value: object) -> bytes:
    several = list(value) if isinstance(value, list | tuple) else [value]
    texts = [one.encode() if isinstance(one, str) else one for one in several if isinstance(one, bytes | str)]
    if len(texts) == len(several):
        return _field(1, b"".join(_field(1, text) for text in texts))
    array = np.asarray(value).ravel()
    if array.dtype.kind in "iub":
        return _field(3, _field(1, b"".join(_as_varint(int(one) & (2**64 - 1)) for one in array)))
    return _field(2, _field(1, array.astype("<f4").tobytes()))


def _field(number: int, content: bytes) -> bytes:
    return _as_varint(number << 3 | _BYTES) + _as_varint(len(content)) + content


def _as_varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
