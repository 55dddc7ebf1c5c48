"""Writes the model of a run as a `.tflite` file, in float32 or quantised, judged on the test data."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multipod.data.source import Source
from multipod.errors import MultipodError
from multipod.extras import require
from multipod.micro import Interpreter
from multipod.micro.agreement import agreement
from multipod.micro.evaluate import run as evaluate_graph
from multipod.micro.exporter import Exported, convert, export_quantised, trace
from multipod.micro.graph import to_real, to_stored
from multipod.micro.quantising.finetune import Tuning, fine_tune
from multipod.micro.quantising.options import Quantisation
from multipod.micro.quantising.ranges import check_calibration
from multipod.recipe.recipe import Recipe
from multipod.runs.opening import OpenedRun, open_run
from multipod.runs.options import RuntimeOptions

WORST_DROP = 0.01
"""The drop in accuracy from which fine-tuning starts by itself."""
TUNING_STEPS = 300
TUNING_EXAMPLES = 2048


@dataclass(frozen=True)
class TrainedFunction:
    """A trained model as a plain function of `names`, entries of a batch of one example, and its recipe."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    recipe: Recipe

    def examples(self, source: Source, count: int) -> list[tuple[np.ndarray, ...]]:
        """Returns `count` examples of a source, evenly spread over it, each a batch of one."""
        numbers = np.linspace(0, len(source) - 1, min(count, len(source))).astype(int)
        batch = source.read(numbers)
        return [tuple(batch[name][k : k + 1] for name in self.names) for k in range(len(numbers))]


@dataclass(frozen=True)
class ExportRequest:
    """How a model is to be written.

    Attributes:
      quantisation: types of weights and activations, and how ranges are found; None stays float32.
      calibration: training examples that ranges come from.
      tuning: steps of quantisation-aware fine-tuning; None takes 300 where the accuracy drops by over 1 %.
    """

    quantisation: Quantisation | None = None
    calibration: int = 256
    tuning: int | None = None


@dataclass(frozen=True)
class ExportedRun:
    """A run's model as a file, and what that cost on the test data.

    Attributes:
      exported: the file's bytes, its graph, and the error of each operator.
      trained: the model that it was made of.
      exact: the model's own output on each test example.
      note: told where the file cannot be run as a chip would.
    """

    exported: Exported
    trained: TrainedFunction
    exact: tuple[np.ndarray, ...]
    note: Callable[[str], None] = lambda line: None

    @cached_property
    def test(self) -> Source:
        """The run's test data."""
        return self.trained.recipe.data.test()

    @cached_property
    def outputs(self) -> tuple[np.ndarray, ...]:
        """The file's first output on each test example, as real numbers."""
        return tuple(file_outputs(self.exported, self.trained, self.test, self.note))

    @cached_property
    def before(self) -> dict[str, float]:
        """The objective's values on the test data with the model's own outputs."""
        return judge(self.trained, self.test, self.exact)

    @cached_property
    def after(self) -> dict[str, float]:
        """The objective's values on the test data with the file's outputs."""
        return judge(self.trained, self.test, self.outputs)

    @property
    def same_predictions(self) -> int:
        """On how many test examples the largest output is the same before and after."""
        pairs = zip(self.exact, self.outputs, strict=True)
        return int(sum(np.array_equal(a.argmax(-1), b.argmax(-1)) for a, b in pairs))

    def write(self, path: Path, examples: int = 0) -> None:
        """Writes the file, and beside it the first `examples` test examples as the file wants them stored.

        `model.0.npy` is test example 0; of a model with several inputs `model.0.NAME.npy`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.exported.model)
        for number in range(min(examples, len(self.test))):
            batch = self.test.read(np.arange(number, number + 1))
            for name, tensor in zip(self.trained.names, self.exported.graph.inputs, strict=True):
                part = f".{name}" if len(self.trained.names) > 1 else ""
                np.save(path.with_suffix(f".{number}{part}.npy"), to_stored(batch[name], tensor))


def export_run(
    run: str | Path | OpenedRun,
    request: ExportRequest | None = None,
    *,
    at: int | None = None,
    options: RuntimeOptions | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> ExportedRun:
    """Makes a `.tflite` file of a run, opened or in this folder. `note` is told what is done on the way, as it is.

    Raises:
      MultipodError: the run cannot be opened, its model has operators that the format lacks, or FlatBuffers' package
        is not installed.
    """
    require("export", "flatbuffers")
    opened = run if isinstance(run, OpenedRun) else open_run(run, at=at, options=options)
    request = request or ExportRequest()
    trained = trained_function(opened)
    test, train = trained.recipe.data.test(), trained.recipe.data.train()
    exact = float_outputs(trained, test)
    if request.quantisation is None:
        return ExportedRun(convert(trained.function, *trained.examples(train, 1)[0]), trained, tuple(exact), note)
    examples = trained.examples(train, request.calibration)
    exported = convert(trained.function, *examples[0], calibration=examples, quantisation=request.quantisation)
    drop = accuracy(trained, test, exact) - accuracy(trained, test, file_outputs(exported, trained, test, note))
    if request.tuning or (request.tuning is None and drop > WORST_DROP):
        steps = request.tuning or TUNING_STEPS
        note(f"accuracy drops by {100 * drop:.2f} %: fine-tuning {steps} steps")
        exported = tune(exported, trained, train, steps)
    return ExportedRun(exported, trained, tuple(exact), note)


def trained_function(run: OpenedRun) -> TrainedFunction:
    """The model of a run as a function of those entries of a batch that it uses, its parameters fixed."""
    recipe = run.recipe
    params, statistics = jax.tree.map(np.asarray, jax.device_get((run.params, run.judged.statistics)))
    example = recipe.data.test().read(np.arange(1))

    def apply(batch: dict[str, Any]) -> Any:
        return recipe.model.apply(params, statistics, batch, train=False, key=jax.random.key(0))[0]

    graph = trace(apply, example)
    names = tuple(name for name, tensor in zip(sorted(example), graph.inputs, strict=True) if tensor in graph.uses)
    return TrainedFunction(lambda *values: apply({**example, **dict(zip(names, values, strict=True))}), names, recipe)


def tune(exported: Exported, trained: TrainedFunction, train: Source, steps: int) -> Exported:
    """The file after fine-tuning on all training examples (2,048 at most)."""
    examples = trained.examples(train, TUNING_EXAMPLES)
    teacher = trace(trained.function, *examples[0])
    arrays = check_calibration(teacher, examples)
    assert exported.quantised is not None
    quantised = fine_tune(exported.quantised, teacher, arrays, Tuning(steps))
    layers = tuple(quantised.layers(arrays[:1] and [a[:256] for a in arrays]))
    tuned = export_quantised(quantised)
    return replace(tuned, layers=layers, outputs=agreement(tuned.model, tuned.graph, teacher, arrays))


def float_outputs(trained: TrainedFunction, test: Source) -> list[np.ndarray]:
    """First outputs of the model on all test examples, as JAX computes them."""
    function = jax.jit(trained.function)
    return [np.asarray(jax.tree.leaves(function(*values))[0]) for values in trained.examples(test, len(test))]


def file_outputs(
    exported: Exported, trained: TrainedFunction, test: Source, note: Callable[[str], None] = lambda line: None
) -> list[np.ndarray]:
    """First outputs of the file on all test examples, as real numbers."""
    run, ends, outputs = runtime_of(exported, note), exported.graph, []
    for example in trained.examples(test, len(test)):
        stored = [to_stored(value, tensor) for value, tensor in zip(example, ends.inputs, strict=True)]
        outputs.append(to_real(run(*stored)[0], ends.outputs[0]))
    return outputs


def runtime_of(exported: Exported, note: Callable[[str], None]) -> Callable[..., list[Any]]:
    """What runs the file: the embedded runtime, which gives the same bytes as a chip; else a simulation.

    The runtime needs a C compiler, and lacks some operators.
    """
    try:
        return Interpreter(exported.model).run
    except MultipodError as error:
        note(f"judged by simulation, not by the embedded runtime: {error}")
    quantised, ends = exported.quantised, exported.graph
    if quantised is None:
        return lambda *values: evaluate_graph(ends, *values)

    def simulate(*stored: Any) -> list[Any]:
        values = [to_real(value, tensor) for value, tensor in zip(stored, ends.inputs, strict=True)]
        outputs = quantised.simulated(*values)
        return [to_stored(value, tensor) for value, tensor in zip(outputs, ends.outputs, strict=True)]

    return simulate


def judge(trained: TrainedFunction, test: Source, outputs: Sequence[np.ndarray]) -> dict[str, float]:
    """The objective's values on the test data, with these outputs."""
    batch: Any = test.read(np.arange(len(test)))
    values = trained.recipe.objective(jnp.concatenate(list(outputs)), batch)
    return {name: float(np.mean(np.asarray(value, np.float64))) for name, value in values.items()}


def accuracy(trained: TrainedFunction, test: Source, outputs: Sequence[np.ndarray]) -> float:
    """The accuracy on the test data with these outputs; 0 of an objective that has none."""
    return judge(trained, test, outputs).get("accuracy", 0.0)
