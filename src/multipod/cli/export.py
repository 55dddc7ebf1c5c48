"""`multipod export`: the model of a run as a `.tflite` file, in float32 or quantised, judged on the test data."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from multipod.cli.options import Where, chosen_recipe, where_options

if TYPE_CHECKING:
    import numpy as np

    from multipod.micro.exporter import Exported

WORST = 0.01
"""The drop in accuracy from which fine-tuning starts by itself."""


@dataclass(frozen=True)
class _Trained:
    """A trained model as a plain function of `names`, entries of a batch of one example, and its data."""

    function: Callable[..., Any]
    names: tuple[str, ...]
    recipe: Any

    def examples(self, source: Any, count: int) -> list[tuple["np.ndarray", ...]]:
        """`count` examples of a source, evenly spread over it, each a batch of one."""
        import numpy as np

        numbers = np.linspace(0, len(source) - 1, min(count, len(source))).astype(int)
        batch = source.read(numbers)
        return [tuple(batch[name][k : k + 1] for name in self.names) for k in range(len(numbers))]


@click.command("export")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="[default: RUN/model.tflite]"
)
@click.option("--int8", "activations", flag_value="int8", help="Quantise weights and activations to int8.")
@click.option("--int16", "activations", flag_value="int16", help="Activations in int16, weights in int8.")
@click.option("--int4-weights", is_flag=True, help="Weights in int4, activations in int8.")
@click.option(
    "--calibrate",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Training examples that ranges come from.",
)
@click.option("--ranges", type=click.Choice(["minmax", "percentile", "mse"]), default="minmax", show_default=True)
@click.option("--float-io", is_flag=True, help="Inputs and outputs stay float32.")
@click.option(
    "--finetune",
    type=click.IntRange(0),
    metavar="STEPS",
    help="Steps of quantisation-aware fine-tuning.  [default: 300 where the accuracy drops by over 1 %]",
)
@click.option(
    "--examples", type=click.IntRange(0), default=0, metavar="N",
    help="Also write the first N test examples as FILE.0.npy, ..., stored as the file wants them.",
)  # fmt: skip
@click.option("--at", type=click.IntRange(0), metavar="UPDATE", help="This checkpoint, not the newest.")
@where_options
def export(
    run: Path, out: Path | None, activations: str | None, int4_weights: bool, calibrate: int, ranges: str,
    float_io: bool, finetune: int | None, examples: int, at: int | None, where: Where,
) -> None:  # fmt: skip
    """Write the model in the folder RUN as a .tflite file, and say what that costs in accuracy."""
    from multipod.micro.quantising.options import Quantisation

    trained = _trained(run, at, where)
    test, train = trained.recipe.data.test(), trained.recipe.data.train()
    exact = _float_outputs(trained, test)
    if activations is None and not int4_weights:
        exported = _float(trained, train)
    else:
        options = Quantisation(
            activations=activations or "int8", weights="int4" if int4_weights else "int8", ranges=ranges,  # type: ignore[arg-type]
            io="float32" if float_io else "quantised",
        )  # fmt: skip
        exported = _quantised(trained, options, trained.examples(train, calibrate))
        drop = _accuracy(trained, test, exact) - _accuracy(trained, test, _file_outputs(exported, trained, test))
        if finetune or (finetune is None and drop > WORST):
            click.echo(f"accuracy drops by {100 * drop:.2f} %: fine-tuning {finetune or 300} steps")
            exported = _tuned(exported, trained, train, finetune or 300)
    path = out or run / "model.tflite"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(exported.model)
    _write_examples(path, exported, trained, test, examples)
    _report(path, exported, trained, test, exact)


def _trained(run: Path, at: int | None, where: Where) -> _Trained:
    import jax
    import numpy as np

    from multipod.layout.mesh import make_mesh
    from multipod.micro.exporter import traced
    from multipod.step.program import program_of
    from multipod.train.checkpoint import Checkpoints
    from multipod.train.run_folder import check_same, open_folder

    folder, facts = open_folder(run)
    recipe = chosen_recipe(facts["recipe"], facts["overrides"], where)
    check_same(folder, recipe, learning=False)
    program = program_of(recipe, make_mesh(recipe.layout))
    checkpoints = Checkpoints(folder.checkpoints, recipe.keep_checkpoints, read_only=True)
    state = checkpoints.restore(program.shapes, at, weights_only=recipe.layout.local_state)
    checkpoints.close()
    params, statistics = jax.tree.map(np.asarray, jax.device_get((program.full_params(state), state.statistics)))
    one = recipe.data.test().read(np.arange(1))

    def apply(batch: dict[str, Any]) -> Any:
        return recipe.model.apply(params, statistics, batch, train=False, key=jax.random.key(0))[0]

    graph = traced(apply, one)
    names = tuple(name for name, tensor in zip(sorted(one), graph.inputs, strict=True) if tensor in graph.uses)
    return _Trained(lambda *values: apply({**one, **dict(zip(names, values, strict=True))}), names, recipe)


def _float(trained: _Trained, train: Any) -> "Exported":
    from multipod.micro.exporter import convert

    return convert(trained.function, *trained.examples(train, 1)[0])


def _quantised(trained: _Trained, options: Any, examples: list[Any]) -> "Exported":
    from multipod.micro.exporter import convert

    return convert(trained.function, *examples[0], calibration=examples, quantisation=options)


def _tuned(exported: "Exported", trained: _Trained, train: Any, steps: int) -> "Exported":
    """The file after fine-tuning on all training examples (2,048 at most)."""
    from dataclasses import replace

    from multipod.micro.exporter import from_quantised, traced
    from multipod.micro.quantising.finetune import Tuning, fine_tuned
    from multipod.micro.quantising.ranges import checked

    examples = trained.examples(train, 2048)
    teacher = traced(trained.function, *examples[0])
    arrays = checked(teacher, examples)
    assert exported.quantised is not None
    quantised = fine_tuned(exported.quantised, teacher, arrays, Tuning(steps))
    layers = tuple(quantised.layers(arrays[:1] and [a[:256] for a in arrays]))
    return replace(from_quantised(quantised), layers=layers)


def _float_outputs(trained: _Trained, test: Any) -> list[Any]:
    import jax
    import numpy as np

    function = jax.jit(trained.function)
    return [np.asarray(jax.tree.leaves(function(*one))[0]) for one in trained.examples(test, len(test))]


def _file_outputs(exported: "Exported", trained: _Trained, test: Any) -> list[Any]:
    """First outputs of the file on all test examples, as real numbers."""
    from multipod.micro.exporter import to_real, to_stored

    run, ends, outputs = _runtime(exported), exported.graph, []
    for example in trained.examples(test, len(test)):
        stored = [to_stored(value, tensor) for value, tensor in zip(example, ends.inputs, strict=True)]
        outputs.append(to_real(run(*stored)[0], ends.outputs[0]))
    return outputs


def _runtime(exported: "Exported") -> Callable[..., list[Any]]:
    """What runs the file: the embedded runtime, which gives the same bytes as a chip; else a simulation.

    The runtime needs a C compiler, and lacks some operators.
    """
    from multipod.errors import MultipodError
    from multipod.micro import Interpreter
    from multipod.micro.evaluate import run
    from multipod.micro.exporter import to_real, to_stored

    try:
        return Interpreter(exported.model).run
    except MultipodError as error:
        click.echo(f"judged by simulation, not by the embedded runtime: {error}", err=True)
    quantised, ends = exported.quantised, exported.graph
    if quantised is None:
        return lambda *values: run(ends, *values)

    def simulated(*stored: Any) -> list[Any]:
        values = [to_real(value, tensor) for value, tensor in zip(stored, ends.inputs, strict=True)]
        outputs = quantised.simulated(*values)
        return [to_stored(value, tensor) for value, tensor in zip(outputs, ends.outputs, strict=True)]

    return simulated


def _values(trained: _Trained, test: Any, outputs: list[Any]) -> dict[str, float]:
    """The objective's values on the test data, with these outputs."""
    import jax.numpy as jnp
    import numpy as np

    batch = test.read(np.arange(len(test)))
    values = trained.recipe.objective(jnp.concatenate(outputs), batch)
    return {name: float(np.mean(np.asarray(value, np.float64))) for name, value in values.items()}


def _accuracy(trained: _Trained, test: Any, outputs: list[Any]) -> float:
    return _values(trained, test, outputs).get("accuracy", 0.0)


def _write_examples(path: Path, exported: "Exported", trained: _Trained, test: Any, count: int) -> None:
    """`model.0.npy` is test example 0; of a model with several inputs `model.0.NAME.npy`."""
    import numpy as np

    from multipod.micro.exporter import to_stored

    for number in range(min(count, len(test))):
        batch = test.read(np.arange(number, number + 1))
        for name, tensor in zip(trained.names, exported.graph.inputs, strict=True):
            part = f".{name}" if len(trained.names) > 1 else ""
            np.save(path.with_suffix(f".{number}{part}.npy"), to_stored(batch[name], tensor))


def _report(path: Path, exported: "Exported", trained: _Trained, test: Any, exact: list[Any]) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    outputs = _file_outputs(exported, trained, test)
    same = int(sum(np.array_equal(a.argmax(-1), b.argmax(-1)) for a, b in zip(exact, outputs, strict=True)))
    before, after = _values(trained, test, exact), _values(trained, test, outputs)
    console = Console()
    if exported.layers:
        layers = Table("operator", "output", "SQNR, dB", title="error of each operator on the calibration set")
        for layer in exported.layers:
            layers.add_row(layer.kind, layer.name, f"{layer.sqnr_db:.1f}")
        console.print(layers)
    table = Table(
        "",
        "float32, JAX",
        "this file",
        title=f"{path}: {len(exported.model):,} bytes, {len(exported.graph.ops)} operators",
    )
    for name in sorted(before):
        table.add_row(name, f"{before[name]:.6g}", f"{after[name]:.6g}")
    table.add_row("same prediction", "", f"{same} of {len(exact)}")
    console.print(table)
