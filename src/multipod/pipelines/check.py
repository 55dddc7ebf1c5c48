"""Proves a pipeline schedule, and finds its delays, the activations it keeps, and the weights it stashes."""

from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from multipod.errors import ScheduleError
from multipod.pipelines.schedule import PipelineOp, PipelineSchedule

SHOWN = 8
"""Errors listed in one message."""


@dataclass(frozen=True)
class PipelineProof:
    """What `check` found out. A delay is k minus the version that a pass of update k saw, in updates.

    Attributes:
      schedule: what was proven.
      forward, backward: for each part of the model, the version seen by the pass of every micro-batch.
      peak_live: for each device, the most micro-batches (times chunks) whose activations it keeps at once.
      stashed: for each device, the most old versions of its weights that it must keep beside the present one.
    """

    schedule: PipelineSchedule
    forward: tuple[tuple[int, ...], ...]
    backward: tuple[tuple[int, ...], ...]
    peak_live: tuple[int, ...]
    stashed: tuple[int, ...]

    def forward_delays(self, part: int) -> tuple[int, ...]:
        """The delay of each micro-batch's forward pass in the last update, N numbers."""
        return self._delays(self.forward[part])

    def backward_delays(self, part: int) -> tuple[int, ...]:
        """The delay of each micro-batch's backward pass, which with stashed weights sees what the forward pass saw."""
        return self._delays(self.backward[part])

    def mean_delay(self, part: int) -> Fraction:
        """tau_fwd of the last update: the mean of `forward_delays`.

        An asynchronous schedule needs enough updates for its pipe to be full; `settled` tells.
        """
        return Fraction(sum(self.forward_delays(part)), self.schedule.micro_batches)

    @property
    def settled(self) -> bool:
        """Whether no pass of the last update saw version 0 only because there is nothing older."""
        last = -self.schedule.micro_batches
        return self.schedule.synchronous or all(min(seen[last:]) > 0 for seen in self.forward)

    def _delays(self, seen: tuple[int, ...]) -> tuple[int, ...]:
        k = self.schedule.updates - 1
        return tuple(k - version for version in seen[-self.schedule.micro_batches :])


def check(schedule: PipelineSchedule) -> PipelineProof:
    """Proves that the schedule trains, and that it is as synchronous as it says.

    Each part of the model treats each micro-batch forward once and, later, backward once, after its neighbour did so in
    an earlier tick; every update follows all backward passes of its minibatch; what is done for update k + 1 is done
    `stride` ticks after the same for update k. Linear in the number of operations.

    Raises:
      ScheduleError: everything that is wrong.
    """
    wrong = [*_once(schedule), *_ticks(schedule), *_repeats(schedule)]
    if not wrong:
        wrong = [*_needs(schedule), *_updates(schedule)]
    if wrong:
        more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
        raise ScheduleError(f"{schedule}: {'; '.join(wrong[:SHOWN])}{more}. Mend the builder or the file.")
    proof = _proof(schedule)
    if schedule.synchronous:
        late = [p for p in range(schedule.parts) if any(proof.forward_delays(p)) or any(proof.backward_delays(p))]
        if late:
            raise ScheduleError(
                f"{schedule}: calls itself synchronous, and parts {late[:SHOWN]} see weights of other updates. "
                "Build it with synchronous=False, or let passes wait for the update."
            )
    return proof


def check_tied(schedule: PipelineSchedule, tied: dict[str, tuple[int, ...]]) -> None:
    """Refuses weights that parts of the model share, where the schedule cannot keep them equal.

    tied: from the name of a shared weight to the parts that use it. A synchronous schedule adds the parts' gradients
    before every part updates; an asynchronous one updates each part at a moment of its own.

    Raises:
      ScheduleError: names the weights and their parts.
    """
    apart = {name: parts for name, parts in tied.items() if len({p % schedule.stages for p in parts}) > 1}
    if apart and not schedule.synchronous:
        named = ", ".join(f"{name} (parts {', '.join(map(str, parts))})" for name, parts in apart.items())
        raise ScheduleError(
            f"{schedule}: stages that share weights update them at different moments, so they cannot stay equal: "
            f"{named}. Untie them (model.tied=false, where a model has it), cut the model so that one stage has both, "
            "or take 1f1b."
        )


def _key(schedule: PipelineSchedule, p: int, op: PipelineOp) -> tuple[str, int, int]:
    return op.kind, op.micro, schedule.part(p, op.chunk)


def _once(schedule: PipelineSchedule) -> list[str]:
    """Passes and updates that are missing, doubled, or not of this pipeline."""
    wrong = []
    total = schedule.updates * schedule.micro_batches
    for p, ops in enumerate(schedule.ops):
        wanted = {(k, m, c) for k in ("forward", "backward") for m in range(total) for c in range(schedule.chunks)}
        wanted |= {("update", k, 0) for k in range(schedule.updates)}
        for op in ops:
            name = (op.kind, op.micro, op.chunk)
            if name not in wanted:
                wrong.append(f"device {p}: {op.kind} of {op.micro} (chunk {op.chunk}) is there twice or does not exist")
            wanted.discard(name)
        wrong += [f"device {p}: no {kind} of {micro} (chunk {chunk})" for kind, micro, chunk in sorted(wanted)]
    return wrong


def _ticks(schedule: PipelineSchedule) -> list[str]:
    """Operations out of the order of their ticks, or too many in one."""
    wrong = []
    for p, ops in enumerate(schedule.ops):
        if any(a.tick > b.tick for a, b in pairwise(ops)):
            wrong.append(f"device {p}: its ticks do not rise")
        seen: set[tuple[int, str]] = set()
        for op in ops:
            if (op.tick, op.kind) in seen:
                wrong.append(f"device {p}: two of {op.kind} in tick {op.tick}")
            seen.add((op.tick, op.kind))
    return wrong


def _repeats(schedule: PipelineSchedule) -> list[str]:
    """Operations that are not where `stride` says."""
    wrong = []
    for p, ops in enumerate(schedule.ops):
        places = {(op.kind, op.micro, op.chunk): op.tick for op in ops}
        for (kind, micro, chunk), tick in places.items():
            period = 1 if kind == "update" else schedule.micro_batches
            first = places.get((kind, micro % period, chunk))
            if first is not None and tick != first + micro // period * schedule.stride:
                wrong.append(f"device {p}: {kind} of {micro} is not {schedule.stride} ticks after the update before")
    return wrong


def _needs(schedule: PipelineSchedule) -> list[str]:
    """Passes that begin before what they need was sent."""
    at = {_key(schedule, p, op): op.tick for p, ops in enumerate(schedule.ops) for op in ops if op.kind != "update"}
    wrong = []
    for (kind, micro, part), tick in at.items():
        source = part - 1 if kind == "forward" else part + 1
        if 0 <= source < schedule.parts and at[kind, micro, source] >= tick:
            wrong.append(
                f"{kind} of {micro} in part {part} at tick {tick}, and part {source} sends at {at[kind, micro, source]}"
            )
        # In one tick the backward pass comes first, so it cannot use that tick's forward pass.
        if kind == "backward" and at["forward", micro, part] >= tick:
            wrong.append(f"backward of {micro} in part {part} before its forward pass")
    return wrong


def _updates(schedule: PipelineSchedule) -> list[str]:
    """Updates without all of their gradients."""
    wrong = []
    for p, ops in enumerate(schedule.ops):
        have = [0] * schedule.updates
        for op in ops:
            if op.kind == "backward":
                have[schedule.update_of(op.micro)] += 1
            elif op.kind == "update" and have[op.micro] < schedule.micro_batches * schedule.chunks:
                wrong.append(f"device {p}: update {op.micro} after {have[op.micro]} of its backward passes")
    return wrong


def _proof(schedule: PipelineSchedule) -> PipelineProof:
    total = schedule.updates * schedule.micro_batches
    forward = [[0] * total for _ in range(schedule.parts)]
    backward = [[0] * total for _ in range(schedule.parts)]
    peaks, stashes = [], []
    for p, ops in enumerate(schedule.ops):
        version, peak, stash = 0, 0, 0
        live: dict[tuple[int, int], int] = {}  # (micro-batch, chunk) to the version of its forward pass
        for op in ops:
            part = schedule.part(p, op.chunk)
            if op.kind == "forward":
                forward[part][op.micro] = live[op.micro, op.chunk] = version
            elif op.kind == "backward":
                own = live.pop((op.micro, op.chunk))
                backward[part][op.micro] = own if schedule.backward_weights == "stashed" else version
            else:
                version += 1
            peak = max(peak, len(live))
            if schedule.backward_weights == "stashed":
                stash = max(stash, len({*live.values()} - {version}))
        peaks.append(peak)
        stashes.append(stash)
    return PipelineProof(
        schedule, tuple(map(tuple, forward)), tuple(map(tuple, backward)), tuple(peaks), tuple(stashes)
    )
