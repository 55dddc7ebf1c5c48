"""The loop's input: the next batch on the mesh, and which examples this process gives to it."""

from collections import deque
from collections.abc import Iterator, Sequence

from multipod.data.batches import Prefetcher, TrainBatches
from multipod.data.global_arrays import owned_rows
from multipod.data.reading import InputOptions, statistics_of
from multipod.data.source import HostBatch, with_cache
from multipod.layout.mesh import batch_sharding
from multipod.pytrees import Batch
from multipod.step.memory_layout import InputFormats
from multipod.step.program import Program
from multipod.train.clock import Clock
from multipod.train.evaluation import ExampleChecks


class TrainInput:
    """The batches of a run, from the host's data to arrays on the mesh."""

    def __init__(self, program: Program, reading: InputOptions, clock: Clock) -> None:
        recipe = program.recipe
        self.program, self.reading, self.clock = program, reading, clock
        self.rows = owned_rows(batch_sharding(program.mesh), program.rows)
        self.source = with_cache(recipe.data.train(), reading.cache_bytes, reading.cache_folder)
        self.batches = TrainBatches(self.source, recipe.batch, recipe.seed, self.rows, program.padded)
        self.statistics = statistics_of(self.source)
        self.formats: InputFormats | None = None
        self._check = ExampleChecks(recipe.model)

    def start(self, position: int) -> Prefetcher:
        """Begins to read ahead, from this place in the data; close it at the end."""
        return self.batches.start(position, self.reading)

    def next_batch(self, incoming: Iterator[HostBatch]) -> tuple[Batch, float]:
        """The next batch on the mesh, and the seconds spent waiting for it to arrive from the host pipeline."""
        start_s = self.clock()
        host = next(incoming)
        waited_s = self.clock() - start_s
        self._check(host)
        return self._place(host), waited_s

    def example_numbers(self, position: int) -> list[int]:
        """The numbers of the examples that this process gives to the update at this place in the data."""
        rows = self.rows[self.rows < self.program.recipe.batch]  # without padding
        numbers: list[int] = self.batches.numbers(position)[rows].tolist()
        return numbers

    def _place(self, host: HostBatch) -> Batch:
        return self.program.place_batch(host, self.rows, self.program.rows, self.formats)


class WaitingBatches:
    """Batches on the mesh that the devices get next, in their order."""

    def __init__(self, source: TrainInput, incoming: Iterator[HostBatch]) -> None:
        self._source, self._incoming = source, incoming
        self._waiting: deque[Batch] = deque()

    def fill(self, count: int) -> float:
        """Fetches until so many wait; returns the seconds spent waiting for them."""
        waited_s = 0.0
        while len(self._waiting) < count:
            batch, seconds = self._source.next_batch(self._incoming)
            self._waiting.append(batch)
            waited_s += seconds
        return waited_s

    def take(self, count: int) -> list[Batch]:
        """The next so many."""
        self.fill(count)  # after a bad update there may be fewer
        return [self._waiting.popleft() for _ in range(count)]

    def give_back(self, batches: Sequence[Batch]) -> None:
        """Puts those first that were taken for nothing."""
        self._waiting.extendleft(reversed(batches))
