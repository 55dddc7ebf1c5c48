"""Dispatch by one-hot products: the plain form, to be read first. It makes arrays [G, S, E, slots], so it is slow.

Letters as in `routing.py`; C is the slots of an expert for a group.
"""

import jax
import jax.numpy as jnp

from multipod.nn.experts.routing import Choices, Order, Routing


def places_by_counting(choices: Choices, routing: Routing, order: Order) -> jax.Array:
    """How many choices of its group come before each one at its expert, int32 [G, S, K], by counting.

    The words of the paper: choice after choice, a running count in the order of the tokens, on top of what the choices
    before took of each expert.
    """
    wanted = jax.nn.one_hot(choices.expert, routing.experts, dtype=jnp.int32)  # [G, S, K, E]
    if order == "tokens":
        flat = wanted.reshape(wanted.shape[0], -1, routing.experts)
        return ((jnp.cumsum(flat, 1) - flat) * flat).sum(-1).reshape(choices.expert.shape)
    if order == "confident":
        by_confidence = jnp.argsort(-choices.confidence, axis=-1, stable=True)
        sorted_choices = jax.tree.map(lambda leaf: jax.vmap(lambda a, i: a[i])(leaf, by_confidence), choices)
        by_rank = places_by_counting(sorted_choices, routing, "choices")
        return jax.vmap(lambda a, i: a[jnp.argsort(i)])(by_rank, by_confidence)
    taken = jnp.zeros_like(wanted[:, :1, 0])
    found: list[jax.Array] = []
    for choice in range(routing.chosen):
        one = wanted[:, :, choice]
        found.append(((jnp.cumsum(one, 1) - one + taken) * one).sum(-1))
        taken += one.sum(1, keepdims=True)
    return jnp.stack(found, -1)


def masks(choices: Choices, routing: Routing, slots: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`dispatch` and `combine`, [G, S, E, C]: 1 and the gate where a token has a slot; and bool [G, S, K], who has one.

    Gates are not made to add up to 1 again after some are dropped.
    """
    place = places_by_counting(choices, routing, routing.order)
    served = (choices.expert < routing.experts) & (place < slots)
    expert = jax.nn.one_hot(choices.expert, routing.experts)
    slot = jax.nn.one_hot(jnp.where(served, place, slots), slots)
    dispatch = jnp.einsum("gske,gskc->gsec", expert, slot)
    return dispatch, jnp.einsum("gsk,gske,gskc->gsec", choices.gate, expert, slot), served


def send_to_slots(x: jax.Array, dispatch: jax.Array) -> jax.Array:
    """The tokens x [G, S, M] in their slots, [E, G, C, M]; empty slots are zero."""
    return jnp.einsum("gsec,gsm->egcm", dispatch.astype(x.dtype), x)


def return_to_tokens(y: jax.Array, combine: jax.Array) -> jax.Array:
    """What the experts made of the slots, y [E, G, C, M], weighted and added up for each token, [G, S, M]."""
    return jnp.einsum("gsec,egcm->gsm", combine.astype(y.dtype), y)


def numbers(choices: Choices, routing: Routing, slots: int) -> jax.Array:
    """The number of the choice in each slot, `token * K + choice` over all groups, int32 [E, G * C]; 0 where empty."""
    place = places_by_counting(choices, routing, routing.order)
    count = jnp.arange(choices.expert.size, dtype=jnp.int32).reshape(choices.expert.shape)
    group = jnp.arange(len(choices.expert))[:, None, None]
    empty = jnp.zeros((routing.experts, len(choices.expert), slots), jnp.int32)
    return empty.at[choices.expert, group, place].set(count, mode="drop").reshape(routing.experts, -1)
