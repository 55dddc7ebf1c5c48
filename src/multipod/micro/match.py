"""Patterns over operators, and the loop that applies rewrite rules until none fits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Union

import numpy as np

from multipod.micro.graph import Graph, Op, Tensor, drop_dead, inner_graphs, sort_ops, substitute

Pattern = Union["Node", "Const", str]
"""A tensor: made by an operator (`Node`), a constant (`Const`), or any; the same name is the same tensor."""

SYMMETRIC = {"ADD", "MUL", "MAXIMUM", "MINIMUM"}


@dataclass(frozen=True)
class Node:
    """The output of an operator of this kind (or of one of several, as `A|B`), whose inputs match.

    `once`: nothing else reads it, so that it may be changed or go. `name`: the operator, for the builder.
    """

    kind: str
    inputs: Sequence[Pattern] = ()
    once: bool = False
    name: str = ""


@dataclass(frozen=True)
class Const:
    """A constant, under a name; `number`: all its elements are this number, to 1e-6 of it."""

    name: str = ""
    number: float | None = None


@dataclass
class Match:
    """What a pattern matched: tensors and operators by name."""

    op: Op
    tensors: dict[str, Tensor] = field(default_factory=dict)
    ops: dict[str, Op] = field(default_factory=dict)
    uses: Mapping[Tensor, int] = field(default_factory=dict)
    makers: Mapping[Tensor, Op] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


Builder = Callable[[Match], "Sequence[Op] | Tensor | None"]
"""The operators that replace the root of a match, the last of which makes the root's output; or a tensor that the
root's output equals; or None: not this one after all."""


@dataclass(frozen=True)
class Rewrite:
    """A rewrite: where `pattern` matches, the operator at its root is replaced by what `build` returns."""

    name: str
    pattern: Node
    build: Builder


def node(kind: str, *inputs: Pattern, once: bool = False, name: str = "") -> Node:
    """`Node(kind, inputs)`, shorter."""
    return Node(kind, inputs, once, name)


def make_op(kind: str, inputs: Sequence[Tensor | None], output: Tensor, source: str = "", **options: Any) -> Op:
    """An operator with one output."""
    return Op(kind, tuple(inputs), (output,), options, source)


def change_op(op: Op, inputs: Sequence[Tensor | None], output: Tensor, **options: object) -> Op:
    """An operator with other inputs, another output, and some other options."""
    return replace(op, inputs=tuple(inputs), outputs=(output,), options={**op.options, **options})


def becomes(kind: str, *names: str, **options: object) -> Builder:
    """A builder of one operator of the named tensors."""
    return lambda match: [make_op(kind, [match[name] for name in names], match.op.output, match.op.source, **options)]


def rewrite(graph: Graph, rules: Sequence[Rewrite]) -> Graph:
    """The graph after every rule has been applied wherever it fits, again and again; graphs inside it as well."""
    for _ in range(10_000):
        changed = _sweep(graph, rules)
        if changed is None:
            return _inside(graph, rules)
        graph = changed
    raise AssertionError("rewrite rules undo each other")


def _inside(graph: Graph, rules: Sequence[Rewrite]) -> Graph:
    def deep(op: Op) -> Op:
        if not inner_graphs(op):
            return op
        return replace(op, options={k: rewrite(v, rules) if isinstance(v, Graph) else v for k, v in op.options.items()})

    return replace(graph, ops=tuple(deep(op) for op in graph.ops))


def _sweep(graph: Graph, rules: Sequence[Rewrite]) -> Graph | None:
    """The graph with every match of one pass replaced, or None. Matches of a pass do not share operators."""
    makers, uses = graph.producer, graph.uses
    by_kind: dict[str, list[Rewrite]] = {}
    for rule in rules:
        for kind in rule.pattern.kind.split("|"):
            by_kind.setdefault(kind, []).append(rule)
    touched: set[Op] = set()
    made: dict[Op, Sequence[Op]] = {}
    same: dict[Tensor, Tensor] = {}
    for op in reversed(graph.ops):
        if op in touched:
            continue
        for match, rule in _matches(op, by_kind.get(op.kind, ()), makers, uses):
            involved = {op, *match.ops.values()}
            if involved & touched:
                continue
            result = rule.build(match)
            if isinstance(result, Tensor):
                if op.output in graph.outputs and result not in makers:
                    continue  # an output must be made by an operator
                made[op], same[op.output] = (), result
            elif result is not None:
                assert result[-1].outputs == op.outputs, rule.name
                made[op] = result
            else:
                continue
            touched |= {*involved, *(makers[t] for t in (result,) if isinstance(t, Tensor) and t in makers)}
            break
    if not made:
        return None
    ops = sort_ops(part for op in graph.ops for part in made.get(op, (op,)))
    return drop_dead(substitute(replace(graph, ops=ops), same))


def _matches(
    op: Op, rules: Sequence[Rewrite], makers: Mapping[Tensor, Op], uses: Mapping[Tensor, int]
) -> Iterator[tuple[Match, Rewrite]]:
    for rule in rules:
        for match in _op(rule.pattern, op, Match(op, uses=uses, makers=makers), makers):
            yield match, rule


def _op(pattern: Node, op: Op, match: Match, makers: Mapping[Tensor, Op]) -> Iterator[Match]:
    if op.kind not in pattern.kind.split("|") or len(pattern.inputs) > len(op.inputs):
        return
    if op.kind in pattern.kind.split("|") and op.options.get("fused_activation_function", "NONE") != "NONE":
        return  # what is fused already ends a pattern
    here = Match(
        match.op, dict(match.tensors), {**match.ops, pattern.name or f"#{len(match.ops)}": op}, match.uses, match.makers
    )
    orders = [op.inputs]
    if op.kind in SYMMETRIC and len(pattern.inputs) == 2:
        orders.append(op.inputs[::-1])
    for order in orders:
        yield from _inputs(pattern.inputs, order, here, makers)


def _inputs(
    patterns: Sequence[Pattern], tensors: Sequence[Tensor | None], match: Match, makers: Mapping[Tensor, Op]
) -> Iterator[Match]:
    if not patterns:
        yield match
        return
    tensor = tensors[0]
    if tensor is None:
        return
    for step in _tensor(patterns[0], tensor, match, makers):
        yield from _inputs(patterns[1:], tensors[1:], step, makers)


def _tensor(pattern: Pattern, tensor: Tensor, match: Match, makers: Mapping[Tensor, Op]) -> Iterator[Match]:
    if isinstance(pattern, str):
        if match.tensors.get(pattern, tensor) is tensor:
            yield Match(match.op, {**match.tensors, pattern: tensor}, match.ops, match.uses, match.makers)
    elif isinstance(pattern, Const):
        if tensor.constant and (pattern.number is None or is_all(tensor, pattern.number)):
            named = {pattern.name: tensor} if pattern.name else {}
            yield Match(match.op, {**match.tensors, **named}, match.ops, match.uses, match.makers)
    elif tensor in makers and not (pattern.once and match.uses[tensor] > 1):
        yield from _op(pattern, makers[tensor], match, makers)


def is_all(tensor: Tensor, number: float) -> bool:
    """Whether all elements of a constant are this number."""
    return bool(tensor.values.size) and bool(np.allclose(tensor.values, number, rtol=1e-5, atol=1e-12))
