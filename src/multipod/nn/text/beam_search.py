"""Generating sequences token by token: the likeliest at each place, or beam search. Static shapes, all inside `jit`.

Both take a function `step(tokens, position, cache) -> logits, cache`: from the tokens [rows] at `position` (0 is the
start token) and a cache, a pytree of arrays whose first dim counts rows, to the logits [rows, vocab] of the token at
the next place, and the new cache.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from multipod.pytrees import Pytree

Cache = Pytree
Step = Callable[[jax.Array, jax.Array, Cache], tuple[jax.Array, Cache]]

Bonus = Callable[[Cache], jax.Array]
"""At most 0 for each row of a cache, float32 [rows]: added to the score of a sequence that ends there."""

Agree = Callable[[jax.Array], jax.Array]
"""Of whether this device must go on, a bool: whether any of those must that exchange data in a step. What they do for
each other inside a step then ends for all of them at once."""

_NEVER = -1e9
"""Below any log-probability; finite, so that differences are no NaN."""


class Beams(NamedTuple):
    """What a search returns, best first.

    Attributes:
      tokens: int32 [examples, beam, length], without the start token; zeros behind the end token.
      scores: float32 [examples, beam]: log-probability over length penalty; about -1e9 for a place that is empty.
    """

    tokens: jax.Array
    scores: jax.Array


class _Search(NamedTuple):
    position: jax.Array
    alive: jax.Array  # [n, beam, length + 1], the start token first
    alive_log: jax.Array  # [n, beam], log-probabilities, falling
    finished: Beams
    cache: Cache  # rows n * beam


def _alone(goes_on: jax.Array) -> jax.Array:
    return goes_on


def greedy(
    step: Step, cache: Cache, rows: int, *, length: int, start: int, end: int, agree: Agree = _alone
) -> jax.Array:
    """The likeliest token at each place, int32 [rows, length], zeros behind `end`. Stops when all rows have ended."""

    def place(carry: tuple[jax.Array, ...]) -> tuple[Pytree, ...]:
        position, _, last, ended, tokens, cache = carry
        logits, cache = step(last, position, cache)
        last = jnp.where(ended, 0, logits.argmax(-1).astype(jnp.int32))
        tokens = lax.dynamic_update_slice_in_dim(tokens, last[:, None], position, 1)
        ended |= last == end
        return position + 1, agree(~ended.all()), last, ended, tokens, cache

    tokens, ended = jnp.zeros((rows, length), jnp.int32), jnp.zeros(rows, bool)
    first = jnp.int32(0), jnp.bool_(rows > 0), jnp.full(rows, start, jnp.int32), ended, tokens, cache
    return lax.while_loop(lambda c: (c[0] < length) & c[1], place, first)[4]


def beam_search(
    step: Step,
    cache: Cache,
    examples: int,
    *,
    beam: int,
    length: int,
    start: int,
    end: int,
    penalty: float = 0.6,
    bonus: Bonus | None = None,
    agree: Agree = _alone,
) -> Beams:
    """The `beam` best sequences of at most `length` tokens, `end` included, for each example.

    A sequence Y scores log P(Y) / lp(Y), lp(Y) = ((5 + |Y|) / 6)^penalty, and `bonus` of its cache, if there is one.
    At each place every alive beam is extended by every token; of the 2 beam likeliest extensions those that end are
    candidates for the finished list, and the `beam` likeliest others stay alive. An example stops when no alive beam
    can still enter its full list; all stop together. An example of which nothing has ended after `length` tokens gets
    its alive beams.

    `cache` has examples * beam rows, the beams of an example side by side. Time: at most `length` steps on so many
    rows. The logits are taken to log-probabilities in float32.

    Source: the length penalty is equation 14 of Wu et al., 2016, arXiv:1609.08144, whose coverage term is a bonus; two
    lists and 2 beam candidates as in the code of arXiv:1706.03762.
    """
    search = _first(cache, examples, beam, length, start)

    def may_improve(search: _Search) -> jax.Array:
        # Log-probabilities only fall and the penalty only grows, so this is the best that an alive beam can reach.
        reachable = search.alive_log[:, 0] / length_penalty(length, penalty)
        return (search.position < length) & (reachable > search.finished.scores[:, -1]).any()

    def place(carry: tuple[_Search, jax.Array]) -> tuple[_Search, jax.Array]:
        search = _extended(step, carry[0], end, penalty, bonus)
        return search, agree(may_improve(search))

    done, _ = lax.while_loop(lambda carry: carry[1], place, (search, may_improve(search)))
    some = done.finished.scores[:, :1] > _NEVER / 2
    return Beams(
        jnp.where(some[..., None], done.finished.tokens, done.alive[:, :, 1:]),
        jnp.where(some, done.finished.scores, done.alive_log / length_penalty(length, penalty)),
    )


def length_penalty(length: jax.Array | float, penalty: float) -> jax.Array:
    """((5 + length) / 6)^penalty."""
    return ((jnp.asarray(length, jnp.float32) + 5.0) / 6.0) ** penalty


def _first(cache: Cache, examples: int, beam: int, length: int, start: int) -> _Search:
    """One alive beam for each example, the start token; the others are impossible, so that no two are the same."""
    return _Search(
        jnp.int32(0),
        jnp.zeros((examples, beam, length + 1), jnp.int32).at[:, :, 0].set(start),
        jnp.full((examples, beam), _NEVER).at[:, 0].set(0.0),
        Beams(jnp.zeros((examples, beam, length), jnp.int32), jnp.full((examples, beam), _NEVER)),
        cache,
    )


def _extended(step: Step, search: _Search, end: int, penalty: float, bonus: Bonus | None) -> _Search:
    """The search one token further."""
    position, alive, alive_log, finished, cache = search
    examples, beam, _ = alive.shape
    last = lax.dynamic_index_in_dim(alive, position, 2, keepdims=False)
    logits, cache = step(last.reshape(-1), position, cache)
    logs = jax.nn.log_softmax(logits.astype(jnp.float32)).reshape(examples, beam, -1)
    vocab = logs.shape[-1]
    logs, which = lax.top_k((alive_log[..., None] + logs).reshape(examples, -1), min(2 * beam, beam * vocab))
    parent, token = which // vocab, which % vocab
    tokens = jnp.take_along_axis(alive, parent[..., None], 1)
    tokens = lax.dynamic_update_slice_in_dim(tokens, token[..., None].astype(jnp.int32), position + 1, 2)

    ends = token == end
    scores = logs / length_penalty(position + 1, penalty)
    if bonus is not None:
        scores += jnp.take_along_axis(bonus(cache).reshape(examples, beam), parent, 1)
    ended = jnp.where(ends & (logs > _NEVER / 2), scores, _NEVER)
    finished = _best(beam, finished, Beams(tokens[:, :, 1:], ended))
    alive_log, kept = lax.top_k(jnp.where(ends, _NEVER, logs), beam)
    alive = jnp.take_along_axis(tokens, kept[..., None], 1)
    parent = jnp.take_along_axis(parent, kept, 1)
    rows = (jnp.arange(examples)[:, None] * beam + parent).reshape(-1)
    return _Search(position + 1, alive, alive_log, finished, jax.tree.map(lambda leaf: leaf[rows], cache))


def _best(beam: int, *lists: Beams) -> Beams:
    """The `beam` best of several lists; equal scores in the order of the lists."""
    tokens, scores = (jnp.concatenate(parts, 1) for parts in zip(*lists, strict=True))
    scores, which = lax.top_k(scores, beam)
    return Beams(jnp.take_along_axis(tokens, which[..., None], 1), scores)
