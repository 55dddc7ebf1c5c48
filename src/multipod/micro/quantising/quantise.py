"""Quantises a graph: the top of this folder."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multipod.micro.evaluate import Hook, evaluate
from multipod.micro.graph import Graph, Op, Quant, Tensor, sort_ops
from multipod.micro.operators.operator import Weighted
from multipod.micro.operators.table import weights_of
from multipod.micro.quantising.grids import (
    grids,
    in_float,
    insert_requantising,
    is_float,
    per_channel,
    refuse_unknown,
    weight_grid,
)
from multipod.micro.quantising.masks import narrow_masks
from multipod.micro.quantising.options import Quantisation
from multipod.micro.quantising.ranges import Seen, calibrate, chunks, compile_values, float_tensors
from multipod.micro.quantising.tables import expand_table, prepare

BIAS_LIMIT = 2**30
"""Stored biases stay below this, so that sums in int32 have room."""


@dataclass(frozen=True)
class OperatorNoise:
    """How well an operator's output survives: signal over quantisation noise on the calibration set, in decibels."""

    name: str
    kind: str
    sqnr_db: float
    source: str


@dataclass(frozen=True)
class Quantised:
    """A float graph together with the grids of its tensors, from which the integer graph follows.

    `graph` has the weights before rounding, with corrected biases; `grids` the activations' scales.
    """

    graph: Graph
    grids: Mapping[Tensor, Quant]
    options: Quantisation

    def integer_graph(self) -> Graph:
        """The graph in integers."""
        return _Integers(self).graph()

    def rounding(self) -> Hook:
        """A hook for `evaluate` that rounds every activation and weight to its grid; gradients pass through it."""
        weights = {op.input(kernel.weights): (op, kernel) for op, kernel in _weighted(self.graph, self.options)}
        low, high = self.options.limits
        limit = self.options.weight_limit

        def hook(tensor: Tensor, value: jax.Array) -> jax.Array:
            if tensor in weights:
                op, kernel = weights[tensor]
                others = tuple(d for d in range(value.ndim) if d != kernel.channel_dim)
                largest = jnp.abs(value).max(axis=others if per_channel(op, self.options) else None, keepdims=True)
                scale = jax.lax.stop_gradient(jnp.maximum(largest, 1e-10) / limit)
                return _passing(value, jnp.clip(jnp.round(value / scale), -limit, limit) * scale)
            if tensor not in self.grids or tensor.dtype != "float32":
                return value
            quant = self.grids[tensor]
            stored = jnp.clip(jnp.round(value / quant.scale[0]) + quant.zero_point, low, high)
            inside = jnp.clip(
                value, quant.scale[0] * (low - quant.zero_point), quant.scale[0] * (high - quant.zero_point)
            )
            return _passing(inside, quant.scale[0] * (stored - quant.zero_point))

        return hook

    def simulated(self, *inputs: Any) -> list[np.ndarray]:
        """The outputs as the integer graph gives them, as real numbers, to about one step of the last grid."""
        return [np.asarray(value) for value in self._simulated(*inputs)]

    @cached_property
    def _simulated(self) -> Callable[..., list[jax.Array]]:
        hook = self.rounding()
        return jax.jit(lambda *xs: [evaluate(self.graph, xs, hook)[t] for t in self.graph.outputs])

    def layers(self, arrays: Sequence[np.ndarray], reference: Graph | None = None) -> list[OperatorNoise]:
        """The error of each operator, against `reference` (the graph before quantising, whose tensors are ours)."""
        tensors = float_tensors(self.graph)
        exact, rounded = compile_values(reference or self.graph), compile_values(self.graph, hook=self.rounding())
        signal, noise = np.zeros(len(tensors)), np.zeros(len(tensors))
        for chunk in chunks(arrays):
            for number, (x, y) in enumerate(zip(exact(*chunk), rounded(*chunk), strict=True)):
                signal[number] += float(np.square(np.asarray(x, np.float64)).sum())
                noise[number] += float(np.square(np.asarray(x, np.float64) - np.asarray(y, np.float64)).sum())
        makers = self.graph.producer
        rows = []
        for tensor, s, n in zip(tensors, signal, noise, strict=True):
            op = makers.get(tensor)
            db = 10 * np.log10(s / n) if n > 0 and s > 0 else np.inf
            rows.append(OperatorNoise(tensor.name, op.kind if op else "input", float(db), op.source if op else ""))
        return rows


def _passing(exact: jax.Array, rounded: jax.Array) -> jax.Array:
    """The rounded value, with the gradient of the exact one (Bengio et al., 2013, arXiv:1308.3432)."""
    return exact + jax.lax.stop_gradient(rounded - exact)


def quantise(graph: Graph, arrays: Sequence[np.ndarray], options: Quantisation) -> tuple[Quantised, Graph]:
    """The quantised form of a float graph, and that graph in the same tensors before its biases were corrected.

    `arrays` are the calibration examples, one array for each input (`ranges.check_calibration`).

    Raises:
      ExportError: lists operators without an integer kernel; or values that are not finite.
    """
    floating = insert_requantising(prepare(graph, options.keep_float, options.activations), options)
    floating = _separate_constants(floating)
    refuse_unknown(floating, options)
    seen = calibrate(floating, arrays)
    narrowed = narrow_masks(floating, seen)
    if narrowed != floating:
        floating, seen = narrowed, calibrate(narrowed, arrays)
    corrected = correct_biases(floating, seen, options) if options.bias_correction else floating
    return Quantised(corrected, grids(floating, seen, options), options), floating


def _separate_constants(graph: Graph) -> Graph:
    """The graph with a constant of its own for each reader, since each may want another scale."""
    taken: set[Tensor] = set()

    def owned(tensor: Tensor | None) -> Tensor | None:
        if tensor is None or not tensor.constant:
            return tensor
        tensor = replace(tensor) if tensor in taken else tensor
        taken.add(tensor)
        return tensor

    return replace(graph, ops=tuple(replace(op, inputs=tuple(map(owned, op.inputs))) for op in graph.ops))


def correct_biases(graph: Graph, seen: Mapping[Tensor, Seen], options: Quantisation) -> Graph:
    """The graph with biases that undo the mean error of rounded weights.

    A layer is linear in its input, so the mean of (W_q - W) x over the examples is (W_q - W) mean(x): one evaluation
    of each layer on its mean input, padding included, averaged over positions.

    Source: Nagel et al., 2019, arXiv:1906.04721, section 4.2, with the mean measured instead of derived.
    """
    ops = []
    for op in graph.ops:
        kernel = None if is_float(op, options) else weights_of(op)
        if kernel and op.input(kernel.weights).constant:
            op = _correct(op, kernel, seen, options)
        ops.append(op)
    return replace(graph, ops=tuple(ops))


def _weighted(graph: Graph, options: Quantisation) -> list[tuple[Op, Weighted]]:
    """The operators whose weights are quantised, and which inputs these are."""
    kernels = [(op, weights_of(op)) for op in graph.ops if not is_float(op, options)]
    return [(op, kernel) for op, kernel in kernels if kernel]


def _correct(op: Op, kernel: Weighted, seen: Mapping[Tensor, Seen], options: Quantisation) -> Op:
    x, weights, bias = op.input(kernel.data), op.input(kernel.weights), op.input(kernel.bias)
    change = store_weights(op, kernel, options)[1] - weights.values
    inputs = list(op.inputs)
    inputs[kernel.weights] = replace(weights, data=change.astype(np.float32))
    inputs[kernel.bias] = replace(bias, data=np.zeros(bias.shape, np.float32))
    alone = replace(op, inputs=tuple(inputs), options={**op.options, "fused_activation_function": "NONE"})
    graph = Graph((x,), op.outputs, (alone,))
    error = np.asarray(evaluate(graph, [seen[x].mean.astype(np.float32)])[op.output])
    shift = error.mean(axis=tuple(range(error.ndim - 1)))
    inputs = list(op.inputs)
    inputs[kernel.bias] = replace(bias, data=(bias.values - shift).astype(np.float32))
    return replace(op, inputs=tuple(inputs))


def store_weights(
    op: Op, kernel: Weighted, options: Quantisation, data_scale: float | None = None
) -> tuple[np.ndarray, np.ndarray, Quant]:
    """The stored weights of an operator, the real numbers that they stand for, and their grid.

    `data_scale`, that of the operator's input, keeps the grid wide enough for the biases: they are stored in steps of
    the weights' scale times it, and would be cut off where a channel's weights are (nearly) zero.
    """
    weights = op.input(kernel.weights).values
    quant = weight_grid(op, weights, kernel.channel_dim, options)
    if data_scale is not None:
        least = np.abs(op.input(kernel.bias).values.astype(np.float64)) / (BIAS_LIMIT * data_scale)
        least = least if len(quant.scale) > 1 else least.max(initial=0.0)
        quant = replace(quant, scale=tuple(float(np.float32(s)) for s in np.atleast_1d(np.maximum(quant.scale, least))))
    scale = np.asarray(quant.scale, np.float32)
    wide = scale.reshape([-1 if d == quant.axis else 1 for d in range(weights.ndim)]) if quant.axis >= 0 else scale
    stored = np.clip(np.round(weights / wide), -options.weight_limit, options.weight_limit).astype(np.int8)
    return stored, stored * wide, quant


class _Integers:
    """Writes the integer graph of a quantised one, operator by operator."""

    def __init__(self, quantised: Quantised) -> None:
        self.q, self.options = quantised, quantised.options
        self.made: dict[Tensor, Tensor] = {}
        self.floats: dict[Tensor, Tensor] = {}
        self.ops: list[Op] = []

    def graph(self) -> Graph:
        graph = self.q.graph
        outside = self.options.io == "float32"
        inputs = tuple(self.entrance(t) if outside and in_float(t) else self.stored(t) for t in graph.inputs)
        for op in graph.ops:
            self.operator(op)
        outputs = tuple(self.exit(t) if outside and in_float(t) else self.result(t) for t in graph.outputs)
        return replace(graph, inputs=inputs, outputs=outputs, ops=sort_ops(self.ops))

    def stored(self, tensor: Tensor) -> Tensor:
        """The integer form of a tensor."""
        if tensor not in self.made:
            self.made[tensor] = self.new(tensor) if in_float(tensor) and tensor in self.q.grids else tensor
        return self.made[tensor]

    def new(self, tensor: Tensor) -> Tensor:
        quant, dtype = self.q.grids[tensor], self.options.activations
        data = None
        if tensor.constant:
            real = np.clip(tensor.values.astype(np.float64) / quant.scale[0], -1e9, 1e9)
            data = np.clip(np.round(real) + quant.zero_point, *self.options.limits).astype(dtype)
        return replace(tensor, dtype=dtype, data=data, quant=quant)

    def floating(self, tensor: Tensor) -> Tensor:
        """The float32 form of a tensor, behind a DEQUANTIZE if an integer operator made it."""
        if not in_float(tensor) or tensor.constant:
            return tensor
        if tensor not in self.floats:
            self.floats[tensor] = replace(tensor, name=tensor.name + "_float")
            self.ops.append(Op("DEQUANTIZE", (self.stored(tensor),), (self.floats[tensor],)))
        return self.floats[tensor]

    def entrance(self, tensor: Tensor) -> Tensor:
        self.floats[tensor] = outside = replace(tensor)
        self.made[tensor] = replace(self.new(tensor), name=tensor.name + "_stored")
        self.ops.append(Op("QUANTIZE", (outside,), (self.made[tensor],)))
        return outside

    def exit(self, tensor: Tensor) -> Tensor:
        outside = replace(tensor)
        inside = replace(self.stored(tensor), name=tensor.name + "_stored")
        swap = {self.made[tensor]: inside}
        self.ops = [
            replace(
                op,
                inputs=tuple(None if t is None else swap.get(t, t) for t in op.inputs),
                outputs=tuple(swap.get(t, t) for t in op.outputs),
            )
            for op in self.ops
        ]
        self.made[tensor] = inside
        self.ops.append(Op("DEQUANTIZE", (inside,), (outside,)))
        return outside

    def result(self, tensor: Tensor) -> Tensor:
        return self.stored(tensor)

    def operator(self, op: Op) -> None:
        if is_float(op, self.options):
            self.float_operator(op)
        elif op.kind == "TABLE":
            self.ops += expand_table(op, self.stored(op.input(0)), self.stored(op.output))
        elif kernel := weights_of(op):
            self.ops.append(self.weighted(op, kernel))
        else:
            options = dict(op.options)
            if op.kind in ("ADD", "SUB") and self.options.activations == "int16":
                options["pot_scale_int16"] = False
            inputs = tuple(None if t is None else self.stored(t) for t in op.inputs)
            self.ops.append(replace(op, inputs=inputs, outputs=tuple(map(self.stored, op.outputs)), options=options))

    def float_operator(self, op: Op) -> None:
        inputs = tuple(None if t is None else self.floating(t) for t in op.inputs)
        outputs = tuple(replace(t, name=t.name + "_float") if in_float(t) else t for t in op.outputs)
        self.ops.append(replace(op, inputs=inputs, outputs=outputs))
        for tensor, made in zip(op.outputs, outputs, strict=True):
            if in_float(tensor):
                self.floats[tensor] = made
                self.ops.append(Op("QUANTIZE", (made,), (self.stored(tensor),)))

    def weighted(self, op: Op, kernel: Weighted) -> Op:
        x, weights, bias = op.input(kernel.data), op.input(kernel.weights), op.input(kernel.bias)
        data_in = self.stored(x)
        assert data_in.quant is not None
        stored, _, quant = store_weights(op, kernel, self.options, data_in.quant.scale[0])
        scale = np.asarray(quant.scale) * data_in.quant.scale[0]
        real = bias.values / scale
        wide = "int32" if self.options.activations == "int8" else "int64"
        stored_bias = np.clip(np.round(real), -BIAS_LIMIT, BIAS_LIMIT).astype(wide)
        axis = 0 if len(quant.scale) > 1 else -1
        inputs = [None if t is None else t for t in op.inputs]
        inputs[kernel.data] = data_in
        inputs[kernel.weights] = replace(weights, dtype=self.options.weights, data=stored, quant=quant)
        bias_quant = Quant(tuple(float(np.float32(s)) for s in scale), 0, axis)
        inputs[kernel.bias] = replace(bias, dtype=wide, data=stored_bias, quant=bias_quant)
        return replace(op, inputs=tuple(inputs), outputs=(self.stored(op.output),))
