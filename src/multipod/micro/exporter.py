"""Export: from a JAX function to the bytes of a `.tflite` file, float32 or quantised."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from multipod.errors import ExportError
from multipod.micro.agreement import OutputNoise, agreement
from multipod.micro.composites import expand
from multipod.micro.graph import Graph, make_names_unique, substitute
from multipod.micro.lowering.lower import Unroll, lower
from multipod.micro.offline import plan_offline
from multipod.micro.operators.table import PRIMITIVES
from multipod.micro.quantising.options import Quantisation
from multipod.micro.quantising.quantise import OperatorNoise, Quantised, quantise
from multipod.micro.quantising.ranges import check_calibration
from multipod.micro.rules import simplify
from multipod.micro.write import pack_offline_plan, write

DESCRIPTION = "Exported by multipod."


@dataclass(frozen=True)
class Exported:
    """A file, and what one may want to know about it.

    `graph` is what was written. Of a quantised model `layers` tells the error of each operator on the calibration set,
    `outputs` that of what the file itself gives when it is run, and `quantised` is what fine-tuning starts from.
    """

    model: bytes
    graph: Graph
    layers: tuple[OperatorNoise, ...] = ()
    outputs: tuple[OutputNoise, ...] = ()
    quantised: Quantised | None = None


def export(
    function: Callable[..., Any],
    *examples: Any,
    calibration: Sequence[Any] | None = None,
    quantisation: Quantisation | None = None,
    unroll: int = 64,
) -> bytes:
    """The `.tflite` file of a JAX function for inputs like `examples`; see `convert`."""
    return convert(
        function, *examples, calibration=calibration, quantisation=quantisation, unroll=unroll, report=False
    ).model


def convert(
    function: Callable[..., Any],
    *examples: Any,
    calibration: Sequence[Any] | None = None,
    quantisation: Quantisation | None = None,
    unroll: int = 64,
    report: bool = True,
) -> Exported:
    """The `.tflite` file of a JAX function, with a report.

    Args:
      function: any function of arrays that JAX can trace; a Flax NNX module in evaluation mode is one. What it closes
        over (parameters, statistics) becomes constants. Inputs and outputs may be pytrees.
      examples: one array for each input, of the shapes the model will run with, the batch size included (usually 1).
      calibration: examples as the model will see them, each an array or a tuple of arrays; the model is then
        quantised. Some hundred are enough.
      quantisation: how; full int8 if it is left out.
      unroll: loops of at most that many steps are copied out, longer ones become WHILE (which integers cannot).
      report: measure each operator's error (one more pass over the calibration set).

    Raises:
      ExportError: lists everything that cannot be lowered or quantised, with the user's lines; or calibration data
        that do not fit or are not finite; or the runtime refuses the quantised file.
    """
    graph = trace(function, *examples, unroll=unroll)
    if calibration is None:
        if quantisation is not None:
            raise ExportError("export: quantisation without calibration. Give examples that it can learn ranges from.")
        return finish(expand(graph))
    arrays = check_calibration(graph, calibration)
    quantised, floating = quantise(graph, arrays, quantisation or Quantisation())
    layers = tuple(quantised.layers(arrays, floating)) if report else ()
    exported = export_quantised(quantised)
    outputs = agreement(exported.model, exported.graph, graph, arrays)
    return replace(exported, layers=layers, outputs=outputs)


def export_quantised(quantised: Quantised) -> Exported:
    """The file of a quantised model."""
    return replace(finish(expand(quantised.integer_graph())), quantised=quantised)


def trace(function: Callable[..., Any], *examples: Any, unroll: int = 64) -> Graph:
    """The float32 graph of a function, simplified. Composites are still whole: `evaluate.run` computes it."""
    graph = lower(function, examples, PRIMITIVES, Unroll(unroll))
    names = [tensor.name for tensor in graph.outputs]
    return _named(simplify(graph), names)


def finish(graph: Graph) -> Exported:
    """The file of a graph of TFLite operators, with a plan of its arena."""
    graph = make_names_unique(graph)
    offsets = plan_offline(graph)
    metadata = {} if offsets is None else {"OfflineMemoryAllocation": pack_offline_plan(offsets)}
    return Exported(write(graph, description=DESCRIPTION, metadata=metadata), graph)


def _named(graph: Graph, names: Sequence[str]) -> Graph:
    new = {tensor: replace(tensor, name=name) for tensor, name in zip(graph.outputs, names, strict=True)}
    return make_names_unique(substitute(graph, new))
