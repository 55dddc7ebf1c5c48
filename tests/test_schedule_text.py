"""Schedules as text: what is written is read, what is malformed or hostile is refused, MSCCL's XML does the sums."""

import copy
import io
import json
import os
import random
import re
import sys
import threading
from collections import deque
from fractions import Fraction
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.cli.main import COMMANDS
from multipod.cli.schedules.schedule import schedule as command
from multipod.collectives import msccl, text
from multipod.collectives.build import ALGORITHMS, build
from multipod.collectives.schedule import ADASUM, ADD, COPY, Schedule, Step, Steps, even_bounds, make_step
from multipod.collectives.verify import verify
from multipod.errors import ScheduleError
from multipod.execute.engines.numpy import run
from multipod.simulate.simulate import simulate
from multipod.topology.machines import parse
from multipod.topology.topology import Topology

PAGE = Path(__file__).parents[1] / "docs" / "schedule-format.md"
CASES = [(name, collective) for name, builder in ALGORITHMS.items() for collective in builder.collectives]
SMALL = {"tree-packing": {"rounds": 2}}
"""Options that make algorithms of many pieces quick to write."""
GOLDEN = """{"format": "multipod-schedule-1", "collective": "all-reduce", "algorithm": "ring",
 "topology": {"shape": [4]}, "denominator": 4, "pieces": [[0, 1], [1, 2], [2, 3], [3, 4]],
 "steps": [[[0, 1, 0, "add"], [1, 2, 1, "add"], [2, 3, 2, "add"], [3, 0, 3, "add"]],
           [[1, 2, 0, "add"], [2, 3, 1, "add"], [3, 0, 2, "add"], [0, 1, 3, "add"]],
           [[2, 3, 0, "add"], [3, 0, 1, "add"], [0, 1, 2, "add"], [1, 2, 3, "add"]],
           [[3, 0, 0, "copy"], [0, 1, 1, "copy"], [1, 2, 2, "copy"], [2, 3, 3, "copy"]],
           [[0, 1, 0, "copy"], [1, 2, 1, "copy"], [2, 3, 2, "copy"], [3, 0, 3, "copy"]],
           [[1, 2, 0, "copy"], [2, 3, 1, "copy"], [3, 0, 2, "copy"], [0, 1, 3, "copy"]]]}"""


def same(one: Schedule, two: Schedule) -> bool:
    """Equal in all that a schedule says."""
    fields = ("collective", "algorithm", "topology", "denominator", "tile", "notes")
    steps = zip(one.steps, two.steps, strict=True)
    return (
        all(getattr(one, field) == getattr(two, field) for field in fields)
        and one.bounds.tolist() == two.bounds.tolist()
        and all(np.array_equal(a, b) for old, new in steps for a, b in zip(old, new, strict=True))
    )


def merged(schedule: Schedule) -> Schedule:
    """A schedule as it is read: neighbouring sends that could be one are one."""
    return Schedule(
        schedule.collective, schedule.algorithm, schedule.topology, schedule.denominator, schedule.bounds,
        [merge(step) for step in schedule.steps], schedule.tile, schedule.notes,
    )  # fmt: skip


def merge(step: Step) -> Step:
    rows: list[list[int]] = []
    for src, dst, first, stop, op in zip(*(column.tolist() for column in step), strict=True):
        if rows and rows[-1][:2] == [src, dst] and rows[-1][3:] == [first, op]:
            rows[-1][3] = stop
        else:
            rows.append([src, dst, first, stop, op])
    return make_step(*zip(*rows, strict=True)) if rows else make_step([], [], [])


def parsed(data: dict | list | str | bytes) -> Schedule:
    data = data if isinstance(data, str | bytes) else json.dumps(data)
    return text.parse(data.encode() if isinstance(data, str) else data, "s.json")


def refusal(data) -> str:
    with pytest.raises(ScheduleError) as error:
        parsed(data)
    return str(error.value)


def changed(**fields) -> dict:
    return {**json.loads(GOLDEN), **fields}


# ---- there and back


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_every_builder_is_written_and_read(name, collective, tmp_path):
    read = 0
    for topology in (Topology((1,)), Topology((2, 4), wrap=True), Topology((3, 4), failed_chips=[5])):
        try:
            schedule = build(name, topology, collective, **SMALL.get(name, {}))
        except ScheduleError:
            continue
        text.write(schedule, tmp_path / "s.json")
        again = text.read(tmp_path / "s.json")
        assert same(merged(schedule), again)
        assert str(verify(again)) == str(verify(merged(schedule)))
        read += 1
    assert read >= 1


def test_all_fields_survive(tmp_path):
    topology = Topology(
        (4, 2), wrap=(True, False), failed_links=[(0, 1)], latency_s=Fraction(1, 3), bytes_per_s=(1, 2.5), name="mine"
    )
    steps = [
        make_step([0, 2], [2, 0], [0, 2], [2, 4], [ADD, ADASUM]),
        make_step([], [], []),
        make_step(1, 3, 3, 4, COPY),
    ]
    schedule = Schedule(
        "all-reduce", "hand", topology, 2**60, np.array([0, 1, 1, 5, 2**60]), steps, tile=(2, 1), notes=("ä \"b\"", "c")
    )  # fmt: skip
    text.write(schedule, tmp_path / "s.json")
    assert same(schedule, text.read(tmp_path / "s.json"))
    data = json.loads((tmp_path / "s.json").read_text())
    assert list(data) == [
        "format", "collective", "algorithm", "topology", "denominator", "tile", "notes", "pieces", "steps",
    ]  # fmt: skip
    assert data["steps"] == [
        [[0, 2, 0, "add"], [0, 2, 1, "add"], [2, 0, 2, "adasum"], [2, 0, 3, "adasum"]],
        [],
        [[1, 3, 3, "copy"]],
    ]


def test_fields_that_say_nothing_are_left_out(tmp_path):
    text.write(build("ring", Topology((3,))), tmp_path / "s.json")
    assert set(json.loads((tmp_path / "s.json").read_text())) == set(text.NEEDED)


def test_the_golden_example_is_the_ring():
    schedule = parsed(GOLDEN)
    assert verify(schedule).steps == 6
    assert schedule.bounds.tolist() == [0, 1, 2, 3, 4]
    with (
        open(os.devnull, "rb") as nothing,
        pytest.raises(ScheduleError, match=r"^/dev/null: is empty\. Give the file of"),
    ):
        text.read(nothing)
    assert same(text.read(io.BytesIO(GOLDEN.encode())), schedule)


def test_the_printed_example_is_right():
    example = re.search(r"^```json\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[1]
    schedule = parsed(example)
    proof = verify(schedule)
    assert (proof.chips, proof.sends) == (3, 8)
    vectors = {chip: np.arange(9) + 10**chip for chip in range(3)}
    assert all((total == sum(vectors.values())).all() for total in run(schedule, vectors).values())


# ---- writing


def test_a_file_is_whole_or_as_it_was(tmp_path):
    file = tmp_path / "s.json"
    file.write_text("the old one")

    def make(k: int) -> Step:
        if k == 5:
            raise KeyboardInterrupt
        return make_step(0, 1, 0)

    with pytest.raises(KeyboardInterrupt):
        text.write(Schedule("all-reduce", "hand", Topology((2,)), 1, even_bounds(1), Steps(9, make)), file)
    assert file.read_text() == "the old one"
    assert list(tmp_path.iterdir()) == [file]
    text.write(build("ring", Topology((2,))), file)
    assert text.read(file).algorithm == "ring"
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(FileNotFoundError):
        text.write(build("ring", Topology((2,))), tmp_path / "none" / "s.json")


def test_behind_a_link_the_file_is_replaced(tmp_path):
    (tmp_path / "s.json").write_text("the old one")
    (tmp_path / "link").symlink_to("s.json")
    text.write(build("ring", Topology((2,))), tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert text.read(tmp_path / "s.json").algorithm == "ring"


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes")
def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    schedule = build("ring", Topology((3,)))
    writer = threading.Thread(target=text.write, args=(schedule, pipe))
    writer.start()
    assert same(text.read(pipe), schedule)
    writer.join()
    assert pipe.is_fifo()


# ---- malformed and hostile

DEEP = "[" * 200_000
NOT = "is not as docs/schedule-format.md says:"
MANGLED = {
    "nothing": (b"", "s.json: is empty. Give the file of a schedule."),
    "spaces": (b" \n", "s.json: is empty. Give the file of a schedule."),
    "half": (GOLDEN[:99], f"s.json: it {NOT} Input data was truncated."),
    "no object": (b"[]", f"s.json: it {NOT} Expected `object`, got `array`."),
    "more after it": (GOLDEN + "{}", f"s.json: it {NOT} JSON is malformed: trailing"),
    "other encoding": (GOLDEN.encode("utf-16"), f"s.json: it {NOT} JSON is malformed"),
    "no UTF-8": (GOLDEN.replace("ring", "r\udcff").encode(errors="surrogateescape"), f's.json: "algorithm" {NOT}'),
    "deep steps": (GOLDEN.replace("[0, 1, 0,", DEEP, 1), f"s.json: it {NOT} it is"),
    "deep topology": (GOLDEN.replace("[4]", DEEP, 1), f"s.json: it {NOT} it is"),
    "unknown field": (changed(extra=1), "s.json: there is no field 'extra'. Known: algorithm, collective, denominator"),
    "field twice": (GOLDEN[:-1] + ', "steps": []}', "s.json: it has the field 'steps' twice. Leave one."),
    "field twice, escaped": (
        GOLDEN[:-1] + ', "st\\u0065ps": []}',
        "s.json: it has the field 'steps' twice. Leave one.",
    ),
    "topology twice": (
        GOLDEN.replace('"shape": [4]', '"shape": [5], "shape": [4]'),
        "s.json: \"topology\" has the field 'shape' twice. Leave one.",
    ),
    "lacks fields": ('{"format": "multipod-schedule-1"}', "s.json: lacks collective, algorithm, topology, denominator"),
    "other format": (changed(format="2"), "s.json: its format is '2', not 'multipod-schedule-1'. Convert it first."),
    "collective": (changed(collective="all-reduced"), "s.json: \"collective\" is 'all-reduced'. Nearest: all-reduce"),
    "collective type": (changed(collective=1), f's.json: "collective" {NOT} Expected'),
    "escapes": (changed(algorithm="\x1b[2J"), "s.json: the text '\\x1b[2J' has characters that cannot be printed."),
    "long name": (changed(algorithm="a" * 20_000), f's.json: "algorithm" {NOT} Expected'),
    "note": (changed(notes=["\x00"]), "s.json: the text '\\x00' has characters that cannot be printed."),
    "notes": (changed(notes="x"), f's.json: "notes" {NOT} Expected `array`'),
    "denominator 0": (changed(denominator=0), 's.json: "denominator" is 0. Give a positive one.'),
    "denominator -1": (changed(denominator=-1), f's.json: "denominator" {NOT} Expected'),
    "denominator 1.5": (changed(denominator=1.5), f's.json: "denominator" {NOT} Expected'),
    "denominator true": (changed(denominator=True), f's.json: "denominator" {NOT} Expected'),
    "denominator huge": (changed(denominator=10**30), f's.json: "denominator" {NOT}'),
    "denominator NaN": (changed(denominator=float("nan")), f"s.json: it {NOT} JSON is"),
    "digits": (GOLDEN.replace('r": 4', 'r": ' + "9" * 10_000), f's.json: "denominator" {NOT}'),
    "no pieces": (changed(pieces=[]), "s.json: there are 0 pieces. Give 1 to 2147483647."),
    "gap": (changed(pieces=[[0, 1], [2, 4]]), "s.json: the pieces do not cover the vector from 0 to 4 in order, once."),
    "overlap": (changed(pieces=[[0, 2], [1, 4]]), "s.json: the pieces do not cover the vector from 0 to 4 in order"),
    "backwards": (changed(pieces=[[0, 5], [5, 4]]), "s.json: the pieces do not cover the vector from 0 to 4 in order"),
    "short": (changed(pieces=[[0, 3]]), "s.json: the pieces do not cover the vector from 0 to 4 in order, once."),
    "late": (changed(pieces=[[1, 4]]), "s.json: the pieces do not cover the vector from 0 to 4 in order, once."),
    "piece of three": (changed(pieces=[[0, 1, 4]]), f's.json: "pieces" {NOT} Expected'),
    "no machine": (changed(topology=[4]), "s.json: topology: [4] is no object of fields."),
    "huge machine": (changed(topology={"shape": [10**9, 10**9]}), "s.json: topology has 1,000,000,000,000,000,000"),
    "NaN machine": (GOLDEN.replace("[4]", '[4], "latency_s": [NaN]'), f"s.json: it {NOT}"),
    "all failed": (changed(topology={"shape": [1], "failed_chips": [0]}), "s.json: mesh:1"),
    "tile": (changed(tile=[3]), "s.json: tile=(3,) does not tile mesh:4 of shape (4,)."),
    "tile 0": (changed(tile=[0]), "s.json: tile=(0,) does not tile mesh:4 of shape (4,)."),
    "steps": (changed(steps={}), f's.json: "steps" {NOT} Expected `array`, got `object`'),
    "step": (changed(steps=[3]), f"s.json: step 0: it {NOT} Expected `array`, got `int`"),
    "send of three": (changed(steps=[[[0, 1, 0]]]), f"s.json: step 0: it {NOT} Expected"),
    "op": (changed(steps=[[], [[0, 1, 0, "max"]]]), f"s.json: step 1: it {NOT} Invalid"),
    "op number": (changed(steps=[[[0, 1, 0, 0]]]), f"s.json: step 0: it {NOT} Expected"),
    "chip": (changed(steps=[[[0, 4, 0, "add"]]]), "s.json: step 0: entry 0 names chip 4; mesh:4 has 0 to 3. Mend it."),
    "chip -1": (changed(steps=[[[-1, 1, 0, "add"]]]), f"s.json: step 0: it {NOT} Expected"),
    "chip 2^31": (changed(steps=[[[2**31, 1, 0, "add"]]]), f"s.json: step 0: it {NOT}"),
    "chip 0.5": (changed(steps=[[[0.5, 1, 0, "add"]]]), f"s.json: step 0: it {NOT}"),
    "chip true": (changed(steps=[[[True, 1, 0, "add"]]]), f"s.json: step 0: it {NOT}"),
    "piece": (
        changed(steps=[[[0, 1, 0, "add"], [0, 1, 4, "add"]]]),
        "s.json: step 0: entry 1 sends piece 4; there are 0 to 3. Mend it.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MANGLED)
def test_what_is_no_schedule_is_refused_with_the_reason(case):
    data, why = MANGLED[case]
    assert refusal(data).startswith(why), refusal(data)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ScheduleError, match=r"none\.json: cannot be read: No such file or directory"):
        text.read(tmp_path / "none.json")
    with pytest.raises(ScheduleError, match="cannot be read: Is a directory"):
        text.read(tmp_path)
    with pytest.raises(ScheduleError, match="cannot be read: "):
        text.read("nul\0")


def test_what_never_ends_and_what_does_not_fit_are_refused():
    with pytest.raises(ScheduleError, match=r"/dev/zero: it is not as docs/schedule-format.md says: JSON is malformed"):
        text.read("/dev/zero")

    class Vast(io.BytesIO):
        def read(self, size=-1):
            if size < 0:
                raise MemoryError
            return b"{"

    with pytest.raises(ScheduleError, match=r"schedule: takes more memory than there is. Read it on a larger machine."):
        text.read(Vast())


def test_every_beginning_of_a_file_is_refused():
    for end in range(1, len(GOLDEN) - 1):
        assert NOT in refusal(GOLDEN[:end])


def read_or_refuse(data: bytes) -> None:
    """Nothing but a ScheduleError comes out, from `verify` neither."""
    why = ""
    try:
        verify(text.parse(data))
    except ScheduleError as error:
        why = str(error)
    assert len(why) < 1000


@settings(max_examples=500, deadline=None)
@given(st.data())
def test_garbled_files_are_read_or_refused(data):
    garbled = bytearray(GOLDEN.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(garbled) - 1))
        piece = data.draw(
            st.sampled_from([b"", b"9", b"-", b"0", b"1e9", b"null", b"[", b"]", b'"', b"\\", b"\xff", b","])
        )
        garbled[at : at + data.draw(st.integers(0, 3))] = piece
    read_or_refuse(bytes(garbled))


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["add", "copy", "all-gather"]),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text() | st.sampled_from(["shape", "wrap"]), inner),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([*text.NEEDED, *text.OPTIONAL]), ANYTHING, st.lists(st.integers(0, 3), max_size=3))
def test_anything_in_a_field_is_read_or_refused(field, value, path):
    data = copy.deepcopy(json.loads(GOLDEN))
    place, key = data, field
    for step in path:  # deeper into the field, as far as it goes
        if isinstance(place.get(key) if isinstance(place, dict) else place[key], list):
            place = place[key]
            key = step % len(place)
    place[key] = value
    read_or_refuse(json.dumps(data).encode("utf-8", "surrogatepass"))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    assert refusal(data)


# ---- MSCCL


def perform(xml: str, vectors: dict[int, np.ndarray], seed: int) -> dict[int, np.ndarray]:
    """Runs MSCCL XML: blocks in a random order, each connection holding one message; stops if nothing can go on."""
    algo = ElementTree.fromstring(xml)
    chunks = int(algo.get("nchunksperloop"))
    held = {rank: vector.reshape(chunks, -1).copy() for rank, vector in vectors.items()}
    wires: dict[tuple[int, int, int], deque] = {}
    blocks = [(int(gpu.get("id")), tb) for gpu in algo for tb in gpu]
    done = {(rank, int(tb.get("id"))): 0 for rank, tb in blocks}
    chance = random.Random(seed)
    while True:
        chance.shuffle(blocks)
        moved = False
        for rank, tb in blocks:
            place = rank, int(tb.get("id"))
            if done[place] == len(tb):
                continue
            step = {name: int(value) for name, value in tb[done[place]].attrib.items() if name not in TEXTS}
            if step["depid"] >= 0 and done[rank, step["depid"]] <= step["deps"]:
                continue
            kind, part = tb[done[place]].get("type"), slice(step["srcoff"], step["srcoff"] + step["cnt"])
            if kind == "s":
                wire = wires.setdefault((rank, int(tb.get("send")), int(tb.get("chan"))), deque())
                if wire:
                    continue
                wire.append(held[rank][part].copy())
            elif kind in ("r", "rrc"):
                wire = wires.get((int(tb.get("recv")), rank, int(tb.get("chan"))))
                if not wire:
                    continue
                held[rank][part] = wire.popleft() + (held[rank][part] if kind == "rrc" else 0)
            else:
                assert kind == "nop"
                assert step["depid"] >= 0
            done[place] += 1
            moved = True
        if not moved:
            break
    assert all(done[rank, int(tb.get("id"))] == len(tb) for rank, tb in blocks), "deadlock"
    assert not any(wires.values())
    return {rank: vector.ravel() for rank, vector in held.items()}


TEXTS = ("type", "srcbuf", "dstbuf")


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_the_xml_does_what_the_schedule_does(name, collective):
    performed = 0
    for topology in (Topology((1,)), Topology((2, 4)), Topology((5,), wrap=True), Topology((3, 4), failed_chips=[5])):
        try:
            schedule = build(name, topology, collective, **SMALL.get(name, {}))
            xml = msccl.to_xml(schedule)
        except ScheduleError:
            continue
        performed += 1
        chance = np.random.default_rng(0)
        vectors = {chip: chance.integers(0, 1000, schedule.pieces * 3) for chip in topology.chips}
        want = run(schedule, vectors)
        for seed in range(4):
            got = perform(xml, {topology.rank[chip]: vector for chip, vector in vectors.items()}, seed)
            assert all((got[topology.rank[chip]] == want[chip]).all() for chip in topology.chips)
        check_form(xml, schedule)
    assert performed >= 1


def check_form(xml: str, schedule: Schedule) -> None:
    """What the readers demand."""
    algo = ElementTree.fromstring(xml)
    assert xml.startswith("<algo ")
    assert " />" not in xml
    names = "name proto nchannels nchunksperloop ngpus coll inplace outofplace minBytes maxBytes"
    assert list(algo.attrib) == names.split()
    assert [gpu.get("id") for gpu in algo] == [str(rank) for rank in range(int(algo.get("ngpus")))]
    for gpu in algo:
        whole = {"i_chunks": schedule.pieces, "o_chunks": schedule.pieces}
        if schedule.collective in ("all-gather", "reduce-scatter"):
            whole["i_chunks" if schedule.collective == "all-gather" else "o_chunks"] //= len(algo)
        assert gpu.attrib == {"id": gpu.get("id"), "s_chunks": "0", **{k: str(n) for k, n in whole.items()}}
        awaited = {(step.get("depid"), step.get("deps")) for tb in gpu for step in tb}
        ways = set()
        for number, tb in enumerate(gpu):
            assert list(tb.attrib) == ["id", "send", "recv", "chan"]
            assert tb.get("id") == str(number)
            assert (tb.get("send") == "-1") != (tb.get("recv") == "-1")
            assert gpu.get("id") not in (tb.get("send"), tb.get("recv"))
            ways.add((tb.get("send"), tb.get("recv"), tb.get("chan")))
            assert 1 <= len(tb) <= msccl.MOST_STEPS
            for k, step in enumerate(tb):
                assert list(step.attrib) == [
                    "s", "type", "srcbuf", "srcoff", "dstbuf", "dstoff", "cnt", "depid", "deps", "hasdep",
                ]  # fmt: skip
                assert step.get("s") == str(k)
                assert step.get("hasdep") == str(int((tb.get("id"), str(k)) in awaited))
                assert step.get("depid") != tb.get("id")
                if step.get("type") == "nop":  # the readers count one dependency for each, and one more after them
                    assert step.get("depid") != "-1"
                    assert tb[k + 1].get("depid") != "-1"
                    assert step.get("hasdep") == "0"
                else:
                    assert 1 <= int(step.get("cnt")) <= msccl.MOST_COUNT
        assert len(ways) == len(gpu)


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(0, 2**32))
def test_chips_that_exchange_what_they_read_do_not_deadlock(chance, seed):
    """All pairs swap and add overlapping runs of pieces in one step: each must send before it receives."""
    pieces = 6
    steps = []
    for _ in range(4):
        cells = [(a, b, k) for a, b in ((0, 1), (1, 0), (2, 3), (3, 2)) for k in range(pieces) if chance.random() < 0.6]
        chance.shuffle(cells)
        if cells:
            steps.append(merge(make_step(*zip(*cells, strict=True), None, COPY)))
    schedule = Schedule("all-reduce", "swaps", Topology((4,)), pieces, even_bounds(pieces), steps)
    vectors = {chip: np.arange(pieces) + 100 * chip for chip in range(4)}
    got, want = perform(msccl.to_xml(schedule), vectors, seed), run(schedule, vectors)
    assert all((got[chip] == want[chip]).all() for chip in range(4))


def test_long_schedules_use_more_channels(monkeypatch):
    schedule = build("ring", Topology((12,)))  # 22 messages over each wire
    for most, channels in ((22, 1), (21, 2), (11, 2), (10, 4)):
        monkeypatch.setattr(msccl, "MOST_STEPS", most)
        algo = ElementTree.fromstring(msccl.to_xml(schedule))
        assert int(algo.get("nchannels")) == channels
        assert max(len(tb) for gpu in algo for tb in gpu) <= most
    check_form(msccl.to_xml(schedule), schedule)
    vectors = {chip: np.arange(24) * chip for chip in range(12)}
    got = perform(msccl.to_xml(schedule), vectors, 0)
    assert all((got[chip] == sum(vectors.values())).all() for chip in range(12))


def test_what_is_too_large_for_msccl_is_refused_before_it_is_laid_out(monkeypatch):
    monkeypatch.setattr(msccl, "_messages", None)
    with pytest.raises(
        ScheduleError, match="MSCCL takes 256 instructions in a thread block, and with 32 channels the lon"
    ):
        msccl.to_xml(Schedule("all-reduce", "hand", Topology((2,)), 1, even_bounds(1), [make_step(0, 1, 0)] * 257))
    all_ways = [make_step([5, 9, 6, 10], [6, 10, 5, 9], k % 64) for k in range(256 * 32)]
    star = [make_step(5, [1, 4, 6, 9], k % 64) for k in range(256 * 32)]
    schedule = Schedule("all-reduce", "hand", Topology((4, 4)), 64, even_bounds(64), [*all_ways, *star])
    with pytest.raises(ScheduleError, match="with 32 channels the longest would have 512"):
        msccl.to_xml(schedule)
    schedule = Schedule("all-reduce", "hand", Topology((3, 3)), 64, even_bounds(64), [
        make_step([4, 4, 4, 4, 1, 3, 5, 7], [1, 3, 5, 7, 4, 4, 4, 4], k % 64) for k in range(255 * 32)
    ])  # fmt: skip
    with pytest.raises(
        ScheduleError, match="rank 4 would need 256 thread blocks on 32 channels, up to 8 on one; MSCCL"
    ):
        msccl.to_xml(schedule)


def test_an_algorithms_name_is_quoted_in_xml(tmp_path):
    schedule = Schedule("all-reduce", '<ä> & "b"', Topology((1,)), 1, even_bounds(1), [])
    msccl.write(schedule, tmp_path / "s.xml")
    assert (tmp_path / "s.xml").read_bytes().isascii()
    assert ElementTree.parse(tmp_path / "s.xml").getroot().get("name") == schedule.algorithm


def test_what_msccl_cannot_say_is_refused(monkeypatch):
    two = Topology((2,))

    def hand(bounds=(0, 1, 2), op=ADD, collective="all-reduce", **fields):
        bounds = np.array(bounds)
        return Schedule(collective, "hand", two, int(bounds[-1]), bounds, [make_step(0, 1, 0, None, op)], **fields)

    for schedule, why in (
        (hand((0, 1, 4)), "MSCCL has chunks of one size only, and here pieces are from 1 to 3 parts of 4."),
        (hand(op=ADASUM), "step 0 has adasum, which MSCCL does not know."),
        (hand(tile=(2,)), "MSCCL sums over all GPUs, and here a tile is skipped."),
        (
            hand((0, 1), collective="all-gather"),
            "MSCCL gives each GPU whole chunks, and 1 pieces do not split over 2 chips.",
        ),
    ):
        with pytest.raises(ScheduleError) as error:
            msccl.to_xml(schedule)
        assert why in str(error.value)
    monkeypatch.setattr(msccl, "MOST_STEPS", 3)
    with pytest.raises(ScheduleError, match="MSCCL takes 3 instructions in a thread block, and with 32 channels the"):
        msccl.to_xml(Schedule("all-reduce", "hand", two, 1, even_bounds(1), [make_step(0, 1, 0)] * 9))
    monkeypatch.undo()
    to_one = [make_step(np.arange(1, 64), 0, np.arange(63))]
    star = Schedule("all-reduce", "hand", Topology((64,)), 63, even_bounds(63), to_one)
    with pytest.raises(ScheduleError, match="rank 0 would need 63 thread blocks on 1 channels, up to 63 on one"):
        msccl.to_xml(star)


# ---- the command


def cli(*args: str):
    return CliRunner().invoke(command, args)


def test_the_command_builds_proves_writes_and_checks(tmp_path):
    assert COMMANDS["schedule"] == "multipod.cli.schedules.schedule:schedule"
    file, xml = str(tmp_path / "s.json"), str(tmp_path / "s.xml")
    options = ("--on", "mesh:4x4", "--fail", "0-1,2-3", "--algorithm", "detour-ring", "--out", file, "--msccl", xml)
    done = cli("all-reduce", *options)
    assert done.exit_code == 0, done.output
    proof = str(verify(text.read(file)))
    sizes = [f"{Path(name).stat().st_size / 1e6:.2f} MB" for name in (file, xml)]
    share = r"simulated: [\d.]+ ms for 100 MB, [\d.]+ % of the bound"
    promise = next(line for line in done.output.splitlines() if re.fullmatch(share, line))
    assert done.output == f"{proof}\n{promise}\nwritten to {file} ({sizes[0]})\nwritten to {xml} ({sizes[1]})\n"
    assert cli("check", file).output == f"{proof}\n"
    assert ElementTree.parse(xml).getroot().get("ngpus") == "12"


def test_the_command_writes_the_schedule_that_is_simulated(tmp_path):
    """For a vector of a given size: builders ask for it, and another size is another schedule."""
    machine = ("--on", "mesh:4x4", "--fail", "1,1", "--algorithm", "tree-packing")
    done = cli("all-reduce", *machine, "--bytes", "3M", "--out", str(tmp_path / "s.json"))
    built = build("tree-packing", parse("mesh:4x4", ("1,1",)), "all-reduce", nbytes=3_000_000)
    assert done.output.splitlines()[0] == str(verify(built)) == str(verify(text.read(tmp_path / "s.json")))
    share = simulate(built, built.topology, 3_000_000).percent_of_bound
    assert f"for 3 MB, {share:.1f} % of the bound" in done.output


def test_the_command_passes_options():
    done = cli(
        "all-reduce", "--on", "mesh:4x4", "--algorithm", "multi-ring", "--option", "tiers=2x8", "--option", "rings=2"
    )
    assert done.output.startswith("multi-ring all-reduce on mesh:4x4: proven on 16 chips, 16 steps"), done.output
    rooted = ("broadcast", "--on", "mesh:4x4", "--algorithm", "ring")
    assert "root 6" in cli(*rooted, "--option", "root=1,2").output
    assert "root 6" in cli(*rooted, "--option", "root=6").output
    shares = ("--algorithm", "row-column", "--option", "shares=1/3,2/3", "--option", "folded=false")
    assert "proven on 16 chips" in cli("all-reduce", "--on", "mesh:4x4", *shares).output


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--algorithm", "rings"), "There is no algorithm 'rings'. Nearest: ring"),
        (("--algorithm", "ring", "--option", "x=1"), "ring has no option 'x'. It has: along, tile, root, segments."),
        (
            ("--algorithm", "ring", "--option", "tile"),
            "--option 'tile' has no value. Write name=value, as tiers=4x4x16.",
        ),
        (
            ("--algorithm", "row-column", "--option", "shares=abc"),
            "row-column cannot be built with --option shares=abc: ",
        ),
        (("--algorithm", "ring", "--out", "/dev/full"), "/dev/full cannot be written: No space left on device. Choose"),
        (("--algorithm", "ring", "--msccl", "/dev/full"), "/dev/full cannot be written: No space left on device."),
    ],
)
def test_the_command_refuses(options, why):
    error = cli("all-reduce", "--on", "mesh:2x2", *options).exception
    assert isinstance(error, ScheduleError)
    assert why in str(error)


@pytest.mark.parametrize("option", ["--out", "--msccl"])
def test_the_command_refuses_a_folder_that_is_not_there_before_it_builds(option, monkeypatch):
    monkeypatch.setattr(sys.modules["multipod.collectives.build"], "build", None)
    done = cli("all-reduce", "--on", "mesh:2x2", "--algorithm", "ring", option, "none/s.json")
    assert done.exit_code == 2
    assert "Error: none is no folder to write s.json in. Make it first." in done.output


def test_the_command_refuses_a_wrong_schedule(tmp_path):
    (tmp_path / "s.json").write_text(GOLDEN.replace("add", "copy"))
    error = cli("check", str(tmp_path / "s.json")).exception
    assert "chip 0 ends with piece 0 without the contribution of chips 1, 2, 3" in str(error)


def test_the_command_lists_all_algorithms():
    listed = cli("list").output
    assert all(f"{name} " in listed for name in ALGORITHMS)
    assert cli("all-reduce", "--on", "mesh:2x2", "--algorithm", "list").output == listed
