"""Evaluation of a state on a test set: at once, or batch by batch behind the updates of a run that goes on."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multipod.data.batches import evaluation_batches
from multipod.data.global_arrays import owned_rows
from multipod.data.reading import InputOptions
from multipod.data.source import HasGroundTruth, HostBatch, Source
from multipod.errors import MetricError
from multipod.layout.mesh import batch_sharding
from multipod.metrics.coco import Detections, merge_detections
from multipod.metrics.hosts import gather_parts
from multipod.metrics.jax_processes import JaxProcesses
from multipod.metrics.labels import check_labels
from multipod.metrics.objective import Detects, JudgesAnswers, report_of
from multipod.metrics.scores import batched_auc, local_rows
from multipod.nn.model import ChecksBatches, HasClasses, Model
from multipod.recipe.recipe import Recipe
from multipod.step.evaluate import ScoredLabels
from multipod.step.program import Program
from multipod.step.state import State, Sums
from multipod.train.clock import Clock
from multipod.train.detections import PendingJudgement, local_detections
from multipod.train.events import Evaluated

AHEAD = 8
"""Test batches that are given to the devices ahead of the one that the host waits for."""


def evaluate(program: Program, state: State, test: Source, reading: InputOptions | None = None) -> dict[str, float]:
    """The sums of the objective's values over all of `test`, each example counted once; `count` is their number.

    The last batch is padded to the mesh and the padding masked, so any number of devices gives the
    same counts. An objective that `Scores` examples also gets `auc`, exact, over all examples; one that `Detects`
    objects gets COCO's average precision.

    Raises:
      MetricError: there is no example, or labels are no classes.
    """
    batches: list[PendingBatch] = []
    for batch in _dispatched(program, program.evaluation.prepare(state), test, reading):
        batches.append(batch)
        # Sums stay on the devices and come back once, at the end: this only bounds the inputs that lie there.
        jax.block_until_ready([earlier.sums for earlier in batches[-AHEAD - 1 : -AHEAD]])
    pending = _judgement(batches, program, test)
    return _added(batches, program.recipe) | (pending.values(wait=True) or {} if pending else {})


def detect(program: Program, state: State, test: Source, first: int) -> Detections:
    """What is detected in the `first` examples of `test`; the same on all processes, each of which must call it.

    Raises:
      MetricError: the objective detects nothing, or the test data have no ground truth.
    """
    objective = program.recipe.objective
    if not isinstance(objective, Detects) or not isinstance(test, HasGroundTruth):
        raise MetricError(f"{type(objective).__name__} on {type(test).__name__} detects nothing that can be judged.")
    ready = program.evaluation.prepare(state)
    batches = []
    for batch in _dispatched(program, ready, First(test, first), None):
        jax.block_until_ready(batch.sums)
        if isinstance(batch.scores, dict):
            batches.append((batch.scores, batch.mask))
    found = local_detections(batches, objective.kinds, test)
    return merge_detections(gather_parts(lambda: found, Detections, JaxProcesses()))


@dataclass(frozen=True)
class First:
    """The first examples of a source, as evaluation sees them."""

    source: Source
    count: int

    def __len__(self) -> int:
        return min(self.count, len(self.source))

    def read(self, numbers: np.ndarray) -> HostBatch:
        """The examples."""
        return self.source.read(numbers)

    def augment(self, batch: HostBatch, rows: np.ndarray, rng: np.random.Generator) -> HostBatch:
        """The batch itself."""
        return batch


class PendingBatch(NamedTuple):
    """A batch whose evaluation is under way: its sums, its scores, answers or detections, and this process's mask."""

    sums: Sums
    scores: ScoredLabels
    mask: np.ndarray


def check_not_empty(test: Source) -> None:
    """Refuses a test set without examples.

    Raises:
      MetricError: it has none.
    """
    if not len(test):
        raise MetricError(
            "evaluation: the test set has no examples, so nothing could be said of the run. Give the data a test set: "
            "keep a share of the training examples back, or check the path or filter that chose none."
        )


@dataclass
class BackgroundEvaluation:
    """An evaluation that goes on while training does, on a copy of the weights that it began with.

    Each `advance` reads one batch of the test set and puts its evaluation behind what the devices are doing, and waits
    for nothing but the batch before it. When all are on their way a thread waits for the sums and finishes them. The
    copy costs the memory of the weights; the values are those of an evaluation at once, bit for bit.

    All processes of a run call `advance` at the same updates, because evaluations are collectives.
    """

    program: Program
    state: State
    test: Source
    reading: InputOptions | None
    clock: Clock
    began: float = 0.0
    update: int = 0
    _sums: list[PendingBatch] = field(default_factory=list)
    _todo: Iterator[PendingBatch] | None = None
    _values: Future[tuple[dict[str, float], dict[str, float], float]] | None = None
    _pending: PendingJudgement | None = None

    def __post_init__(self) -> None:
        self.began, self.update = self.clock(), int(self.state.update)
        # The next update gives its state up.
        seen = self.program.evaluation.prepare(self.state)
        copied = jax.tree.map(jnp.copy, (seen.params, seen.statistics))
        self.state = seen._replace(params=copied[0], statistics=copied[1])
        self._todo = _dispatched(self.program, self.state, self.test, self.reading)

    def advance(self) -> Evaluated | None:
        """Dispatches the evaluation of the next batch; the event, once all are done.

        Raises:
          MetricError: there is no example, labels are no classes, or what the objective's `finish` refuses.
        """
        if self._todo is not None:
            # Behind an update there is one evaluation under way and no more: CPU devices can lock up over several.
            jax.block_until_ready(self._sums[-1:])
            sums = next(self._todo, None)
            if sums is not None:
                self._sums.append(sums)
                return None
            self._todo = None
            # Scores are exchanged here, where all processes come at the same update.
            self._pending = _judgement(self._sums, self.program, self.test)
            if jax.process_count() > 1 and self._sums[0].scores:
                return self._exchanged(wait=False)
            thread = ThreadPoolExecutor(1, "multipod-evaluation")
            self._values = thread.submit(self._finish)
            thread.shutdown(wait=False)
        if self._values is None:
            return self._exchanged(wait=False)
        return self._event() if self._values.done() else None

    def _exchanged(self, wait: bool) -> Evaluated | None:
        """The event, once all processes have heard what was judged; a collective."""
        judged = self._pending.values(wait) if self._pending is not None else {}
        if judged is None:
            return None
        self._values = Future()
        self._values.set_result(self._finish(judged))
        return self._event()

    def conclude(self) -> Evaluated:
        """Dispatches all that is left, and waits for the end.

        Raises:
          MetricError: see `advance`.
        """
        while self._todo is not None:
            self.advance()
        if self._values is None:
            self._exchanged(wait=True)
        return self._event()

    def _finish(self, judged: dict[str, float] | None = None) -> tuple[dict[str, float], dict[str, float], float]:
        if judged is None:
            judged = (self._pending.values(wait=True) if self._pending is not None else None) or {}
        sums = _added(self._sums, self.program.recipe) | judged
        values = report_of(self.program.recipe.objective, sums)
        return values, sums, self.clock() - self.began

    def _event(self) -> Evaluated:
        assert self._values is not None
        values, sums, seconds = self._values.result()
        sums = dict(sums)
        count = int(sums.pop("count"))
        return Evaluated(self.update, values, sums, count, seconds, beside=True)


def _dispatched(program: Program, state: State, test: Source, reading: InputOptions | None) -> Iterator[PendingBatch]:
    """Sums of one batch after the other, on the devices, under way."""
    check_not_empty(test)
    batch = program.evaluation.rows(len(test))
    rows = owned_rows(batch_sharding(program.mesh), batch)
    check = ExampleChecks(program.recipe.model)
    for host in evaluation_batches(test, batch, rows, reading):
        check(host)
        placed = program.place_batch(host, rows, batch)
        yield PendingBatch(*program.evaluation.run(state, placed), host["mask"])


def _judgement(batches: list[PendingBatch], program: Program, test: Source) -> PendingJudgement | None:
    """What is detected, on its way to be judged; None of objectives that detect nothing."""
    objective = program.recipe.objective
    if not isinstance(objective, Detects):
        return None
    found = [(batch.scores, batch.mask) for batch in batches if isinstance(batch.scores, dict)]
    return PendingJudgement(found, objective.kinds, test, JaxProcesses())


def _added(batches: list[PendingBatch], recipe: Recipe) -> dict[str, float]:
    sums = [batch.sums for batch in batches]
    added = jax.tree.map(lambda *parts: float(sum(part.item() for part in parts)), *jax.device_get(sums))
    scores = [(batch.scores, batch.mask) for batch in batches if isinstance(batch.scores, tuple) and batch.scores]
    if isinstance(recipe.objective, JudgesAnswers):
        answers = [tuple(map(local_rows, arrays)) for arrays, _ in scores]
        return added | recipe.objective.judge(answers, recipe.data, JaxProcesses())
    scored = [(arrays[0], arrays[1], mask) for arrays, mask in scores]
    return added | ({"auc": batched_auc(scored, JaxProcesses())} if scored else {})


class ExampleChecks:
    """Refuses what a model can tell of a batch while it is on the host.

    These are labels that are no class of a model that `HasClasses`, for batches of one `label` an example; and whatever
    a model says that `ChecksBatches`.
    """

    def __init__(self, model: Model) -> None:
        self._model = model if isinstance(model, ChecksBatches) else None
        self._classes = model.classes if isinstance(model, HasClasses) else 0

    def __call__(self, host: HostBatch) -> None:
        """Looks at a batch of this process.

        Raises:
          MetricError: a label, with the rank and the row.
          DataError: from the model, an id outside its table for example.
        """
        if self._model is not None:
            self._model.check_batch(host)
        labels = host.get("label")
        if self._classes and labels is not None and labels.ndim == 1:
            check_labels(labels, self._classes, host.get("mask"), rank=jax.process_index())
