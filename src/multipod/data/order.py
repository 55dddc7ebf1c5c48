"""Orders in which an epoch can be read, and what they do to batches. Pure functions of their arguments."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from multipod.errors import DataError


def generator(seed: int, epoch: int) -> np.random.Generator:
    """Random numbers of one epoch's order."""
    # The counter keeps it apart from the draws of the augmentation.
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 1, epoch]))


def draw_for_rows(rows: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` numbers in [0, 1) for each of these rows of a batch, [len(rows), count], whoever reads the other rows.

    They are those that `rng.random((batch, count))[rows]` gives. With Philox only those from the first row to the last
    are made: a host that reads a hundredth of a batch need not draw for all of it.
    """
    first, last = int(rows.min(initial=0)), int(rows.max(initial=-1))
    bits = rng.bit_generator
    if not isinstance(bits, np.random.Philox) or bits.state["buffer_pos"] != 4:
        return rng.random((last + 1, count))[rows]
    skipped = first * count
    bits.advance(skipped // 4)  # it counts in fours
    rng.random(skipped % 4)
    return rng.random((last + 1 - first, count))[rows - first]


@dataclass(frozen=True)
class FilesThenBuffer:
    """Two levels: files in random order, `files` of them read in turn, then a buffer that mixes.

    What a run does that cannot read by place, or not fast (Parquet, disks that turn). The buffer holds `buffer`
    examples; each time one of them goes out, at random, and the next comes in. The smaller it is, the more alike are
    the examples of a batch where files hold like examples: `batch_correlation` tells.

    Source: the order of BERT's input in Google's MLPerf v0.7 code (arXiv:2011.03641, section 3.5).

    Attributes:
      files: read in turn, one example of each.
      buffer: examples.
    """

    files: int = 4
    buffer: int = 1000

    def __post_init__(self) -> None:
        if self.files < 1 or self.buffer < 1:
            raise DataError(f"{self}: at least one file is read at a time, and one example kept. Give 1 or more.")

    def epoch(self, file_ends: np.ndarray, seed: int, epoch: int, batch: int = 1) -> np.ndarray:
        """Every number once, int64; `file_ends` as `Records` has them. Time: 0.3 s a million examples."""
        rng = generator(seed, epoch)
        firsts = np.append(0, file_ends[:-1])
        order = rng.permutation(len(file_ends))
        stream = np.concatenate(list(_in_turn(firsts[order], file_ends[order], self.files)) or [np.zeros(0, np.int64)])
        return mix_by_buffer(stream, self.buffer, rng)


@dataclass(frozen=True)
class OwnShares:
    """Each row of a batch reads its own share of the examples, so that a host's cache need not hold those of others.

    The examples are cut by number into `shares` equal parts, and so are the rows of a batch; share s of the rows reads
    part s, in a new random order each epoch. A host that holds rows of `shares` / hosts shares caches so much of the
    data, whatever the number of hosts, as long as it divides `shares`. Where batch and data do not fit each other, some
    examples (fewer than a batch in an epoch) change shares: every one is still read once an epoch.

    What it costs: batches are less mixed, as each holds equally many examples of every share. Google's multipod had one
    share a host (arXiv:2011.03641, section 3.5).

    Attributes:
      shares: at least as many as there are hosts; a property of the run, not of where it runs.
    """

    shares: int

    def __post_init__(self) -> None:
        if self.shares < 1:
            raise DataError(f"{self}: there is at least one share. Give 1 or more.")

    def epoch(self, file_ends: np.ndarray, seed: int, epoch: int, batch: int = 1) -> np.ndarray:
        """Every number once, int64. Batches are cut at multiples of `batch` over all epochs."""
        rng, count = generator(seed, epoch), int(file_ends[-1])
        rows = (np.arange(count) + epoch * count) % batch
        wanted = rows * self.shares // batch  # the share that each place reads
        order = np.full(count, -1, np.int64)
        ends = np.arange(self.shares + 1) * count // self.shares
        places = np.split(
            np.argsort(wanted, kind="stable"), np.searchsorted(np.sort(wanted), np.arange(1, self.shares))
        )
        left = []
        for own, first, end in zip(places, ends[:-1], ends[1:], strict=True):
            examples = rng.permutation(np.arange(first, end))
            fits = min(len(own), len(examples))
            order[own[:fits]] = examples[:fits]
            left.append(examples[fits:])
        order[order < 0] = rng.permutation(np.concatenate(left))
        return order


@dataclass(frozen=True)
class InBlocks:
    """Blocks of `examples` that follow each other in the data, in random order; each is read in one go.

    What large tables of small examples need, as recommendation data: one record is one batch. Examples of a block stay
    together, so they must have been shuffled when they were written (`multipod data convert --shuffle`).

    Source: DLRM's input in Google's MLPerf v0.7 code (arXiv:2011.03641).

    Attributes:
      examples: of a block; the last may be shorter.
    """

    examples: int

    def __post_init__(self) -> None:
        if self.examples < 1:
            raise DataError(f"{self}: a block has at least one example. Give the batch, or a part of it.")

    def epoch(self, file_ends: np.ndarray, seed: int, epoch: int, batch: int = 1) -> np.ndarray:
        """Every number once, int64."""
        count = int(file_ends[-1])
        firsts = generator(seed, epoch).permutation(-(-count // self.examples)) * self.examples
        order = (firsts[:, None] + np.arange(self.examples)).ravel()
        return order[order < count]


Order = FilesThenBuffer | OwnShares | InBlocks
"""Orders by where examples lie."""


def epoch_of(order: Order | None, file_ends: np.ndarray, seed: int, epoch: int, batch: int) -> np.ndarray:
    """The numbers of all examples of an epoch, each once: as `order` says, at random if it is None."""
    if order is not None:
        return order.epoch(file_ends, seed, epoch, batch)
    return generator(seed, epoch).permutation(file_ends[-1] if len(file_ends) else 0)


def _in_turn(firsts: np.ndarray, ends: np.ndarray, files: int) -> Iterator[np.ndarray]:
    """Numbers of files, `files` at a time, one of each in turn. A file that is read out gives its place to the next."""
    waiting = [range(first, end) for first, end in zip(firsts.tolist(), ends.tolist(), strict=True) if first < end]
    waiting.reverse()
    active: list[range] = []
    while waiting or active:
        while waiting and len(active) < files:
            active.append(waiting.pop())
        rounds = min(map(len, active))
        yield np.stack([one[:rounds] for one in active], axis=1).ravel()
        active = [one[rounds:] for one in active if len(one) > rounds]


def mix_by_buffer(stream: np.ndarray, buffer: int, rng: np.random.Generator) -> np.ndarray:
    """`stream` as it leaves a buffer of so many places, each time from a random one of them."""
    room = min(buffer, len(stream))
    kept = stream[:room].tolist()
    places = rng.integers(room, size=len(stream) - room).tolist() if room else []
    out = []
    for coming, place in zip(stream[room:].tolist(), places, strict=True):
        out.append(kept[place])
        kept[place] = coming
    return np.array([*out, *rng.permutation(np.array(kept, np.int64)).tolist()], np.int64)


def batch_correlation(groups: np.ndarray, batch: int) -> float:
    """How alike the examples of a batch are: 0 as if drawn at random, 1 if each batch is of one group.

    `groups` are the groups of the examples (file, class) in the order in which they are read. With p the share of
    pairs in a batch that are of one group, and q that of all pairs, it is (p - q) / (1 - q): the intraclass
    correlation of who belongs where. Examples after the last whole batch do not count.
    """
    whole = len(groups) // batch * batch
    if batch < 2 or not whole:
        raise DataError(f"a batch of {batch} out of {len(groups)} examples has no pairs. Take a batch of 2 or more.")
    _, numbers = np.unique(groups, return_inverse=True)
    alike = _alike(np.bincount(numbers)) / _pairs(len(numbers))
    rows = numbers[:whole].reshape(-1, batch)
    counts = np.zeros((len(rows), numbers.max() + 1), np.int64)
    np.add.at(counts, (np.arange(len(rows))[:, None], rows), 1)
    within = _alike(counts.ravel()) / (len(rows) * _pairs(batch))
    return float((within - alike) / (1 - alike)) if alike < 1 else 0.0


def _pairs(count: int) -> int:
    return count * (count - 1)


def _alike(counts: np.ndarray) -> int:
    return int((counts.astype(np.int64) * (counts - 1)).sum())


@dataclass(frozen=True)
class ByLength:
    """Batches of like lengths, so that little of them is padding; the whole batch, over all hosts, has one length.

    If each host chose for itself, all would wait for the one with the longest sequences at every update.

    Source: GNMT in Google's MLPerf v0.6 code, whose comment says up to 50 % faster (arXiv:1909.09756).

    Attributes:
      bounds: lengths of batches, increasing; an example goes to the first that holds it.
    """

    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.bounds or list(self.bounds) != sorted(set(self.bounds)) or self.bounds[0] < 1:
            raise DataError(
                f"bounds={self.bounds}: lengths of batches are whole numbers above 0, increasing. Give some."
            )

    def buckets(self, lengths: np.ndarray) -> np.ndarray:
        """For each example, which of `bounds` is the first that holds it.

        Raises:
          DataError: one is longer than all.
        """
        found = np.searchsorted(self.bounds, lengths)
        if len(found) and found.max() == len(self.bounds):
            long = int(np.argmax(lengths))
            raise DataError(
                f"example {long} has {lengths[long]} tokens, and the longest batch {self.bounds[-1]}. Cut it, or add a "
                "bound."
            )
        return found

    def length(self, lengths: np.ndarray) -> int:
        """The length of a batch of these examples."""
        return self.bounds[int(self.buckets(lengths).max())]

    def epoch(self, lengths: np.ndarray, seed: int, epoch: int, batch: int) -> np.ndarray:
        """Every number once, int64. Batches are cut at multiples of `batch` over all epochs.

        What fills no batch of its own bucket is put, sorted, into batches of several. Batches that hold the end of
        one epoch and the start of the next are of all lengths.
        """
        rng = generator(seed, epoch)
        order = rng.permutation(len(lengths))
        head = min(-epoch * len(lengths) % batch, len(lengths))
        tail = (len(lengths) - head) % batch
        first, middle, last = np.split(order, [head, len(order) - tail])
        buckets = self.buckets(lengths[middle])
        whole, left = [], []
        for bucket in range(len(self.bounds)):
            members = middle[buckets == bucket]
            cut = len(members) // batch * batch
            whole.append(members[:cut])
            left.append(members[cut:])
        batches = np.concatenate([*whole, *left]).reshape(-1, batch)
        return np.concatenate([first, rng.permutation(batches).ravel(), last])


def padding_share(lengths: np.ndarray, order: np.ndarray, batch: int, bounds: Sequence[int]) -> float:
    """The share of all places in the batches of `order` that hold padding, if each has the least bound that fits."""
    rows = lengths[order[: len(order) // batch * batch]].reshape(-1, batch)
    sizes = np.asarray(bounds)[np.searchsorted(bounds, rows.max(1))]
    return float(1 - rows.sum() / (sizes.sum() * batch))
