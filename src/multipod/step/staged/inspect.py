"""What each stage of a pipeline holds, as plain data."""

import math
from dataclasses import dataclass
from typing import Any

import jax

from multipod.pipelines.timing import Costs, time_schedule
from multipod.step.staged.placement import StagePlacement
from multipod.step.staged.program import StagedProgram
from multipod.step.state import device_bytes


@dataclass(frozen=True)
class StageShare:
    """What one stage holds. Bytes are its own; `held` says what its device gives room to.

    Attributes:
      stage: from 0.
      layers: the names of its layers, those of several chunks in turn.
      cost: its share of the model's work.
      parameters: how many, tied ones in every stage that uses them.
      weights, optimizer: bytes.
      activations: bytes that its forward passes keep for as many micro-batches as are under way at once.
      live: how many these are, the most at once.
      delay: mean delay of its forward passes in updates, of the first of its parts; 0 of a synchronous schedule.
    """

    stage: int
    layers: tuple[str, ...]
    cost: float
    parameters: int
    weights: int
    optimizer: int
    activations: int
    live: int
    delay: float


def stages_of(placement: StagePlacement) -> list[StageShare]:
    """What each stage holds."""
    pipe, cut, proof = placement.pipe, placement.cut, placement.proof
    made, costs = proof.schedule, cut.costs
    found = []
    for stage in range(made.stages):
        own = [made.part(stage, chunk) for chunk in range(made.chunks)]
        states = [jax.eval_shape(pipe.setup.parts[n].optimizer.init, pipe.setup.weights[n]) for n in own]
        kept = sum(
            pipe.setup.tables.keep[chunk][stage] * _bytes(pipe.setup.passes[n].saved) for chunk, n in enumerate(own)
        )
        found.append(
            StageShare(
                stage,
                tuple(layer.name for n in own for layer in cut.parts[n]),
                sum(costs[n] for n in own) / sum(costs),
                sum(math.prod(leaf.shape) for n in own for leaf in jax.tree.leaves(pipe.setup.weights[n])),
                _bytes([pipe.setup.weights[n] for n in own]),
                _bytes(states),
                kept,
                proof.peak_live[stage],
                0.0 if made.synchronous else float(proof.mean_delay(own[0])),
            )
        )
    return found


@dataclass(frozen=True)
class PipeFacts:
    """What a pipeline costs each device: all have room for what the largest stage needs of each shape.

    Attributes:
      schedule: in words.
      utilisation: share of the time that stages work, by the layers' costs, a backward pass taking twice as long as
        a forward pass and messages no time.
      balance: mean cost of a stage over the highest.
      held: bytes of each part of the state.
      message: bytes that a stage sends to the next for a micro-batch.
      tied: weights that several parts hold.
    """

    schedule: str
    utilisation: float
    balance: float
    held: dict[str, int]
    message: int
    tied: tuple[str, ...]


def pipe_facts(program: StagedProgram) -> PipeFacts:
    """What the program's pipeline costs each device."""
    placement = program.placement
    made, cut = placement.proof.schedule, placement.cut
    costs = cut.costs
    clock = time_schedule(made, Costs(costs, tuple(2 * cost for cost in costs)))
    busy = clock.utilisation if made.synchronous else clock.steady_utilisation
    return PipeFacts(
        str(made),
        float(busy),
        cut.balance,
        {name: device_bytes(part) for name, part in program.state_parts.items()},
        _bytes(placement.pipe.slots.messages.slots),
        tuple(cut.tied),
    )


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
