"""Builds pipeline schedules: closed forms for the tick of every pass.

P stages, here numbered i = 1 ... P as in the papers; N micro-batches; micro-batch m = k N + j belongs to update k.
"""

from collections.abc import Callable
from dataclasses import dataclass

from multipod.errors import ScheduleError, nearest
from multipod.pipelines.schedule import BackwardWeights, Kind, PipelineOp, PipelineSchedule

Ticks = Callable[[int, int], tuple[int, int]]
"""From stage i and micro-batch m of the first update to the ticks of its forward and backward pass."""

ORDER: dict[Kind, int] = {"backward": 0, "forward": 1, "update": 2}
"""What comes first within a tick."""


def gpipe(stages: int, micro_batches: int, updates: int = 1) -> PipelineSchedule:
    """All forward passes, then all backward passes, then the update.

    Utilisation N / (N + P - 1); every stage keeps the activations of all N micro-batches.
    Source: Huang et al., 2018, arXiv:1811.06965.
    """
    fill = micro_batches + stages - 1
    return _synchronous(
        "gpipe", stages, micro_batches, updates, 2 * fill, lambda i, m: (m + i - 1, fill + m + stages - i)
    )


def one_f_one_b(stages: int, micro_batches: int, updates: int = 1) -> PipelineSchedule:
    """One forward, one backward: a stage that has filled its part of the pipe begins to empty it at once.

    As fast as `gpipe`, but stage i keeps the activations of min(N, P - i + 1) micro-batches.
    Source: Narayanan et al., 2019, arXiv:1806.03377 (order), 2021, arXiv:2006.09503 (with a flush at each update). In
    lock-step, forward at tick 2 m + i - 1 and backward at 2 m + 2 P - i give the same order on each device.
    """
    return _synchronous(
        "1f1b",
        stages,
        micro_batches,
        updates,
        2 * (micro_batches + stages - 1),
        lambda i, m: (2 * m + i - 1, 2 * m + 2 * stages - i),
    )


def eager_1f1b(stages: int, micro_batches: int, updates: int = 1) -> PipelineSchedule:
    """1F1B that goes forward twice as far ahead: in steady state each tick has a forward and a backward pass.

    In lock-step all stages' ticks are so equally long, while those of `1f1b` wait for a backward pass next door where
    they go forward themselves: with backward passes twice as long that is up to a quarter of the time. Paid with
    activations: min(N, 2 (P - i) + 1) micro-batches at stage i.
    Source: the eager 1F1B of Zhuang et al., 2022, arXiv:2211.05322, which goes ahead to hide messages. Here the ticks
    are those of `pipemare`, with a flush at each update.
    """
    ticks = micro_batches + 2 * stages - 1
    return _synchronous(
        "eager-1f1b", stages, micro_batches, updates, ticks, lambda i, m: (m + i - 1, m + 2 * stages - i)
    )


def pipemare(stages: int, micro_batches: int, updates: int = 3) -> PipelineSchedule:
    """Never waits: forward of m at tick m + i - 1, backward at m + 2 P - i, with the weights that are there then.

    The forward pass of micro-batch j of update k sees version k - ceil((2 (P - i) + 1 - j) / N) of the weights (at
    least 0), in the mean over j a delay of tau_i = (2 (P - i) + 1) / N; the backward pass sees version k. Utilisation 1
    but for the first and last fill.
    Source: Yang et al., 2019, arXiv:1910.05124, table 1; the integer versions follow from its mean delays.
    """
    return _asynchronous("pipemare", stages, micro_batches, updates, "current")


def pipedream(stages: int, micro_batches: int, updates: int = 3) -> PipelineSchedule:
    """The order of `pipemare`, with the stashed weights of its own forward pass in each backward pass.

    Stage i keeps up to ceil((2 (P - i) + 1) / N) old versions beside the present one.
    Source: Narayanan et al., 2019, arXiv:1806.03377, with the delays of arXiv:1910.05124, table 1.
    """
    return _asynchronous("pipedream", stages, micro_batches, updates, "stashed")


def interleaved(stages: int, micro_batches: int, updates: int = 1, chunks: int = 2) -> PipelineSchedule:
    """1F1B over stages * chunks parts, dealt out in turn: the bubble is shorter by the factor `chunks`.

    Source: Narayanan et al., 2021, arXiv:2104.04473, section 2.2. Ticks are the earliest of that order.

    Raises:
      ScheduleError: micro-batches that are no multiple of the stages.
    """
    _positive("interleaved", stages, micro_batches, updates, chunks)
    if micro_batches % stages:
        below = micro_batches // stages * stages
        raise ScheduleError(
            f"pipeline interleaved: {micro_batches} micro-batches do not go round {stages} stages evenly. "
            f"Take {' or '.join(str(n) for n in (below, below + stages) if n)} micro-batches, or 1f1b."
        )
    orders = [_interleaved_order(p, stages, micro_batches, chunks) for p in range(stages)]
    template = _earliest(orders, stages, chunks)
    ends = [ops[-1].tick for ops in template]
    first = [[*ops, PipelineOp("update", 0, 0, end)] for ops, end in zip(template, ends, strict=True)]
    stride = 1 + max(ends)
    repeated = [_repeat(ops, micro_batches, updates, stride) for ops in first]
    return PipelineSchedule(
        "interleaved", stages, micro_batches, updates, tuple(map(tuple, repeated)), stride, chunks=chunks
    )


@dataclass(frozen=True)
class Pipeline:
    """A builder, and a line about it."""

    function: Callable[..., PipelineSchedule]
    summary: str
    options: tuple[str, ...] = ()


PIPELINES = {
    "gpipe": Pipeline(gpipe, "all forward, then all backward; keeps N micro-batches a stage"),
    "1f1b": Pipeline(one_f_one_b, "forward and backward in turn; keeps P - i + 1 micro-batches at stage i"),
    "eager-1f1b": Pipeline(eager_1f1b, "1f1b with both in each tick; keeps 2 (P - i) + 1 micro-batches at stage i"),
    "interleaved": Pipeline(interleaved, "1f1b with several parts of the model on each device", ("chunks",)),
    "pipemare": Pipeline(pipemare, "asynchronous: no bubble, no stash; delayed forward, current backward weights"),
    "pipedream": Pipeline(pipedream, "asynchronous: no bubble; each micro-batch's weights are stashed"),
}
"""Every pipeline: its name, what builds it, and its options beside stages, micro_batches and updates."""


def build(name: str, stages: int, micro_batches: int, updates: int = 1, **options: int) -> PipelineSchedule:
    """The schedule called `name` in `PIPELINES`.

    Raises:
      ScheduleError: no such name or option, numbers below 1, or what the builder refuses.
    """
    if name not in PIPELINES:
        raise ScheduleError(f"There is no pipeline {name!r}. {nearest(name, PIPELINES)}")
    known = PIPELINES[name].options
    unknown = [option for option in options if option not in known]
    if unknown:
        raise ScheduleError(
            f"pipeline {name} has no option {', '.join(unknown)}. It has: {', '.join(known) or 'none'}."
        )
    return PIPELINES[name].function(stages, micro_batches, updates, **options)


def _synchronous(
    name: str, stages: int, micro_batches: int, updates: int, stride: int, ticks: Ticks
) -> PipelineSchedule:
    _positive(name, stages, micro_batches, updates)
    ops = _from_ticks(stages, micro_batches, updates, stride, ticks)
    return PipelineSchedule(name, stages, micro_batches, updates, ops, stride)


def _asynchronous(
    name: str, stages: int, micro_batches: int, updates: int, weights: BackwardWeights
) -> PipelineSchedule:
    _positive(name, stages, micro_batches, updates)
    ops = _from_ticks(stages, micro_batches, updates, micro_batches, lambda i, m: (m + i - 1, m + 2 * stages - i))
    return PipelineSchedule(
        name, stages, micro_batches, updates, ops, micro_batches, backward_weights=weights, synchronous=False
    )


def _positive(name: str, stages: int, micro_batches: int, updates: int, chunks: int = 1) -> None:
    numbers = {"stages": stages, "micro_batches": micro_batches, "updates": updates, "chunks": chunks}
    wrong = [f"{what}={n}" for what, n in numbers.items() if n < 1]
    if wrong:
        raise ScheduleError(f"pipeline {name}: {', '.join(wrong)}. Give whole numbers from 1 on.")


def _from_ticks(
    stages: int, micro_batches: int, updates: int, stride: int, ticks: Ticks
) -> tuple[tuple[PipelineOp, ...], ...]:
    """The operations of every stage; the update comes with the last backward pass."""
    everything = []
    for i in range(1, stages + 1):
        ops = []
        for m in range(micro_batches):
            forward, backward = ticks(i, m)
            ops += [PipelineOp("forward", m, 0, forward), PipelineOp("backward", m, 0, backward)]
        ops.append(PipelineOp("update", 0, 0, max(op.tick for op in ops)))
        everything.append(tuple(_repeat(ops, micro_batches, updates, stride)))
    return tuple(everything)


def _repeat(ops: list[PipelineOp], micro_batches: int, updates: int, stride: int) -> list[PipelineOp]:
    """The operations of one update, for each of `updates`, in order."""
    several = [
        PipelineOp(
            op.kind, op.micro + k * (1 if op.kind == "update" else micro_batches), op.chunk, op.tick + k * stride
        )
        for k in range(1, updates)
        for op in ops
    ]
    return sorted([*ops, *several], key=lambda op: (op.tick, ORDER[op.kind]))


def _interleaved_order(p: int, stages: int, micro_batches: int, chunks: int) -> list[tuple[Kind, int, int]]:
    """What device p (from 0) does, in order: (kind, micro-batch, chunk)."""
    total = micro_batches * chunks
    round_ = stages * chunks

    def passed(n: int) -> tuple[int, int]:
        return n // round_ * stages + n % stages, n % round_ // stages

    def forward(n: int) -> tuple[Kind, int, int]:
        return "forward", *passed(n)

    def backward(n: int) -> tuple[Kind, int, int]:
        micro, chunk = passed(n)
        return "backward", micro, chunks - 1 - chunk

    warm = total if micro_batches == stages else min((stages - p - 1) * 2 + (chunks - 1) * stages, total)
    order = [forward(n) for n in range(warm)]
    for n in range(total - warm):
        order += [forward(warm + n), backward(n)]
    return order + [backward(n) for n in range(total - warm, total)]


def _earliest(orders: list[list[tuple[Kind, int, int]]], stages: int, chunks: int) -> list[list[PipelineOp]]:
    """The orders with the earliest ticks at which all that a pass needs was sent before; one pass a tick."""
    done: dict[tuple[Kind, int, int], int] = {}  # (kind, micro-batch, part) to its tick
    made: list[list[PipelineOp]] = [[] for _ in orders]
    moved = True
    while moved:
        moved = False
        for p, order in enumerate(orders):
            while len(made[p]) < len(order):
                kind, micro, chunk = order[len(made[p])]
                part = chunk * stages + p
                needs = [(kind, micro, part - 1 if kind == "forward" else part + 1)]
                if kind == "backward" and part == stages * chunks - 1:
                    needs = [("forward", micro, part)]
                if kind == "forward" and part == 0:
                    needs = []
                if any(need not in done for need in needs):
                    break
                last = made[p][-1].tick if made[p] else -1
                tick = 1 + max([last, *(done[need] for need in needs)])
                made[p].append(PipelineOp(kind, micro, chunk, tick))
                done[kind, micro, part] = tick
                moved = True
    assert all(len(a) == len(b) for a, b in zip(made, orders, strict=True)), "the order waits for itself"
    return made
