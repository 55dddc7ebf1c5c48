"""Reads the text of an XLA program: its collectives, how often each runs, their links, and the FLOPs of its products.

XLA's own cost analysis counts the body of a loop once and says nothing of groups, so both are read here. The text is
no stable interface; what is not understood is left out and counted (`Text.unknown_loops`), never guessed.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from multipod.topology.topology import Topology

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]
KINDS: tuple[Kind, ...] = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4}
ITEM_BYTES |= {"s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "s4": 1, "u4": 1}

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Collective:
    """One collective of a compiled program.

    Attributes:
      kind: which; a fusion of an all-reduce that keeps one share is a reduce-scatter.
      nbytes: of the whole vector: what a device gives to an all-reduce, a reduce-scatter, an all-to-all or a
        permute, and what it gets of an all-gather.
      dtypes: of the arrays in the message.
      groups: devices, numbered as in the mesh, row-major, that work together; for a permute its (from, to) pairs.
      times: how often it runs in one call of the program.
    """

    kind: Kind
    nbytes: int
    dtypes: tuple[str, ...]
    groups: Groups
    times: int = 1

    @property
    def peers(self) -> int:
        """The devices of a group; 2 for a permute."""
        return len(self.groups[0]) if self.groups else 1

    def axes(self, sizes: Mapping[str, int]) -> tuple[str, ...] | None:
        """The mesh axes (name to size, row-major) that the collective runs over; None if its groups are no such.

        A permute runs over the axes along which any of its pairs differ.
        """
        shape = tuple(sizes.values())
        if self.kind == "collective-permute":
            ends = np.array(self.groups).reshape(-1, 2)
            places = np.array([np.unravel_index(side, shape) for side in ends.T])
            return tuple(n for n, differ in zip(sizes, (places[0] != places[1]).any(axis=1), strict=True) if differ)
        first = np.array(np.unravel_index(self.groups[0], shape))
        along = [k for k in range(len(shape)) if len(set(first[k])) > 1]
        names = tuple(sizes)
        grid = np.moveaxis(np.arange(math.prod(shape)).reshape(shape), along, range(-len(along), 0))
        wanted = {frozenset(row) for row in grid.reshape(-1, math.prod(shape[k] for k in along) or 1).tolist()}
        return tuple(names[k] for k in along) if wanted == {frozenset(group) for group in self.groups} else None


def sum_link_bytes(
    collectives: Iterable[Collective], topology: Topology, names: Sequence[str] = ()
) -> dict[tuple[Kind, str], int]:
    """Bytes that all devices send together in one call, by kind of collective and class of link.

    A permute's class is the dimensions that its message crosses and how many links that are, the shorter way round
    where a dimension is closed: "x, 1 hop". Ways around failed chips may be longer. Other collectives choose their
    links themselves: their class is the dimensions they run over ("" where groups are no such), and their bytes are
    what each device gives or, for an all-gather, gets.

    Args:
      collectives: of a program (`Text.collectives`).
      topology: device r of the program is its live chip of rank r.
      names: of its dimensions; their numbers if not given.
    """
    names = tuple(names) or tuple(map(str, range(len(topology.shape))))
    places = np.array([topology.coordinates(chip) for chip in topology.chips])
    around = [n if wrap else 2 * n for n, wrap in zip(topology.shape, topology.wrap, strict=True)]
    found: dict[tuple[Kind, str], int] = {}
    for one in collectives:
        if one.kind != "collective-permute":
            whole = not topology.failed_chips
            axes = one.axes(dict(zip(names, topology.shape, strict=True))) if whole else None
            key: tuple[Kind, str] = (one.kind, "+".join(axes or ()))
            found[key] = found.get(key, 0) + one.nbytes * one.times * one.peers * len(one.groups)
            continue
        src, dst = np.array(one.groups).T
        far = np.abs(places[src] - places[dst])
        links, counts = np.unique(np.minimum(far, np.array(around) - far), axis=0, return_counts=True)
        for hops, count in zip(links.tolist(), counts.tolist(), strict=True):
            dims = "+".join(name for name, n in zip(names, hops, strict=True) if n)
            key = one.kind, f"{dims}, {sum(hops)} hop{'' if sum(hops) == 1 else 's'}"
            found[key] = found.get(key, 0) + one.nbytes * one.times * count
    return found


@dataclass(frozen=True)
class Product:
    """Products of one size on a device, [rows, inner] x [inner, outer], batches and repetitions counted as more FLOPs.

    Of a convolution rows are the places and examples of its result, and few input channels count with their window.
    """

    rows: int
    inner: int
    outer: int
    flops: float


@dataclass(frozen=True)
class _Instruction:
    name: str
    result: str
    opcode: str
    rest: str


@dataclass(frozen=True)
class Text:
    """The text of a compiled program (`compiled.as_text()`), or of one that is lowered (`lowered.as_text("hlo")`)."""

    text: str

    @cached_property
    def devices(self) -> int:
        """For how many devices it is."""
        head = self.text.partition("\n")[0]
        sizes = [int(n) for n in re.findall(r"(?:replica_count|num_partitions)=(\d+)", head)]
        return math.prod(sizes) if sizes else 1

    @cached_property
    def computations(self) -> dict[str, list[_Instruction]]:
        """The instructions of each computation by its name; the entry's name is `ENTRY`."""
        found: dict[str, list[_Instruction]] = {}
        inside: list[_Instruction] | None = None
        for line in re.sub(r"/\*.*?\*/", "", self.text).splitlines():
            if head := re.match(r"(ENTRY )?%?([\w.\-]+) (?:\(.*)?\{\s*$", line):
                inside = found.setdefault("ENTRY" if head[1] else head[2], [])
            elif inside is not None and (row := _ROW.match(line)):
                inside.append(_Instruction(row[1], row[2], row[3], line[row.end() :]))
        return found

    @cached_property
    def times(self) -> dict[str, int]:
        """How often each computation runs in one call of the program; branches of a conditional count as if all ran."""
        counted: dict[str, int] = {}

        def visit(name: str, times: int) -> None:
            counted[name] = counted.get(name, 0) + times
            for row in self.computations.get(name, ()):
                inner = times * (self.trips(row) or 1) if row.opcode == "while" else times
                for callee in _callees(row):
                    visit(callee, inner)

        visit("ENTRY", 1)
        return counted

    @cached_property
    def unknown_loops(self) -> int:
        """Loops whose trip count cannot be read; they are counted as one trip."""
        rows = (row for name in self.times for row in self.computations.get(name, ()))
        return sum(row.opcode == "while" and self.trips(row) is None for row in rows)

    def trips(self, loop: _Instruction) -> int | None:
        """The trips of a `while`: as XLA notes it, or the constant its counter is compared with (from 0, by 1)."""
        if noted := re.search(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)', loop.rest):
            return int(noted[1])
        condition = re.search(r"condition=%?([\w.\-]+)", loop.rest)
        rows = self.computations.get(condition[1], []) if condition else []
        compares = [row for row in rows if row.opcode == "compare" and "direction=LT" in row.rest]
        limits = [row for row in rows if row.opcode == "constant" and re.match(r"s32\[\]|u32\[\]|s64\[\]", row.result)]
        if len(compares) != 1 or len(limits) != 1 or limits[0].name not in compares[0].rest:
            return None
        value = re.match(r"(\d+)\)", limits[0].rest)
        return int(value[1]) if value else None

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """Every collective that moves anything, in the order of the text."""
        found = []
        for name, times in self.times.items():
            for row in self.computations.get(name, ()):
                kind = row.opcode.removesuffix("-start")
                if kind in KINDS and not row.opcode.endswith("-done"):
                    found.append(self._collective(row, kind, name, times))
        return tuple(one for one in found if one.groups and (one.peers > 1))

    def _collective(self, row: _Instruction, kind: Kind, inside: str, times: int) -> Collective:
        if kind == "collective-permute":
            pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", row.rest)
            groups: Groups = tuple(
                (int(a), int(b)) for a, b in re.findall(r"\{(\d+),(\d+)", (pairs[1] + "}") if pairs else "")
            )
        else:
            groups = expand_groups(row.rest, self.devices)
        peers = len(groups[0]) if groups else 1
        arrays = [(dtype, dims) for dtype, dims in _ARRAY.findall(row.result) if dims or kind != "collective-permute"]
        size = sum(ITEM_BYTES.get(dtype, 4) * _elements(dims) for dtype, dims in arrays)
        if row.opcode == "all-gather-start":  # (operand, result)
            size = size * peers // (peers + 1)
        elif row.opcode == "collective-permute-start":
            size //= 2
        elif kind == "reduce-scatter":
            size *= peers
        if kind == "all-reduce" and "all-reduce-scatter" in inside:
            kind = "reduce-scatter"
        return Collective(kind, size, tuple(sorted({dtype for dtype, _ in arrays})), groups, times)

    @cached_property
    def products(self) -> tuple[Product, ...]:
        """All products and convolutions by their sizes on a device, with loops run through."""
        found: dict[tuple[int, int, int], float] = {}
        for name, times in self.times.items():
            shapes = {row.name: row.result for row in self.computations.get(name, ())}
            for row in self.computations.get(name, ()):
                if row.opcode in ("dot", "convolution") and (sizes := _product_sizes(row, shapes)) is not None:
                    found[sizes] = found.get(sizes, 0.0) + times * _product_flops(row, shapes)
        return tuple(Product(*sizes, flops) for sizes, flops in found.items())

    @cached_property
    def matmul_flops(self) -> tuple[float, float]:
        """FLOPs of all products and convolutions: with loops run through, and with each body counted once."""
        whole = once = 0.0
        for name, times in self.times.items():
            shapes = {row.name: row.result for row in self.computations.get(name, ())}
            for row in self.computations.get(name, ()):
                if row.opcode in ("dot", "convolution"):
                    flops = _product_flops(row, shapes)
                    whole, once = whole + times * flops, once + flops
        return whole, once


_ROW = re.compile(r"\s+(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def _callees(row: _Instruction) -> Iterator[str]:
    for match in re.finditer(
        r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)", row.rest
    ):
        yield match[1]
    if branches := re.search(r"branch_computations=\{(.*?)\}", row.rest):
        yield from (name.strip().lstrip("%") for name in branches[1].split(","))


def _elements(dims: str) -> int:
    return math.prod(int(n) for n in dims.split(",") if n)


def _product_flops(row: _Instruction, shapes: Mapping[str, str]) -> float:
    """2 x elements of the result x elements that are summed for each; the edges of a window count as if inside."""
    result = _ARRAY.search(row.result)
    operands = [shapes.get(name, "") for name in re.findall(r"%([\w.\-]+)", row.rest.partition(")")[0])]
    if result is None or len(operands) != 2 or not (second := _ARRAY.search(operands[1])):
        return 0.0
    sizes = [int(n) for n in second[2].split(",") if n]
    if row.opcode == "dot":
        contracted = re.search(r"rhs_contracting_dims=\{([\d,]*)\}", row.rest)
        summed = math.prod(sizes[int(k)] for k in contracted[1].split(",") if k) if contracted else 1
    else:
        labels = re.search(r"dim_labels=\w+_(\w+)->", row.rest)
        summed = math.prod(n for n, label in zip(sizes, labels[1], strict=False) if label != "o") if labels else 1
    return 2.0 * _elements(result[2]) * summed


FEW = 16
"""Input channels below which a matrix unit is fed with those of the whole window."""


def _product_sizes(row: _Instruction, shapes: Mapping[str, str]) -> tuple[int, int, int] | None:
    """(rows, inner, outer) of a product; None where the text cannot be read."""
    result = _ARRAY.search(row.result)
    names = re.findall(r"%([\w.\-]+)", row.rest.partition(")")[0])
    arrays = [_ARRAY.search(shapes.get(name, "")) for name in names]
    if result is None or len(arrays) != 2 or arrays[0] is None or arrays[1] is None:
        return None
    left, right = ([int(n) for n in array[2].split(",") if n] for array in arrays if array is not None)
    if row.opcode == "dot":
        inner = math.prod(left[k] for k in _listed(row.rest, "lhs_contracting_dims"))
        batch = math.prod(left[k] for k in _listed(row.rest, "lhs_batch_dims"))
        rows, outer = (math.prod(sizes) // max(1, inner * batch) for sizes in (left, right))
        return rows, inner, outer
    labels = re.search(r"dim_labels=\w+_(\w+)->", row.rest)
    if labels is None or len(labels[1]) != len(right):
        return None
    sizes = dict(zip(labels[1], right, strict=True))
    inputs, outputs = sizes.get("i", 1), sizes.get("o", 1)
    taps = math.prod(n for label, n in sizes.items() if label not in "io")
    return _elements(result[2]) // max(1, outputs), inputs * taps if inputs < FEW else inputs, outputs


def _listed(text: str, name: str) -> list[int]:
    found = re.search(rf"{name}=\{{([\d,]*)\}}", text)
    return [int(k) for k in found[1].split(",") if k] if found else []


def expand_groups(text: str, devices: int) -> Groups:
    """The groups in `replica_groups=...` in any of XLA's forms: listed, strided (`[2,4]<=[8]T(0)`), or mesh axes.

    Returns () where there are none that can be read.
    """
    if listed := re.search(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}", text):
        groups = tuple(tuple(int(n) for n in group.split(",") if n) for group in re.findall(r"\{([\d,]*)\}", listed[1]))
        return groups or (tuple(range(devices)),)
    if strided := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        sizes = [int(n) for n in strided[2].split(",")]
        grid = np.arange(math.prod(sizes)).reshape(sizes)
        if strided[3]:
            grid = grid.transpose([int(n) for n in strided[3].split(",")])
        return _rows(grid.reshape([int(n) for n in strided[1].split(",")]))
    if meshed := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(([\d,\s]*)\))?\s*\{(.*?)\}", text):
        sizes = [int(n) for n in re.findall(r"'[^']*'=(\d+)", meshed[1])]
        names = re.findall(r"'([^']*)'=\d+", meshed[1])
        grid = np.arange(math.prod(sizes)).reshape(sizes)
        return _along(grid, dict(zip(names, sizes, strict=True)), meshed[3]) if names else ()
    return ()


def _along(grid: np.ndarray, sizes: dict[str, int], axes: str) -> Groups:
    """Groups along the named axes; `'x':(2)4` is the part of x of size 4 below a leading part of 2."""
    wanted = re.findall(r"'([^']*)'(?::\((\d+)\)(\d+))?", axes)
    shape: list[int] = []
    chosen: list[int] = []
    for name, size in sizes.items():
        mine = [(int(before or 1), int(part or size)) for axis, before, part in wanted if axis == name]
        before, part = mine[0] if mine else (size, 1)
        shape += [before, part, size // (before * part)]
        if mine:
            chosen.append(len(shape) - 2)
    grid = np.moveaxis(grid.reshape(shape), chosen, range(len(shape) - len(chosen), len(shape)))
    return _rows(grid.reshape(-1, math.prod(shape[k] for k in chosen)))


def _rows(grid: np.ndarray) -> Groups:
    return tuple(map(tuple, grid.reshape(-1, grid.shape[-1]).tolist()))
