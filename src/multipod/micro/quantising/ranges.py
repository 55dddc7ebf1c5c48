"""Ranges of activations from a calibration set, and the grids that follow from them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from multipod.errors import ExportError
from multipod.micro.evaluate import evaluate
from multipod.micro.graph import Graph, Quant, Tensor
from multipod.micro.quantising.options import Quantisation

CHUNK = 32
"""Examples that are evaluated at a time."""
BINS = 2048
FILL = 2.9e38
"""Beyond this a number stands for infinity."""
SHRINKS = np.linspace(1.0, 0.3, 71)
"""Ranges tried by `mse`, as shares of the whole."""


@dataclass(frozen=True)
class Seen:
    """What calibration saw of a tensor: its least and greatest value, a histogram between them, and its mean."""

    low: float
    high: float
    histogram: np.ndarray
    mean: np.ndarray


def check_calibration(graph: Graph, calibration: Sequence[Any]) -> list[np.ndarray]:
    """The calibration set as one array for each input, examples first. `calibration` is a sequence of examples.

    An example is what one call gets: an array, or a tuple of arrays if there are several inputs.

    Raises:
      ExportError: there are none, a shape does not fit, or values are not finite; all of that is listed.
    """
    examples = [tuple(example) if isinstance(example, tuple | list) else (example,) for example in calibration]
    if not examples:
        raise ExportError(
            "calibration: there are no examples. Give some hundred that are like what the model will see."
        )
    wrong = []
    for number, example in enumerate(examples):
        if len(example) != len(graph.inputs):
            wrong.append(f"example {number} has {len(example)} arrays for {len(graph.inputs)} inputs")
            continue
        for tensor, value in zip(graph.inputs, example, strict=True):
            array = np.asarray(value)
            if array.shape != tensor.shape:
                wrong.append(f"example {number}: {tensor.name} has shape {array.shape}, not {tensor.shape}")
            elif not np.isfinite(array).all():
                bad = array.size - int(np.isfinite(array).sum())
                wrong.append(f"example {number}: {tensor.name} has {bad} values that are not finite")
    if wrong:
        more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ExportError(
            "calibration:\n  " + "\n  ".join(wrong[:8]) + more + "\nMend these examples or leave them out."
        )
    return [
        np.stack([np.asarray(example[number], tensor.dtype) for example in examples])
        for number, tensor in enumerate(graph.inputs)
    ]


def chunks(arrays: Sequence[np.ndarray]) -> Iterator[tuple[np.ndarray, ...]]:
    """The examples, `CHUNK` at a time."""
    for start in range(0, len(arrays[0]), CHUNK):
        yield tuple(array[start : start + CHUNK] for array in arrays)


def compile_values(graph: Graph, **kwargs: Any) -> Callable[..., list[jax.Array]]:
    """A compiled function from examples to the values of `float_tensors(graph)`, examples first."""
    tensors = float_tensors(graph)

    def values_of(*inputs: Any) -> list[jax.Array]:
        values = evaluate(graph, inputs, **kwargs)
        return [values[tensor] for tensor in tensors]

    return jax.jit(jax.vmap(values_of))


def float_tensors(graph: Graph) -> list[Tensor]:
    """The tensors that are computed in float32, inputs among them."""
    return [tensor for tensor in graph.tensors if not tensor.constant and tensor.dtype == "float32"]


def calibrate(graph: Graph, arrays: Sequence[np.ndarray]) -> dict[Tensor, Seen]:
    """What each float tensor is on the examples. Two passes: limits and means, then histograms.

    Raises:
      ExportError: the model itself yields values that are not finite.
    """
    tensors, values = float_tensors(graph), compile_values(graph)
    low = np.full(len(tensors), np.inf)
    high = np.full(len(tensors), -np.inf)
    sums = [np.zeros(tensor.shape) for tensor in tensors]
    for chunk in chunks(arrays):
        for number, value in enumerate(map(np.asarray, values(*chunk))):
            real = np.abs(value) < FILL  # a maximum's padding is no value
            low[number] = min(low[number], value.min(initial=np.inf, where=real | np.isnan(value)))
            high[number] = max(high[number], value.max(initial=-np.inf, where=real | np.isnan(value)))
            sums[number] += value.sum(0, dtype=np.float64)
    broken = [t.name for t, a, b in zip(tensors, low, high, strict=True) if not np.isfinite((a, b)).all()]
    if broken:
        raise ExportError(
            f"calibration: the model yields values that are not finite in {', '.join(broken[:6])}. "
            "Is it trained, and are the examples scaled as in training?"
        )
    histograms = [np.zeros(BINS) for _ in tensors]
    for chunk in chunks(arrays):
        for number, value in enumerate(map(np.asarray, values(*chunk))):
            span = (low[number], max(high[number], low[number] + 1e-6 * max(1.0, abs(low[number]))))
            histograms[number] += np.histogram(value[np.abs(value) < FILL], BINS, span)[0]
    count = len(arrays[0])
    return {
        tensor: Seen(low[number], high[number], histograms[number], sums[number] / count)
        for number, tensor in enumerate(tensors)
    }


def span(seen: Seen, options: Quantisation) -> tuple[float, float]:
    """The range of a tensor to be represented."""
    if options.ranges == "minmax" or seen.high <= seen.low:
        return seen.low, seen.high
    edges = np.linspace(seen.low, seen.high, BINS + 1)
    if options.ranges == "percentile":
        share = np.cumsum(seen.histogram) / seen.histogram.sum()
        tail = (1 - options.percentile / 100) / 2
        first, last = (int(np.searchsorted(share, at)) for at in (tail, 1 - tail))
        return float(edges[first]), float(edges[min(last + 1, BINS)])
    centres = (edges[:-1] + edges[1:]) / 2
    shrunk = [(seen.low * factor, seen.high * factor) for factor in SHRINKS]
    errors = [_error(centres, seen.histogram, grid(*ends, options), options) for ends in shrunk]
    return shrunk[int(np.argmin(errors))]


def _error(values: np.ndarray, weights: np.ndarray, quant: Quant, options: Quantisation) -> float:
    stored = np.clip(np.round(values / quant.scale[0]) + quant.zero_point, *options.limits)
    return float((weights * (values - quant.scale[0] * (stored - quant.zero_point)) ** 2).sum())


def grid(low: float, high: float, options: Quantisation) -> Quant:
    """The scale and zero point for a range: zero is exact, as padding and ReLU need it."""
    low, high = min(low, 0.0), max(high, 0.0)
    least, most = options.limits
    if options.activations == "int16":
        size = max(-low, high) or 1.0
        return Quant((float(np.float32(size / most)),), 0)
    scale = float(np.float32((high - low) / (most - least))) or 1.0
    if high == low:
        scale = 1.0
    return Quant((scale,), int(np.clip(round(least - low / scale), least, most)))
