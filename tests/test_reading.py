"""Reading ahead by threads and processes: the same batches, whatever happens to who makes them."""

import os
import signal
import time
from dataclasses import dataclass, field

import numpy as np
import pictures
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.data import workers
from multipod.data.batches import PART, TrainBatches
from multipod.data.images.files import ImageFiles
from multipod.data.order import (
    ByLength,
    FilesThenBuffer,
    OwnShares,
    batch_correlation,
    draw_for_rows,
    mix_by_buffer,
    padding_share,
)
from multipod.data.reading import InputOptions, ReadStatistics, Tuner
from multipod.data.source import ArraySource, with_cache
from multipod.errors import DataError


@dataclass(frozen=True, eq=False)
class Strange:
    """Numbers; reading some of them kills the process, at first or always, or fails."""

    folder: str
    kills: tuple[int, ...] = ()
    always: bool = False
    fails: int = -1
    hangs: bool = False
    statistics: ReadStatistics = field(default_factory=ReadStatistics)

    def __len__(self):
        return 40

    def read(self, numbers):
        for number in set(numbers.tolist()) & set(self.kills):
            mark = os.path.join(self.folder, str(number))
            if self.always or not os.path.exists(mark):
                open(mark, "w").close()
                if self.hangs:
                    time.sleep(600)
                os.kill(os.getpid(), signal.SIGKILL)
        if self.fails in numbers:
            raise DataError(f"number {self.fails} cannot be read.")
        if 7 in numbers:
            self.statistics.skip(7, "seven", "odd")
        return {"number": numbers, "square": np.stack([numbers, numbers**2], 1).astype(np.float32)}

    def augment(self, batch, rows, rng):
        return batch


def batches(source, batch=10):
    return TrainBatches(source, batch, 1, np.arange(batch))


def read_all(feed):
    for _ in range(8):
        next(feed)


def test_processes_make_the_batches_of_threads_and_one_that_dies_is_started_again(tmp_path):
    source = Strange(str(tmp_path), kills=(3,))
    expected = batches(Strange(str(tmp_path)))
    feed = batches(source).start(0, InputOptions(processes=1))
    for k in range(4):
        batch = next(feed)
        for name, array in expected[k].items():
            np.testing.assert_array_equal(batch[name], array)
            assert batch[name].dtype == array.dtype
    feed.close()
    assert (tmp_path / "3").exists()
    assert source.statistics.skipped.keys() <= {7}


def test_a_process_that_dies_again_stops_the_run_with_its_name(tmp_path):
    feed = batches(Strange(str(tmp_path), kills=(3,), always=True)).start(0, InputOptions(processes=1))
    with pytest.raises(
        DataError, match=r"reading process 0 \(pid \d+\) was killed by SIGKILL while it made batch \d, as"
    ):
        read_all(feed)
    feed.close()


@pytest.mark.slow
def test_a_process_that_hangs_is_replaced(tmp_path):
    expected = batches(Strange(str(tmp_path)))
    assert 3 not in expected.numbers(0)  # a first part may take longer
    feed = batches(Strange(str(tmp_path), kills=(3,), hangs=True)).start(0, InputOptions(processes=1, limit_s=8))
    for k in range(4):
        np.testing.assert_array_equal(next(feed)["number"], expected[k]["number"])
    feed.close()
    assert (tmp_path / "3").exists()


def test_a_process_that_hangs_again_stops_the_run_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "FIRST_S", 2.0)
    feed = batches(Strange(str(tmp_path), kills=(3,), always=True, hangs=True)).start(
        0, InputOptions(processes=1, limit_s=2)
    )
    with pytest.raises(DataError, match=r"reading process 0 \(pid \d+\) gave no answer for 2 s.*raise --read-limit"):
        read_all(feed)
    feed.close()


def test_what_a_process_or_a_thread_meets_reaches_the_run(tmp_path):
    for reading in (InputOptions(processes=1), InputOptions(threads=2)):
        feed = batches(Strange(str(tmp_path), fails=5)).start(0, reading)
        with pytest.raises(DataError, match="number 5 cannot be read"):
            read_all(feed)
        feed.close()


def test_a_source_that_cannot_travel_is_refused():
    source = ArraySource({"x": np.arange(4)})
    object.__setattr__(source, "arrays", {"x": np.arange(4), "f": lambda: 0})
    with pytest.raises(DataError, match="cannot be sent to a reading process"):
        TrainBatches(source, 2, 0, np.arange(2)).start(0, InputOptions(processes=1))


@pytest.mark.parametrize("threads", [1, 3])
def test_large_batches_are_made_in_parts_and_joined(threads):
    batch = 3 * PART + 5
    source = ArraySource({"number": np.arange(500)})
    whole = TrainBatches(source, batch, 2, np.arange(batch), padded=True)
    feed = whole.start(2, InputOptions(threads=threads))
    for k in (2, 3):
        found = next(feed)
        np.testing.assert_array_equal(found["number"], whole[k]["number"])
        assert found["mask"].all()
    feed.close()


@pytest.mark.parametrize("hosts", [1, 2, 3])
def test_a_run_resumed_on_other_hosts_reads_the_same_ids(tmp_path, hosts):
    """The ids of a run on one host, and of one that stops after batch 3 and goes on on others with more readers."""
    data = ImageFiles(str(pictures.write_folder(tmp_path, 20)), pixels=8)
    one = batches(data.train(), 6)
    log = [one.numbers(k) for k in range(7)]
    assert sorted(np.concatenate(log)[:20]) == list(range(20))
    assert sorted(np.concatenate(log)[20:40]) == list(range(20))
    for rows in np.array_split(np.arange(6), hosts):
        share = TrainBatches(data.train(), 6, 1, rows)
        feed = share.start(3, InputOptions(threads=hosts))
        for k in range(3, 7):
            np.testing.assert_array_equal(next(feed)["image"], one[k]["image"][rows])
            np.testing.assert_array_equal(share.numbers(k), log[k])
        feed.close()


def test_threads_grow_while_devices_wait_and_stay_when_it_does_not_help():
    tuner = Tuner(InputOptions(), window=4, cores=8)
    for share in (0.5, 0.2, 0.05, 0.0, 0.0):
        for _ in range(4):
            tuner.adapt(share, 1.0)
    assert (tuner.threads, tuner.ahead) == (8, 2)
    slow = Tuner(InputOptions(), window=4, cores=8)
    for _ in range(16):  # reading takes all of an update: the share stays, the update halves
        slow.adapt(1.0 / slow.threads, 1.01 / slow.threads)
    assert slow.threads == 8
    stuck = Tuner(InputOptions(), window=4, cores=64)
    for _ in range(40):
        stuck.adapt(0.5, 1.0)
    assert (stuck.threads, stuck.ahead) == (1, 8)
    fixed = Tuner(InputOptions(threads=3, ahead=5), window=4, cores=8)
    assert not any(fixed.adapt(0.9, 1.0) for _ in range(40))
    assert (fixed.threads, fixed.ahead) == (3, 5)


def test_a_feed_that_is_tuned_goes_on_at_its_place():
    source = ArraySource({"number": np.arange(50)})
    whole = batches(source)
    feed = whole.start(0)
    feed.tuner.window, feed.tuner.cores = 2, 4
    for k in range(12):
        np.testing.assert_array_equal(next(feed)["number"], whole[k]["number"])
        feed.adapt(0.5 / (k + 1), 1.0)
    assert feed.tuner.threads == 4
    feed.close()


@given(rows=st.lists(st.integers(0, 300), min_size=1, max_size=8), count=st.integers(1, 23), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_what_is_drawn_for_some_rows_is_what_the_whole_batch_draws(rows, count, seed):
    rows = np.sort(rows)
    for bits in (np.random.Philox(key=seed), np.random.PCG64(seed)):
        fresh = bits.state
        expected = np.random.Generator(bits).random((301, count))[rows]
        bits.state = fresh
        np.testing.assert_array_equal(draw_for_rows(rows, count, np.random.Generator(bits)), expected)


def test_readings_that_cannot_be_are_refused():
    with pytest.raises(DataError, match=r"limit_s=0"):
        InputOptions(limit_s=0)
    with pytest.raises(DataError, match=r"threads=-1; processes=2 with a cache.*"):
        InputOptions(threads=-1, processes=2, cache_bytes=5)
    with pytest.raises(DataError, match="decodes nothing that a cache could keep"):
        with_cache(ArraySource({"x": np.arange(3)}), 100)
    with pytest.raises(DataError, match="the training data have no examples"):
        batches(ArraySource({"x": np.arange(0)}))


@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    files=st.integers(1, 4),
    buffer=st.integers(1, 30),
    epoch=st.integers(0, 3),
)
@settings(max_examples=80, deadline=None)
def test_two_levels_of_shuffling_read_everything_once(sizes, files, buffer, epoch):
    order = FilesThenBuffer(files, buffer).epoch(np.cumsum(sizes), 5, epoch)
    assert sorted(order) == list(range(sum(sizes)))
    np.testing.assert_array_equal(order, FilesThenBuffer(files, buffer).epoch(np.cumsum(sizes), 5, epoch))


@given(
    count=st.integers(1, 120),
    batch=st.integers(1, 24),
    shares=st.integers(1, 6),
    epoch=st.integers(0, 4),
)
@settings(max_examples=100, deadline=None)
def test_rows_read_their_own_share_and_every_example_once(count, batch, shares, epoch):
    order = OwnShares(shares).epoch(np.array([count]), 3, epoch, batch)
    assert sorted(order) == list(range(count))
    rows = (np.arange(count) + epoch * count) % batch
    strangers = (order * shares // count != rows * shares // batch).sum()
    if batch % shares == 0 and count % shares == 0:
        assert strangers <= batch


def test_caches_of_hosts_hold_their_own_share(tmp_path):
    """Two hosts: over three epochs each reads about half of the examples."""
    data = ImageFiles(str(pictures.write_folder(tmp_path, 48)), pixels=8, own_shares=4)
    feeds = [TrainBatches(data.train(), 8, 0, rows) for rows in np.split(np.arange(8), 2)]
    seen = [{int(n) for k in range(18) for n in feed.numbers(k)[feed.rows]} for feed in feeds]
    assert [len(own) for own in seen] == [24, 24]
    assert seen[0] | seen[1] == set(range(48))
    with pytest.raises(DataError, match="are two orders"):
        ImageFiles(own_shares=2, shuffle_files=2)


def test_a_buffer_as_large_as_the_data_shuffles_and_one_of_one_does_nothing():
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(mix_by_buffer(np.arange(9), 1, rng), np.arange(9))
    places = np.array([mix_by_buffer(np.arange(8), 8, rng) for _ in range(4000)])
    assert np.abs(places.mean(0) - 3.5).max() < 0.15
    with pytest.raises(DataError, match="at least one file is read at a time"):
        FilesThenBuffer(0, 5)


def test_the_correlation_of_batches_falls_as_the_buffer_grows():
    groups = np.repeat(np.arange(20), 100)
    ends = np.arange(100, 2001, 100)
    assert batch_correlation(groups, 50) == pytest.approx(1)
    found = [
        batch_correlation(groups[FilesThenBuffer(1, buffer).epoch(ends, 0, 0)], 50) for buffer in (1, 50, 400, 2000)
    ]
    assert found[0] == pytest.approx(1)
    assert found == sorted(found, reverse=True)
    assert abs(found[-1]) < 0.01
    assert batch_correlation(np.random.default_rng(0).permutation(groups), 50) == pytest.approx(0, abs=0.01)
    assert batch_correlation(np.zeros(10), 5) == 0


@given(count=st.integers(1, 90), batch=st.integers(1, 12), epoch=st.integers(0, 4), seed=st.integers(0, 5))
@settings(max_examples=80, deadline=None)
def test_batches_of_like_lengths_read_everything_once(count, batch, epoch, seed):
    lengths = np.random.default_rng(seed).integers(1, 65, count)
    order = ByLength((16, 32, 64)).epoch(lengths, seed, epoch, batch)
    assert sorted(order) == list(range(count))


def test_batches_of_like_lengths_hold_little_padding():
    lengths = np.random.default_rng(0).integers(1, 129, 4000)
    by_length = ByLength(tuple(range(8, 129, 8)))
    order = by_length.epoch(lengths, 0, 0, 32)
    assert padding_share(lengths, order, 32, by_length.bounds) < 0.09
    assert padding_share(lengths, np.random.default_rng(1).permutation(4000), 32, by_length.bounds) > 0.45
    assert by_length.length(np.array([3, 17])) == 24
    with pytest.raises(DataError, match="example 1 has 200 tokens, and the longest batch 128"):
        by_length.buckets(np.array([3, 200]))
    with pytest.raises(DataError, match="increasing"):
        ByLength((4, 2))
