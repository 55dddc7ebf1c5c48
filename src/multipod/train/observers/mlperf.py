"""The log of an MLPerf run, written as it goes: `mllog.txt` in the run's folder."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from multipod.layout.axes import DATA_AXES
from multipod.mlperf.benchmarks import Benchmark, benchmark_of
from multipod.mlperf.initialisation import initialised_tensors
from multipod.mlperf.lines import Line, place_of_caller, read_lines
from multipod.mlperf.settings import LoggedRun, settings_of
from multipod.models.pixels import behind_pixels
from multipod.nn.images.batch_norm import Tile, spanned_examples
from multipod.nn.layered import shapes_of
from multipod.nn.model import nested_models
from multipod.recipe.recipe import Recipe
from multipod.train.events import Compiled, Ended, Evaluated, Event, Regrouped, Started, Updated
from multipod.train.observers.jsonl import replace_file

SUBMISSION = {
    "submission_org": "not named",
    "submission_platform": "not named",
    "submission_division": "open",
    "submission_status": "research",
}
"""What nobody knows before a result is handed in: `multipod mlperf package` puts names there."""


class MlperfLog:
    """Writes each event as lines of MLPerf's, to the file at once.

    A block is what lies between two evaluations. `run_stop` says success where an evaluation was at the benchmark's
    target, and nothing is written behind it; a run that ends without says aborted. A run that goes on keeps its log up
    to the checkpoint and adds `multipod_resumed`, or, after some processes were lost, `multipod_regrouped`: the
    official checker passes over both, and `multipod mlperf check` tells of them.

    Args:
      path: the log.
      recipe: what is run.
      now_ms: the time, in milliseconds since 1970.

    Raises:
      MlperfError: the recipe's model is none of a benchmark's.
      OSError: the file cannot be opened, or, when called, written.
    """

    def __init__(self, path: Path, recipe: Recipe, now_ms: Callable[[], float] = lambda: time.time() * 1e3) -> None:
        self._benchmark: Benchmark = benchmark_of(recipe)
        self._path, self._recipe, self._now_ms = path, recipe, now_ms
        self._examples = len(recipe.data.train())
        self._file: TextIO = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)
        self._update = self._block = 0
        self._in_block = self._stopped = False

    def __call__(self, event: Event) -> None:
        """Writes what the log says of one event."""
        match event:
            case Started():
                self._start(event)
            case _ if self._stopped:
                return
            case Compiled():
                if self._has("run_start"):
                    return
                self._write("init_stop")
                self._write("run_start")
            case Updated():
                self._update = event.update
                if not self._in_block:
                    self._begin_block(event.update - 1, event.step_s)
            case Evaluated():
                self._evaluate(event)
            case Regrouped():
                kept = {"processes": event.processes, "repeated": event.repeated, "seconds": event.seconds}
                self._write("multipod_regrouped", event.generation, metadata=kept | self._place(event.update))
            case Ended():
                self._end_block(0.0)
                self._write("run_stop", metadata={"status": "aborted"} | self._place(event.update))
                self._stopped = True
        self._file.flush()

    def close(self) -> None:
        """Closes the file; later calls do nothing."""
        self._file.close()

    def _start(self, event: Started) -> None:
        self._update = self._block = event.update
        goes_on = self._path.stat().st_size > 0 or event.update > 0
        if goes_on:
            self._keep_until(event.update)
        if not self._has("init_start"):
            self._write("init_start", seconds_ago=event.began_s)
            self._write("cache_clear", False)
            self._write("submission_benchmark", self._benchmark.name)
            for key, value in SUBMISSION.items():
                self._write(key, value)
            for setting in settings_of(self._benchmark, self._settings(event.facts)):
                self._write(setting.key, setting.value, metadata=dict(setting.metadata))
            self._tell_tensors(event)
        if goes_on:
            self._write("multipod_resumed", event.update, metadata=self._place(event.update))
        self._stopped = self._has("run_stop")

    def _tell_tensors(self, event: Started) -> None:
        """A line for each tensor that the run begins with.

        Those that were loaded have one only by a name of the rules, which ask for it of BERT's and SSD's too.
        """
        model: Any = self._recipe.model
        names = tuple(shapes_of(model))
        loaded = event.facts.get("weights_from", "a checkpoint" if event.update else "")
        drawn = {*event.facts.get("weights_drawn", ())} if loaded else {*names}
        for tensor in initialised_tensors(self._benchmark, behind_pixels(model), names):
            is_drawn = drawn.issuperset(tensor.parameters)
            if is_drawn or tensor.in_rules:
                told = {"parameters": tensor.parameters, "from": "drawn" if is_drawn else loaded}
                self._write("weights_initialization", metadata={"tensor": tensor.name} | told)

    def _settings(self, facts: dict[str, Any]) -> LoggedRun:
        recipe = self._recipe
        rows, columns = (facts.get("mesh", {}).get(axis, 1) for axis in DATA_AXES)
        tiles = (getattr(model, "batch_norm_tile", None) for _, model in nested_models(recipe.model))
        tile: Tile = next((tile for tile in tiles if tile), "all")
        norm = spanned_examples(tile, recipe.batch // recipe.accumulate, (rows, columns))
        return LoggedRun(recipe, self._examples, len(recipe.data.test()), norm)

    def _evaluate(self, event: Evaluated) -> None:
        self._end_block(event.seconds)
        place = self._place(event.update)
        self._write("eval_start", metadata=place, seconds_ago=event.seconds)
        quality = self._benchmark.quality(event.values)
        if quality is not None:
            self._write("eval_accuracy", quality.get("", quality), metadata=place)
        self._write("eval_stop", metadata=place)
        self._block = event.update
        if quality is not None and self._benchmark.is_met(quality):
            self._write("run_stop", metadata={"status": "success"} | place)
            self._stopped = True

    def _begin_block(self, update: int, seconds_ago: float) -> None:
        self._block, self._in_block = update, True
        every = self._recipe.evaluate_every or self._recipe.updates
        to = min(update - update % every + every, self._recipe.updates)
        count = max(self._epochs(to - update), 1e-9)
        self._write(
            "block_start",
            metadata={"first_epoch_num": self._first_epoch(update), "epoch_count": count} | self._samples(update),
            seconds_ago=seconds_ago,
        )

    def _end_block(self, seconds_ago: float) -> None:
        if self._in_block:
            first = {"first_epoch_num": self._first_epoch(self._block)}
            self._write("block_stop", metadata=first | self._samples(self._update), seconds_ago=seconds_ago)
        self._in_block = False

    def _first_epoch(self, update: int) -> float:
        """The epoch that a block behind so many updates begins in or with; the first is 1."""
        return 1 + self._epochs(update)

    def _epochs(self, updates: int) -> float:
        """Epochs in so many updates: whole where that is less than an update away."""
        epochs = updates * self._recipe.batch / self._examples
        near = abs(epochs - round(epochs)) * self._examples < self._recipe.batch
        return round(epochs) if near and round(epochs) else round(epochs, 6)

    def _samples(self, update: int) -> dict[str, Any]:
        return {"samples_count": update * self._recipe.batch}

    def _place(self, update: int) -> dict[str, Any]:
        samples = self._samples(update)
        counted = samples["samples_count"] if self._benchmark.counts == "examples" else self._epochs(update)
        return {"epoch_num": counted} | samples

    def _has(self, key: str) -> bool:
        self._file.flush()
        return any(line.key == key for line in read_lines(self._path))

    def _keep_until(self, update: int) -> None:
        """Takes out what happened behind an update, and that the run stopped there without its target."""
        most = update * self._recipe.batch
        kept = [
            line
            for line in read_lines(self._path)
            if line.metadata.get("samples_count", 0) <= most and line.metadata.get("status") != "aborted"
        ]
        self._file.close()
        replace_file(self._path, "".join(line.encode() for line in kept).encode())
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed by `close`)

    def _write(
        self, key: str, value: Any = None, metadata: dict[str, Any] | None = None, seconds_ago: float = 0.0
    ) -> None:
        time_ms = round(self._now_ms() - seconds_ago * 1e3)
        self._file.write(Line(key, value, time_ms, place_of_caller() | (metadata or {})).encode())
