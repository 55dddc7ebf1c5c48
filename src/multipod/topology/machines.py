"""Machines by name: the catalogue, the words of the command line, and the JSON form of a topology."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from typing import Any

from multipod.errors import TopologyError, nearest
from multipod.topology.chips import CHIPS, Chip
from multipod.topology.topology import ChipName, Number, Topology

MOST_CHIPS, MOST_DIMENSIONS = 2**20, 16
"""What text may ask for: a slip of the pen or a hostile file must not fill the memory."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CatalogueEntry:
    """An entry of the catalogue.

    Attributes:
      about: one line.
      source: where its shape and what its chips do not say are from, and what is an estimate.
      shape: its own, when no size is asked for.
      build: the machine of a shape; raises TopologyError for a shape that it does not come in.
      sizes: how a size is written after the name, as in `dgx-h100:4`; the same number of sizes as in `shape`,
        or the first alone if `first_only`.
      first_only: a size is the length of the first dimension.
    """

    about: str
    source: str
    shape: Shape
    build: Callable[[Shape], Topology]
    sizes: str
    first_only: bool = False


def _torus_slice(chip: str, closed: Callable[[Shape, int], bool]) -> Callable[[Shape], Topology]:
    """Slices of a pod; `closed(shape, dim)` says whether dimension `dim` of a slice has its wrap-around links."""

    def build(shape: Shape) -> Topology:
        return Topology(shape, tuple(closed(shape, dim) for dim in range(len(shape))), chip=CHIPS[chip])

    return build


def _if_full(length: int) -> Callable[[Shape, int], bool]:
    """Links that close a dimension run along the edges of the pod, so only its full length has them."""
    return lambda shape, dim: shape[dim] == length


def _if_cubes(shape: Shape, dim: int) -> bool:
    """Optical switches close every dimension of a slice made of whole cubes of 4x4x4."""
    return all(n % 4 == 0 for n in shape)


def _multipod(shape: Shape) -> Topology:
    if shape[0] != 32 or shape[1] % 32:
        raise TopologyError(
            f"a multipod of TPU v3 is 32 chips by a multiple of 32, not {_times(shape)}. Take tpu-v3-multipod:32x64, "
            "or a slice of tpu-v3-pod."
        )
    return Topology(shape, (True, False), chip=CHIPS["tpu-v3"])


def _dgx(chip: str, card_bytes_per_s: float) -> Callable[[Shape], Topology]:
    def build(shape: Shape) -> Topology:
        gpu = CHIPS[chip]
        speeds = card_bytes_per_s, gpu.link_bytes_per_s
        return Topology(shape, chip=gpu, switched=(True, True), latency_s=(5e-6, 1e-6), bytes_per_s=speeds)

    return build


def _host_ring(shape: Shape) -> Topology:
    return Topology(shape, (True,), latency_s=(10e-6,), bytes_per_s=(12.5e9,))


def _ddl(shape: Shape) -> Topology:
    return Topology(
        shape,
        latency_s=(1e-6, 5e-6, 1e-6),
        bytes_per_s=(50e9, 12.5e9, 40e9),
        switched=(True, True, True),
        shared=(True, True, False),
    )


_V3 = "arXiv:2011.03641 and cloud.google.com/tpu/docs/v3"
_SLICE = "a slice shorter than the pod is open in that dimension (jax-ml.github.io/scaling-book)"
_CUBES = "slices of whole 4x4x4 cubes are closed in all dimensions, others open (jax-ml.github.io/scaling-book)"
_SUPERPOD = "the latency of 5 us through the InfiniBand switches is an estimate from NCCL's tuning constants"

MACHINES = {
    "tpu-v2-pod": CatalogueEntry(
        "256 TPU v2 chips, torus of 16x16",
        f"Jouppi et al., 2020, doi:10.1145/3360307; {_SLICE}",
        (16, 16),
        _torus_slice("tpu-v2", _if_full(16)),
        "ROWSxCOLUMNS",
    ),
    "tpu-v3-pod": CatalogueEntry(
        "1,024 TPU v3 chips, torus of 32x32",
        f"{_V3}; {_SLICE}",
        (32, 32),
        _torus_slice("tpu-v3", _if_full(32)),
        "ROWSxCOLUMNS",
    ),
    "tpu-v3-multipod": CatalogueEntry(
        "4,096 TPU v3 chips, four pods edge to edge: 32 rows closed into rings, 128 columns open",
        f"{_V3}; the longer links between pods count as all others, their latency is not published",
        (32, 128),
        _multipod,
        "32xCOLUMNS",
    ),
    "tpu-v4-cube": CatalogueEntry(
        "64 TPU v4 chips, one cube of 4x4x4, closed by the optical switches",
        f"arXiv:2304.01433; {_CUBES}",
        (4, 4, 4),
        _torus_slice("tpu-v4", _if_cubes),
        "AxBxC",
    ),
    "tpu-v4-pod": CatalogueEntry(
        "4,096 TPU v4 chips, torus of 16x16x16",
        f"arXiv:2304.01433; {_CUBES}",
        (16, 16, 16),
        _torus_slice("tpu-v4", _if_cubes),
        "AxBxC",
    ),
    "tpu-v5e-pod": CatalogueEntry(
        "256 TPU v5e chips, torus of 16x16",
        f"cloud.google.com/tpu/docs/v5e; {_SLICE}",
        (16, 16),
        _torus_slice("tpu-v5e", _if_full(16)),
        "ROWSxCOLUMNS",
    ),
    "tpu-v5p-pod": CatalogueEntry(
        "8,960 TPU v5p chips, torus of 16x20x28",
        f"cloud.google.com/tpu/docs/v5p; {_CUBES}",
        (16, 20, 28),
        _torus_slice("tpu-v5p", _if_cubes),
        "AxBxC",
    ),
    "tpu-v6e-pod": CatalogueEntry(
        "256 TPU v6e (Trillium) chips, torus of 16x16",
        f"cloud.google.com/tpu/docs/v6e; {_SLICE}",
        (16, 16),
        _torus_slice("tpu-v6e", _if_full(16)),
        "ROWSxCOLUMNS",
    ),
    "dgx-a100": CatalogueEntry(
        "one DGX A100: 8 GPUs on NVSwitch; more boxes: each GPU also has a card of 200 Gbit/s",
        f"NVIDIA DGX A100 user guide; {_SUPERPOD}",
        (1, 8),
        _dgx("a100", 25e9),
        "BOXES",
        first_only=True,
    ),
    "dgx-h100": CatalogueEntry(
        "one DGX H100: 8 GPUs on NVSwitch; more boxes: each GPU also has a card of 400 Gbit/s",
        f"NVIDIA DGX H100 user guide; {_SUPERPOD}",
        (1, 8),
        _dgx("h100", 50e9),
        "BOXES",
        first_only=True,
    ),
    "dgx-h200": CatalogueEntry(
        "one DGX H200: 8 GPUs on NVSwitch; more boxes: each GPU also has a card of 400 Gbit/s",
        f"NVIDIA DGX H200 user guide; {_SUPERPOD}",
        (1, 8),
        _dgx("h200", 50e9),
        "BOXES",
        first_only=True,
    ),
    "host-ring": CatalogueEntry(
        "8 hosts in a ring of 100 Gbit/s links",
        "no machine of one maker: 12.5 GB/s is 100 Gbit/s, and 10 us a message an estimate",
        (8,),
        _host_ring,
        "HOSTS",
        first_only=True,
    ),
    "ddl-cluster": CatalogueEntry(
        "16 leaf switches of 4 hosts of 4 GPUs, which share the host's card and the leaf's uplink (PowerAI DDL)",
        "its tiers: Cho et al., 2017, arXiv:1708.02188; estimates: two NVLink bricks of 20 GB/s a GPU, one card of "
        "100 Gbit/s a host, uplinks as wide as the cards below them, and all latencies",
        (16, 4, 4),
        _ddl,
        "LEAVESxHOSTSxGPUS",
    ),
}
"""The machines that are known by name, whole."""

PLAIN = {"mesh": {}, "torus": {"wrap": True}, "switch": {"switched": True}}
"""The plain kinds, and what makes each: open lines, rings, or a switch for each line of chips."""


def parse(text: str, fail: Sequence[str] = (), fail_links: Sequence[str] = ()) -> Topology:
    """The machine that the words of a command line mean.

    Args:
      text: `mesh:8x8`, `torus:16x32`, `switch:4x8`, or a name in `MACHINES`, some with a size: `dgx-h100:4`.
      fail: blocks of failed chips: `2-3,2-5` is rows 2 to 3, columns 2 to 5, both included; `0,1` is one chip.
      fail_links: failed links by their two ends: `0,1-0,2` by coordinates, `1-2` by numbers.

    Raises:
      TopologyError: words that mean no machine.
    """
    whole = _whole(text.strip())
    return whole.without(
        chips=[chip for block in fail for chip in _block(whole, block)],
        links=[_link(whole, link) for link in fail_links],
    )


def _whole(text: str) -> Topology:
    name, colon, size = text.partition(":")
    if name in PLAIN:
        shape = _shape(text, size)
        return Topology(shape, **PLAIN[name])  # type: ignore[arg-type]
    if name not in MACHINES:
        raise TopologyError(
            f"no machine {text!r}. {nearest(name, [*MACHINES, *PLAIN])} Write mesh:8x8, torus:16x32, or a name of "
            "`multipod topology list`."
        )
    machine = MACHINES[name]
    if not colon:
        return replace(machine.build(machine.shape), name=name)
    shape = _shape(text, size)
    wanted = 1 if machine.first_only else len(machine.shape)
    if len(shape) != wanted:
        raise TopologyError(f"machine {text!r} is not of the form {name}:{machine.sizes}. Write all of its sizes.")
    return replace(machine.build((*shape, *machine.shape[wanted:])), name=text)


def _shape(text: str, size: str) -> Shape:
    """The sizes in `8x8`; `text` is what all of it was, for messages."""
    parts = size.split("x")
    if not all(re.fullmatch(r"[0-9]{1,9}", part) and int(part) for part in parts):
        raise TopologyError(f"machine {text!r} has no size. Write positive numbers, as mesh:8x8.")
    shape = tuple(int(part) for part in parts)
    _check_size(shape, f"machine {text!r}")
    return shape


def _check_size(shape: Shape, where: str) -> None:
    if len(shape) > MOST_DIMENSIONS or math.prod(shape) > MOST_CHIPS:
        raise TopologyError(
            f"{where} has {math.prod(shape):,} chips in {len(shape)} dimensions, and the most are {MOST_CHIPS:,} in "
            f"{MOST_DIMENSIONS}. Build a larger one in Python, with Topology(shape)."
        )


def _block(topology: Topology, text: str) -> Iterable[tuple[int, ...]]:
    """The coordinates of the chips in a block such as `2-3,2-5`."""
    spans = [re.fullmatch(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*", part) for part in text.split(",")]
    if len(spans) != len(topology.shape) or not all(spans):
        example = ",".join(["0-1", *["2"] * (len(topology.shape) - 1)])
        raise TopologyError(
            f"--fail {text!r} names no block of {topology}. Write one place or range for each of its "
            f"{len(topology.shape)} dimensions, as {example}."
        )
    places: list[tuple[int, ...]] = [()]
    for dim, (span, n) in enumerate(zip(spans, topology.shape, strict=True)):
        assert span is not None
        first, last = int(span[1]), int(span[2] or span[1])
        if not first <= last < n:
            raise TopologyError(
                f"--fail {text!r}: {span[0].strip()} is no range in dimension {dim} of {topology}, which goes from 0 "
                f"to {n - 1}. Give the smaller end first."
            )
        places = [(*place, c) for place in places for c in range(first, last + 1)]
    return places


def _link(topology: Topology, text: str) -> tuple[ChipName, ChipName]:
    """The two ends of a link such as `0,1-0,2` or `1-2`."""
    ends = text.split("-")
    if len(ends) != 2 or not all(re.fullmatch(r"\s*[0-9]{1,9}(\s*,\s*[0-9]{1,9})*\s*", end) for end in ends):
        example = [",".join(["0"] * (len(topology.shape) - 1) + [c]) for c in "01"]
        raise TopologyError(
            f"--fail-link {text!r} names no link. Write its two ends, as {'-'.join(example)}, or by number, as 0-1."
        )
    first, second = (tuple(int(c) for c in end.split(",")) if "," in end else topology.number(int(end)) for end in ends)
    return first, second


def to_data(topology: Topology) -> dict[str, Any]:
    """A topology as JSON can hold it: all its fields, fractions as text such as "1/3", so that nothing is rounded.

    A chip of the catalogue is its name, any other an object of its fields.
    """
    chip = topology.chip
    return {
        "shape": list(topology.shape),
        "wrap": list(topology.wrap),
        "failed_chips": sorted(topology.failed_chips),
        "failed_links": [list(link) for link in sorted(topology.failed_links)],
        "chip": chip.name if chip is not None and CHIPS.get(chip.name) == chip else chip and _chip_data(chip),
        "latency_s": [_number_data(number) for number in topology.latency_s],
        "bytes_per_s": [_number_data(number) for number in topology.bytes_per_s],
        "switched": list(topology.switched),
        "shared": list(topology.shared),
        "name": topology.name,
    }


def from_data(data: object) -> Topology:
    """The topology that `to_data` wrote. Only `shape` must be there; nothing in `data` is trusted.

    Raises:
      TopologyError: anything that is no topology, with the field and the reason.
    """
    if not isinstance(data, Mapping):
        raise TopologyError(f"topology: {_brief(data)} is no object of fields. Give at least {{'shape': [8, 8]}}.")
    known = [field.name for field in fields(Topology)]
    for name in data:
        if name not in known:
            raise TopologyError(f"topology has no field {name!r}. {nearest(str(name), known)}")
    if "shape" not in data:
        raise TopologyError('topology has no field "shape". Add it, as "shape": [8, 8].')
    shape = tuple(_each(data, "shape", int))
    if not shape or min(shape) < 1:
        raise TopologyError(f'topology: "shape" is {_brief(data["shape"])}. Give positive whole numbers.')
    _check_size(shape, "topology")
    links = _each(data, "failed_links", list)
    if not all(len(link) == 2 and all(_is(end, int) for end in link) for link in links):
        raise TopologyError('topology: "failed_links" is not made of pairs of chip numbers. Write [[0, 1], [5, 13]].')
    name = data.get("name", "")
    if not isinstance(name, str) or not name.isprintable() or len(name) > 200:
        raise TopologyError(f'topology: "name" is {_brief(name)}. Give a short text, or leave it out.')
    return Topology(
        shape,
        wrap=tuple(_each(data, "wrap", bool)),
        failed_chips=frozenset(_each(data, "failed_chips", int)),
        failed_links=frozenset((a, b) for a, b in links),
        chip=_chip(data.get("chip")),
        latency_s=tuple(_number(number, "latency_s") for number in _list(data, "latency_s")),
        bytes_per_s=tuple(_number(number, "bytes_per_s") for number in _list(data, "bytes_per_s")),
        switched=tuple(_each(data, "switched", bool)),
        shared=tuple(_each(data, "shared", bool)),
        name=name,
    )


def _is(value: object, kind: type) -> bool:
    """Whether JSON meant a `kind`; True and False are no whole numbers there."""
    return isinstance(value, kind) and (kind is bool or not isinstance(value, bool))


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    values = data.get(name, [])
    if not isinstance(values, list):
        raise TopologyError(f'topology: "{name}" is {_brief(values)}, not a list. Write it in brackets.')
    return values


def _each(data: Mapping[str, Any], name: str, kind: type) -> list[Any]:
    values = _list(data, name)
    for value in values:
        if not _is(value, kind):
            what = {int: "whole number", bool: "true or false", list: "pair in brackets"}[kind]
            raise TopologyError(f'topology: "{name}" holds {_brief(value)}, which is no {what}. Mend it.')
    return values


def _number_data(number: Number) -> int | float | str:
    return f"{number.numerator}/{number.denominator}" if isinstance(number, Fraction) else number


def _number(data: object, name: str) -> Number:
    if isinstance(data, str) and re.fullmatch(r"[0-9]{1,1000}/[0-9]{1,1000}", data):
        over, _, under = data.partition("/")
        if int(under):
            return Fraction(int(over), int(under))
    if _is(data, int) or _is(data, float):
        return data  # type: ignore[return-value]
    raise TopologyError(f'topology: "{name}" holds {_brief(data)}, which is no number. Write 1e-6, or "1/3" exactly.')


def _chip_data(chip: Chip) -> dict[str, Any]:
    return {field.name: getattr(chip, field.name) for field in fields(Chip)}


def _chip(data: object) -> Chip | None:
    if data is None:
        return None
    if isinstance(data, str):
        if data not in CHIPS:
            raise TopologyError(f"topology: no chip {_brief(data)}. {nearest(data[:50], CHIPS)}")
        return CHIPS[data]
    if not isinstance(data, Mapping) or set(data) != {field.name for field in fields(Chip)}:
        names = ", ".join(field.name for field in fields(Chip))
        raise TopologyError(f'topology: "chip" is {_brief(data)}. Give a name of the catalogue, or all of {names}.')
    speeds = data["flop_per_s"]
    numbers = [data[name] for name in ("memory_bytes", "memory_bytes_per_s", "link_latency_s", "link_bytes_per_s")]
    fits = (
        isinstance(speeds, Mapping)
        and all(isinstance(name, str) for name in (*speeds, data["name"], data["source"]))
        and all(_is(n, int) or _is(n, float) for n in (*speeds.values(), *numbers))
        and all(0 <= n < math.inf for n in (*speeds.values(), *numbers))
        and _is(data["links"], int)
        and data["links"] >= 0
    )
    if not fits:
        raise TopologyError(
            f'topology: "chip" {_brief(data)} does not describe one. Give texts for name and source, an object of '
            "numbers for flop_per_s, and numbers from 0 on for the others."
        )
    return Chip(**{**data, "flop_per_s": dict(speeds)})


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _times(shape: Shape) -> str:
    return "x".join(map(str, shape))
