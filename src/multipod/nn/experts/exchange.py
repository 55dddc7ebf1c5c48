"""Experts split over mesh axes: each device routes its own tokens, and two all-to-alls take them there and back.

For the inside of `jax.shard_map`, manual over the axes. Each device holds E / devices experts and sends, whatever its
tokens want, the same number of slots to each: with `capacity` those of its own groups, so that the tokens served are
the same on any number of devices. Without slots (`dropless`) it sends again, round after round, until nothing is left.

Source: arXiv:2006.16668 (GShard), section 3.2; the rounds are ours.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from multipod.nn.by_example import first_of, is_numbered
from multipod.nn.experts.routing import Choices, Routing, ranks
from multipod.nn.experts.sorting import Dispatch, return_to_tokens, send_to_rows
from multipod.pytrees import Pytree

Axis = str | tuple[str, ...]
"""Names of mesh axes; () is none."""

Round = Callable[..., Pytree]
"""One exchange, to be computed again in the backward pass."""
BySlots = Callable[[Pytree, jax.Array, jax.Array], jax.Array]
"""Weights of this device's experts, slots [experts, slots, M] and the numbers of their choices, to what they make."""

ROOM = 1.25
"""Slots of a round without capacity, as a part of what each expert would get of evenly spread choices."""


def devices(axis: Axis) -> int:
    """How many devices share the experts."""
    names = (axis,) if isinstance(axis, str) else axis
    return math.prod(lax.axis_size(name) for name in names)


def is_mapped(name: str) -> bool:
    """Whether an axis of this name is mapped here."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def first_group(axis: Axis, groups: int) -> jax.Array | int:
    """The number, over all devices, of this device's first group.

    Where the rows of the batch have numbers it is by those, else over the devices of `axis` alone.
    """
    if is_numbered():
        return first_of(groups)
    return lax.axis_index(axis) * groups if axis else 0


def exchange_through(
    by_slots: BySlots, weights: Pytree, x: jax.Array, choices: Choices, routing: Routing, slots: int, axis: Axis
) -> tuple[jax.Array, jax.Array]:
    """What all devices' experts make of x [G, S, M], and who was served, bool [G, S, K]. `slots` 0: everyone is.

    Bytes: each device sends and receives 2 * E * G * slots * M numbers, and as many in the backward pass.
    """
    if slots:
        place = ranks(choices, routing.order)
        y = _round(by_slots, weights, x, choices.gate, choices.expert, place, slots, axis)
        return y, (choices.expert < routing.experts) & (place < slots)
    one = jax.tree.map(lambda leaf: leaf.reshape(1, -1, *leaf.shape[2:]), choices)
    place, tokens = ranks(one, "tokens"), x.reshape(1, -1, x.shape[-1])
    slots = max(1, math.ceil(ROOM * one.expert.size / routing.experts))
    most = jnp.where(one.expert < routing.experts, place, -1).max()
    rounds = lax.pmax(most // slots + 1, axis)
    again = partial(_round, by_slots, slots=slots, axis=axis)
    y = again(weights, tokens, one.gate, one.expert, place)
    y += _further(again, rounds, slots, weights, tokens, one.gate, one.expert, place)
    return y.reshape(x.shape), choices.expert < routing.experts


def _round(
    by_slots: BySlots,
    weights: Pytree,
    x: jax.Array,
    gate: jax.Array,
    expert: jax.Array,
    place: jax.Array,
    slots: int,
    axis: Axis,
) -> jax.Array:
    """One way there and back, for the choices at a place below `slots` (and not below 0)."""
    groups, tokens, chosen = expert.shape
    several = devices(axis)
    experts = several * jax.tree.leaves(weights)[0].shape[0]
    where = _plan(expert, place, slots, experts)
    packed = send_to_rows(x.reshape(-1, x.shape[-1]), where).reshape(experts, groups * slots, -1)
    numbers = (where.choice + first_group(axis, groups) * (expert.size // groups)).reshape(experts, -1)
    there = partial(lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=1, tiled=True)
    y = by_slots(weights, there(packed), there(numbers))
    y = lax.all_to_all(y, axis, split_axis=1, concat_axis=0, tiled=True)
    gate = gate.reshape(-1, chosen).astype(y.dtype)
    return return_to_tokens(y.reshape(-1, y.shape[-1]), gate, where).reshape(groups, tokens, -1)


def _plan(expert: jax.Array, place: jax.Array, slots: int, experts: int) -> Dispatch:
    """Rows in the order expert, group, slot."""
    groups, _, chosen = expert.shape
    served = (expert < experts) & (place >= 0) & (place < slots)
    rows = experts * groups * slots
    row = (expert * groups + jnp.arange(groups, dtype=jnp.int32)[:, None, None]) * slots + place
    row = jnp.where(served, row, rows)
    count = jnp.arange(expert.size, dtype=jnp.int32)
    choice = jnp.full(rows, expert.size, jnp.int32).at[row.reshape(-1)].set(count, mode="drop")
    return Dispatch(choice, row.reshape(-1, chosen), jnp.full(experts, groups * slots, jnp.int32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 2))
def _further(
    again: Callable[..., jax.Array],
    rounds: jax.Array,
    slots: int,
    weights: Pytree,
    x: jax.Array,
    gate: jax.Array,
    expert: jax.Array,
    place: jax.Array,
) -> jax.Array:
    """All rounds after the first, added up. Their number is known on the way only, and the same on all devices."""
    step = lambda number, y: y + again(weights, x, gate, expert, place - number * slots)  # noqa: E731
    return lax.fori_loop(1, rounds, step, jnp.zeros_like(x))


def _further_forward(again: Round, rounds: jax.Array, slots: int, *rest: Pytree) -> tuple[jax.Array, Pytree]:
    return _further(again, rounds, slots, *rest), (rounds, rest)


def _further_backward(again: Round, slots: int, kept: Pytree, gradient: jax.Array) -> tuple[Pytree, ...]:
    """Each round is computed again: nothing of it was kept."""
    rounds, (weights, x, gate, expert, place) = kept

    def step(number: jax.Array, total: Pytree) -> Pytree:
        one = lambda *moving: again(*moving, expert, place - number * slots)  # noqa: E731
        return jax.tree.map(jnp.add, total, jax.vjp(one, weights, x, gate)[1](gradient))

    total = lax.fori_loop(1, rounds, step, jax.tree.map(jnp.zeros_like, (weights, x, gate)))
    return None, *total, None, None


_further.defvjp(_further_forward, _further_backward)
