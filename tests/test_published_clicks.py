"""Click records from the files of DLRM's and MLPerf's own programs, made here in the same form."""

import numpy as np
import pytest
from click.testing import CliRunner

from multipod.cli.clicks import clicks
from multipod.data.clicks import published
from multipod.data.clicks.published import take
from multipod.data.clicks.records import Clicks
from multipod.errors import DataError

ROWS = 7


def day(seed: int, examples: int) -> dict[str, np.ndarray]:
    """A day as DLRM's preparation writes it."""
    rng = np.random.default_rng(seed)
    return {
        "X_int": rng.integers(0, 1000, (examples, 13)).astype(np.int32),
        "X_cat": rng.integers(0, ROWS, (examples, 26)).astype(np.int32),
        "y": rng.integers(0, 2, examples).astype(np.int32),
    }


def binary(*days: dict[str, np.ndarray]) -> bytes:
    """What MLPerf's preparation makes of days."""
    return b"".join(
        np.concatenate([one["y"][:, None], one["X_int"], one["X_cat"]], 1).astype(np.int32).tobytes() for one in days
    )


def assert_holds(source, wanted: dict[str, np.ndarray]) -> None:
    found = source.read(np.arange(len(source)))
    np.testing.assert_array_equal(found["label"], wanted["y"])
    np.testing.assert_array_equal(found["dense"], np.log1p(wanted["X_int"].astype(np.float32)))
    np.testing.assert_array_equal(found["ids"], wanted["X_cat"])


@pytest.fixture
def folder(tmp_path):
    """With three days, and what MLPerf's preparation makes of them."""
    days = [day(seed, count) for seed, count in enumerate((50, 41, 21))]
    for number, one in enumerate(days):
        np.savez_compressed(tmp_path / f"day_{number}_reordered.npz", **one)
    np.savez(tmp_path / "day_fea_count.npz", counts=np.full(26, ROWS))
    whole = binary(days[2])
    (tmp_path / "train_data.bin").write_bytes(binary(*days[:2]))
    (tmp_path / "test_data.bin").write_bytes(whole[: 11 * 160])
    (tmp_path / "val_data.bin").write_bytes(whole[11 * 160 :])
    return tmp_path, days


def test_days_and_the_three_binary_files_are_the_same_records(folder, monkeypatch):
    path, days = folder
    monkeypatch.setattr(published, "CHUNK", 16)
    counts = path / "day_fea_count.npz"
    take([*sorted(path.glob("day_?_*.npz")), counts], path / "days")
    take([*path.glob("*.bin"), counts], path / "three")
    learnt = {name: np.concatenate([days[0][name], days[1][name]]) for name in days[0]}
    for name in ("days", "three"):
        source = Clicks(str(path / name))
        assert source.rows == (ROWS,) * 26
        assert_holds(source.train(), learnt)
        assert_holds(source.test(), {name: array[:11] for name, array in days[2].items()})
        assert_holds(source.validation(), {name: array[11:] for name, array in days[2].items()})
    assert (path / "three" / "part-00000.bin").is_symlink()


def test_one_file_is_cut_into_days_and_brings_its_rows(folder):
    path, days = folder
    done = CliRunner().invoke(
        clicks, ["take", str(path / "day_0_reordered.npz"), "--out", str(path / "one"), "--days", "5"]
    )
    assert (done.exit_code, done.output) == (0, f"{path / 'one'}: 50 examples of 1 files\n")
    source = Clicks(str(path / "one"))
    assert (source.description["days"], len(source.train()), source.rows) == ([10] * 5, 40, (ROWS,) * 26)
    assert_holds(source.test(), {name: array[40:45] for name, array in days[0].items()})


def spoiled(path, **arrays):
    np.savez(path / "spoiled.npz", **(day(0, 9) | arrays))
    return [path / "spoiled.npz"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: [p / "nowhere.npz"], "there is no file .*nowhere.npz"),
        (lambda p: [p / "train_data.bin"], r"Give train_data.bin, test_data.bin and, .* each once"),
        (lambda p: [p / "train_data.bin", p / "day_0_reordered.npz"], r"files of .bin, .npz. Give .npz, one a day, or"),
        (lambda p: spoiled(p, y=np.full(9, 2)), "example 0 has label 2 .*Labels are 0 or 1, ids count from 0"),
        (lambda p: spoiled(p, y=np.zeros(8, int)), r"its arrays have \[8, 9\] examples. It is damaged"),
        (lambda p: spoiled(p, X_cat=np.zeros((9, 25), int)), r"X_cat is int64\[9, 25\], not numbers \[n, 26\]"),
        (lambda p: spoiled(p, X_int=np.full((9, 13), 2**40)), "example 0 has a number that is no int32"),
        (
            lambda p: [*spoiled(p, X_cat=np.full((9, 26), 99)), p / "day_fea_count.npz"],
            "field 3 has id 99, and 7 rows and 23 more",
        ),
    ],
)
def test_what_is_no_such_file_is_refused(folder, make, said):
    path, _ = folder
    with pytest.raises(DataError, match=said):
        take(make(path), path / "out")
    assert not (path / "out" / "clicks.json").exists()


def test_files_that_are_cut_off_or_of_two_preparations_are_refused(folder):
    path, _ = folder
    files = [path / "train_data.bin", path / "test_data.bin", path / "val_data.bin"]
    files[2].write_bytes(files[2].read_bytes()[: 5 * 160])
    with pytest.raises(DataError, match=r"has 11 examples and .* 5: they are no halves of a day"):
        take(files, path / "out")
    files[0].write_bytes(files[0].read_bytes()[:-4])
    with pytest.raises(DataError, match=r"no multiple of 160: it is cut off"):
        take(files, path / "other")


def test_click_records_of_a_store_are_refused():
    with pytest.raises(DataError, match=r"Copy it near \(aws s3 sync ...\), or mount the store"):
        Clicks("s3://bucket/clicks").train()
