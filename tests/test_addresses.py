"""Data behind the addresses of an S3-compatible server: brought near once, whole, and read as those on a disk are."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from pictures import write_folder
from s3_server import s3_server

from multipod.data.convert import convert
from multipod.data.files.addresses import address_of, bring_near, find_files, refuse_address
from multipod.data.files.formats import open_records
from multipod.data.files.match import match_files
from multipod.errors import DataError

s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
server = pytest.fixture(s3_server, scope="module")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("multipod.data.files.addresses.PAUSES_S", (0.01, 0.01))


@pytest.fixture
def store(server):
    store = s3fs.S3FileSystem()
    yield store
    if store.exists("bucket/data"):
        store.rm("bucket/data", recursive=True)


def put(store, **files: bytes) -> None:
    for name, content in files.items():
        store.pipe(f"bucket/data/{name}", content)


def test_records_of_a_store_are_those_of_the_disk(store, tmp_path):
    write_folder(tmp_path / "pictures", 7)
    convert(open_records(str(tmp_path / "pictures")), tmp_path / "records", "tar", per_shard=3)
    store.put(f"{tmp_path}/records/", "bucket/data/", recursive=True)
    near, far = open_records(f"{tmp_path}/records/*.tar"), open_records("s3://bucket/data/*.tar")
    assert (len(far), far.identity()) == (7, near.identity())
    for number in range(7):
        assert far.record(number) == near.record(number)
    assert open_records("s3:/bucket/data/*.tar").identity() == near.identity()  # as a Path writes it


def test_a_file_comes_once_and_again_when_it_has_changed(store, capsys):
    put(store, a=b"one", b=b"two")
    first = match_files("s3://bucket/data/{b,a}", "files")
    assert [path.read_bytes() for path in first] == [b"two", b"one"]
    assert [path.name for path in first] == ["b", "a"]
    said = capsys.readouterr().err
    assert "bucket/data/b and 1 more: bringing 6 bytes into " in said
    assert match_files("s3://bucket/data/{b,a}", "files") == first
    assert not capsys.readouterr().err
    put(store, a=b"another")
    b, a = match_files("s3://bucket/data/{b,a}", "files")
    assert (b, a.read_bytes(), first[1].read_bytes()) == (first[0], b"another", b"one")


@dataclass
class WatchedStore:
    """A store that counts what is fetched, and of which the first `broken` files come in part."""

    store: Any
    broken: int = 0
    fetched: list[str] = field(default_factory=list)

    def get_file(self, remote: str, local: str) -> None:
        self.store.get_file(remote, local)
        self.fetched.append(remote)
        if len(self.fetched) <= self.broken:
            os.truncate(local, 2)


def test_several_who_want_one_file_fetch_it_once(store):
    content = np.random.default_rng(0).bytes(100_000)
    put(store, a=content)
    (file,) = find_files("s3://bucket/data/a")
    watched = WatchedStore(file.store)
    with ThreadPoolExecutor(4) as threads:
        brought = list(threads.map(bring_near, [[replace(file, store=watched)]] * 4))
    assert [path.read_bytes() for (path,) in brought] == [content] * 4
    assert watched.fetched == ["bucket/data/a"]


def test_a_file_that_comes_in_part_is_fetched_again_and_never_left_here(store, tmp_path):
    put(store, a=b"whole")
    (file,) = find_files("s3://bucket/data/a")
    never, once = WatchedStore(file.store, broken=99), WatchedStore(file.store, broken=1)
    with pytest.raises(DataError, match=r"bucket/data/a cannot be fetched: 2 of 5 bytes came\. Try again\."):
        bring_near([replace(file, store=never)])
    assert len(never.fetched) == 3
    assert not [path for path in (tmp_path / "cache").rglob("a") if path.is_file()]
    (path,) = bring_near([replace(file, store=once)])
    assert (path.read_bytes(), len(once.fetched)) == (b"whole", 2)


def test_what_is_not_there_or_does_not_fit_is_refused(server, store, monkeypatch):
    put(store, a=b"12345")
    with pytest.raises(DataError, match=r"s3://bucket/data/b-\*: no data files there\. Name files or a pattern\."):
        open_records("s3://bucket/data/b-*")
    with pytest.raises(DataError, match="1 of 2 files are missing: s3://bucket/data/b"):
        match_files("s3://bucket/data/{a,b}", "files")
    with pytest.raises(DataError, match=r"nothing-knows://a: .*[Pp]rotocol.*Install multipod\[remote\]"):
        match_files("nothing-knows://a", "files")
    usage = shutil.disk_usage("/")._replace(free=4)
    monkeypatch.setattr("multipod.data.files.addresses.shutil.disk_usage", lambda folder: usage)
    with pytest.raises(
        DataError, match=r"bucket/data/a: 5 bytes are to be kept in .*, which has room for 4\. Set XDG_CACHE_HOME"
    ):
        bring_near(find_files("s3://bucket/data/a"))
    server.stop()
    try:
        s3fs.S3FileSystem.clear_instance_cache()
        with pytest.raises(DataError, match=r"s3://bucket/data/a cannot be reached: .*\. See it, and who you are\."):
            bring_near(find_files("s3://bucket/data/a"))
    finally:
        server.start()


@pytest.mark.parametrize("where", ["s3://bucket/folder", "gs:/bucket/folder", "https://x.org/a"])
def test_a_folder_of_a_store_is_refused(where):
    with pytest.raises(DataError, match=r"this is an address\. Copy it near \(.*\), or mount the store"):
        refuse_address(where)
    refuse_address("hub:/data/set:train")
    assert address_of("hub:/data/set:train") == address_of("/data/a") == address_of("a:b") == ""
