"""Every format gives back the records that were written, by number, and says what is wrong with a file."""

import contextlib
import errno
import gzip
import io
import pickle
import tarfile

import numpy as np
import pictures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.data.files import example
from multipod.data.files.array_record import write_array_record
from multipod.data.files.disk import Damaged, Patience, read_at, with_patience
from multipod.data.files.folder import open_folder
from multipod.data.files.formats import FORMATS, open_records
from multipod.data.files.match import expand_braces
from multipod.errors import DataError

RECORDS = pictures.records(7)


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_tfrecords(folder):
    pytest.importorskip("google_crc32c")
    from multipod.data.files.tfrecord import write_tfrecord

    write_tfrecord(folder / "a.tfrecord", RECORDS[:3])
    write_tfrecord(folder / "b.tfrecord", RECORDS[3:])


def write_array_records(folder):
    write_array_record(folder / "a.array_record", RECORDS[:3])
    write_array_record(folder / "b.array_record", RECORDS[3:])


def write_tars(folder):
    for name, part in (("a.tar", range(3)), ("b.tar", range(3, 7))):
        with tarfile.open(folder / name, "w") as archive:
            for k in part:
                for suffix, data in (("image", RECORDS[k]["image"]), ("label", str(k % 2).encode())):
                    member = tarfile.TarInfo(f"{k:04d}.{suffix}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))


def write_parquets(folder):
    pytest.importorskip("pyarrow")
    from multipod.data.files.parquet import write_parquet

    write_parquet(folder / "a.parquet", RECORDS[:3])
    write_parquet(folder / "b.parquet", RECORDS[3:])


WRITERS = {
    "tfrecord": write_tfrecords,
    "array-record": write_array_records,
    "tar": write_tars,
    "parquet": write_parquets,
    "folder": lambda folder: pictures.write_folder(folder, 7),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_records_come_back_by_number(kind, tmp_path):
    WRITERS[kind](tmp_path)
    records = pickle.loads(pickle.dumps(open_records(str(tmp_path))))  # as a reading process gets them
    assert len(records) == 7
    order = [6, 0, 3, 2, 5, 1, 4]
    expected = RECORDS if kind != "folder" else RECORDS[::2] + RECORDS[1::2]  # class by class
    for number in order:
        found = records.record(number)
        assert found["image"] == expected[number]["image"]
        assert int(found["label"]) == expected[number]["label"]
    assert list(records.file_ends) == ([4, 7] if kind == "folder" else [3, 7])
    batch = records.read(np.array(order))
    assert list(batch["label"]) == [expected[number]["label"] for number in order]
    assert batch["image"][0] == expected[6]["image"]
    assert records.identity() == open_records(str(tmp_path)).identity()
    assert str(tmp_path) in records.name(4)


def test_our_tfrecords_are_those_of_others(tmp_path):
    """Against a file written by hand from the format's description, with its published checksum of 'a'."""
    pytest.importorskip("google_crc32c")
    from multipod.data.files.tfrecord import checksum, mask_checksum

    assert checksum()(b"a") == 0xC1D04330  # RFC 3720's polynomial, as in LevelDB's own test
    assert checksum()(b"\0" * 32) == 0x8A9136AA  # RFC 3720, B.4
    message = bytes.fromhex("0a0f0a0d0a0161 12081a060a04ffffff7f".replace(" ", ""))  # protoc's own for {a: 268435455}
    assert example.decode(message) == {"a": 268435455}
    assert example.encode({"a": 268435455}) == message
    assert mask_checksum(0) == 0xA282EAD8


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8),
        st.one_of(st.binary(max_size=40), st.integers(-(2**63), 2**63 - 1), st.floats(width=32, allow_nan=False)),
        min_size=1,
        max_size=5,
    )
)
@settings(max_examples=60, deadline=None)
def test_examples_come_back_from_their_bytes(record):
    assert example.decode(example.encode(record)) == record


@given(st.binary(max_size=60))
@settings(max_examples=80, deadline=None)
def test_any_bytes_are_an_example_or_damaged(message):
    with contextlib.suppress(Damaged):
        assert example.decode(message)


def test_arrays_and_lists_in_an_example():
    record = {"whole": np.array([1, -2, 3]), "real": np.array([0.5, 2.0], np.float32), "texts": [b"a", b"bc"]}
    found = example.decode(example.encode(record))
    np.testing.assert_array_equal(found["whole"], record["whole"])
    np.testing.assert_array_equal(found["real"], record["real"])
    assert found["texts"] == record["texts"]


def test_arrays_are_mapped(tmp_path):
    np.save(tmp_path / "dense.npy", np.arange(60, dtype=np.float32).reshape(5, 4, 3))
    np.save(tmp_path / "label.npy", np.arange(5))
    arrays = pickle.loads(pickle.dumps(open_records(str(tmp_path))))
    for numbers in ([1, 2, 3], [4, 0], [2]):
        batch = arrays.read(np.array(numbers))
        np.testing.assert_array_equal(batch["label"], numbers)
        np.testing.assert_array_equal(batch["dense"], np.arange(60).reshape(5, 4, 3)[numbers])
    large = np.arange(3 * 5000, dtype=np.int32).reshape(3, 5000)  # beyond LARGE: its pages are asked for
    (tmp_path / "other").mkdir()
    np.save(tmp_path / "other" / "x.npy", large)
    other = open_records(str(tmp_path / "other"))
    np.testing.assert_array_equal(other.read(np.array([2, 0]))["x"], large[[2, 0]])
    (tmp_path / "other" / "x.npy").write_bytes((tmp_path / "other" / "x.npy").read_bytes()[:-8])
    with pytest.raises(DataError, match="in the middle of an entry"):
        other.read(np.array([2]))
    np.save(tmp_path / "label.npy", np.arange(4))
    with pytest.raises(DataError, match=r"dense has 5, label has 4 entries. Every array needs as many"):
        open_records(str(tmp_path))


def test_lines_of_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"eins\nzwei\r\n\ndrei")
    (tmp_path / "b.txt").write_bytes("vier: ü\n".encode())
    lines = open_records(str(tmp_path / "*.txt"))
    assert [lines.record(k)["text"] for k in range(len(lines))] == ["eins", "zwei", "", "drei", "vier: ü"]
    assert lines.name(3).endswith("a.txt, line 4")


def test_a_table_gives_the_labels_and_must_agree(tmp_path):
    for k in range(3):
        (tmp_path / f"{k}.jpg").write_bytes(pictures.as_jpeg(k))
    with pytest.raises(DataError, match=r"3 of 3 images lie in no folder of a class.*labels.csv"):
        open_folder(tmp_path)
    (tmp_path / "labels.csv").write_text("name,label\n0.jpg,4\n1.jpg,5\n2.jpg,4\n")
    assert list(open_folder(tmp_path).labels) == [4, 5, 4]
    (tmp_path / "labels.csv").write_text("0.jpg,4\n0.jpg,5\n7.jpg,x\n9.jpg,1\n")
    with pytest.raises(DataError) as caught:
        open_folder(tmp_path)
    for part in ("line 2 gives 0.jpg the label 5", "line 3 is '7.jpg,x'", "2 images have no label", "9.jpg", "Mend"):
        assert part in str(caught.value)


def test_what_is_not_there_or_of_no_known_kind(tmp_path):
    with pytest.raises(DataError, match=r"no data files there. What is there is .* empty"):
        open_records(str(tmp_path / "train-*"))
    with pytest.raises(DataError, match="has no images"):
        open_records(str(tmp_path))
    (tmp_path / "x.zip").write_bytes(b"PK")
    with pytest.raises(
        DataError, match=r"the format of .zip is not known. Say which it is: folder, arrays, clicks, tfrecord"
    ):
        open_records(str(tmp_path / "x.zip"))
    with pytest.raises(DataError, match=r"no data format is called 'tfrecords'. Nearest: tfrecord"):
        open_records(str(tmp_path), "tfrecords")
    assert all(known.about for known in FORMATS.values())


@pytest.mark.parametrize("suffix", ["tfrecord", "array_record", "tar", "parquet"])
def test_files_of_another_kind_are_refused(suffix, tmp_path):
    if suffix == "parquet":
        pytest.importorskip("pyarrow")
    (tmp_path / f"a.{suffix}").write_bytes(b"this is no data file, " * 100)
    with pytest.raises(DataError, match=str(tmp_path)):
        open_records(str(tmp_path / f"a.{suffix}"))


def test_a_damaged_tfrecord_leaves_the_others(tmp_path):
    write_tfrecords(tmp_path)
    path = tmp_path / "a.tfrecord"
    content = bytearray(path.read_bytes())
    records = open_records(str(path))
    content[int(records.offsets[0][1]) + 40] ^= 1
    path.write_bytes(content)
    records = open_records(str(path))
    assert records.record(0)["label"] == 0
    with pytest.raises(Damaged, match="its checksum does not fit"):
        records.record(1)
    with pytest.raises(DataError, match=r"a.tfrecord, record 1 is damaged: its checksum .* Mend or remove it"):
        records.read(np.arange(3))
    path.write_bytes(path.read_bytes()[:-5])  # the last record was not written to its end
    assert len(open_records(str(path))) == 2


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now, self.pauses = 0.0, []

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.pauses.append(seconds)
        self.now += seconds


def test_a_disk_that_vanishes_for_a_minute_is_waited_for(tmp_path):
    clock, path = Clock(), tmp_path / "mount" / "file"
    patience = Patience(120.0, 0.1, clock.sleep, clock)

    def read():
        if clock.now < 60:
            raise OSError(errno.EIO, "Input/output error")
        return b"here"

    assert with_patience(path, read, patience) == b"here"
    assert clock.now < 66
    assert max(clock.pauses) == 5.0
    with pytest.raises(
        DataError, match=r"No such file or directory, after 12\d s of trying.*the last checkpoint is whole"
    ):
        read_at(path, 0, 1, patience)  # even its folder is gone
    (tmp_path / "mount").mkdir()
    with pytest.raises(Damaged, match="is gone"):
        read_at(path, 0, 1, patience)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{0..2}.tar", ["a-0.tar", "a-1.tar", "a-2.tar"]),
        ("{08..11}", ["08", "09", "10", "11"]),
        ("{2..0}", ["2", "1", "0"]),
        ("{a,b}{1..2}.txt", ["a1.txt", "a2.txt", "b1.txt", "b2.txt"]),
        ("{a,b{1,2}}c", ["ac", "b1c", "b2c"]),
        ("{only}/{x", ["{only}/{x"]),
        ("{,s}", ["", "s"]),
    ],
)
def test_braces_stand_for_what_they_do_in_a_shell(text, expected):
    assert list(expand_braces(text)) == expected


def test_braces_name_files_and_the_missing_are_named(tmp_path):
    for name in ("a.txt", "b.txt", "c.txt"):
        (tmp_path / name).write_text(name)
    lines = open_records(f"{tmp_path}/{{b,a}}.txt")
    assert [lines.record(k)["text"] for k in range(2)] == ["b.txt", "a.txt"]
    assert len(open_records(f"{tmp_path}/{{a,?}}.txt")) == 3
    with pytest.raises(DataError, match=r"2 of 4 data files are missing: .*d.txt, .*e.txt. Bring them"):
        open_records(f"{tmp_path}/{{b,c,d,e}}.txt")


def test_packed_archives_are_unpacked_once_and_read_by_place(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_tars(tmp_path)
    plain = open_records(f"{tmp_path}/{{a,b}}.tar")
    for name in "ab":
        (tmp_path / f"{name}.tar.gz").write_bytes(gzip.compress((tmp_path / f"{name}.tar").read_bytes()))
    for _ in range(2):
        packed = open_records(f"{tmp_path}/{{a,b}}.tar.gz")
        assert len(packed) == len(plain) == 7
        assert [packed.record(k) for k in range(7)] == [plain.record(k) for k in range(7)]
        assert packed.name(3).startswith(f"{tmp_path}/b.tar.gz")
    assert len(list((tmp_path / "cache/multipod/unpacked").glob("*.tar"))) == 2
    (tmp_path / "c.tgz").write_bytes((tmp_path / "a.tar.gz").read_bytes()[:-30])
    with pytest.raises(DataError, match=r"c.tgz cannot be unpacked: .* Copy it again"):
        open_records(f"{tmp_path}/c.tgz")
    assert not list((tmp_path / "cache/multipod/unpacked").glob("*c"))
