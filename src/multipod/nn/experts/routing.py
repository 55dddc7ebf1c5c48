"""The router: which experts every token goes to, with which weight, and the losses that keep it sound.

Shapes: G groups of S tokens, M features, E experts, K choices of a token. Everything here is float32.

Source: Zoph et al., 2022, arXiv:2202.08906 (ST-MoE). Where the released implementations differ we take the paper's own:
gates are renormalised over the choices, the balance loss counts first choices alone, and each loss has its own
coefficient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp

from multipod.errors import RecipeError

Order = Literal["choices", "tokens", "confident"]
"""Who takes the slots of an expert first. `choices`: all first choices, then all second ones, each in the order of the
tokens (the paper's). `tokens`: token after token with all its choices: no token depends on a later one. `confident`: as
`choices`, but the tokens with the largest probability first (batch prioritised routing, arXiv:2106.05974)."""

Second = Literal["all", "none", "threshold", "random"]
"""Which choices after the first are kept: all; none; those with a gate above `threshold`; each with the probability
min(1, gate / `threshold`)."""


@dataclass(frozen=True)
class Routing:
    """How tokens are sent to experts. The defaults are those of ST-MoE, but for `evaluation_second`.

    Attributes:
      experts: E.
      chosen: K, experts of a token.
      group: S, tokens that share the slots of the experts. 0: all tokens of a device are one group, so that results
        depend on the number of devices.
      capacity: slots of an expert for S / E tokens, in training. They do not grow with K: the sum of the slots, and so
        the work, is `capacity` times the tokens.
      evaluation_capacity: the same in evaluation; it may be changed after training.
      dropless: no slots: every choice is served, however uneven.
      order: who takes the slots first.
      second: which further choices are kept in training.
      evaluation_second: the same in evaluation. (The paper's code draws at random there too.)
      threshold: of `second`; the gates of a token add up to 1.
      jitter: the router's input is multiplied by a number from 1 - jitter to 1 + jitter, in training.
      balance: coefficient of the load-balance loss.
      z: coefficient of the router z-loss.
      dtype: `float32`; `bfloat16` rounds the logits, to study what that does.
    """

    experts: int
    chosen: int = 2
    group: int = 1024
    capacity: float = 1.25
    evaluation_capacity: float = 2.0
    dropless: bool = False
    order: Order = "choices"
    second: Second = "random"
    evaluation_second: Second = "all"
    threshold: float = 0.2
    jitter: float = 0.0
    balance: float = 1e-2
    z: float = 1e-3
    dtype: Literal["float32", "bfloat16"] = "float32"

    def __post_init__(self) -> None:
        wrong = _wrong(self)
        if wrong:
            raise RecipeError(f"routing: {'; '.join(wrong)}. Change it in the recipe or with --set.")

    @property
    def leaks(self) -> str:
        """Why, in a decoder, a token's output could depend on later tokens; empty if it cannot.

        With `choices` and K = 2 a later token's first choice takes the slot of an earlier one's second choice. Measured
        at a capacity of 1.25: changing the second half of 256 random tokens changed the output of a quarter of the
        first half.
        """
        if self.dropless or (self.order == "choices" and self.chosen == 1) or self.order == "tokens":
            return ""
        who = "the most confident tokens" if self.order == "confident" else "the first choices of later tokens"
        return f"order={self.order!r}: {who} take the slots before earlier tokens"

    def check_causal(self, where: str) -> None:
        """Refuses a routing by which tokens of a decoder would see the future.

        Raises:
          RecipeError: it does.
        """
        if self.leaks:
            raise RecipeError(
                f"{where}: {self.leaks}, so a decoder would learn from what it is to tell. "
                "Take order='tokens', or dropless=true."
            )

    def slots(self, *, train: bool) -> int:
        """The slots of each expert for a group: at least 4 and at most the group, as in the paper's code."""
        factor = self.capacity if train else self.evaluation_capacity
        return min(self.group, max(4, int(factor * self.group / self.experts)))


def _wrong(r: Routing) -> list[str]:
    factors = {"capacity": r.capacity, "evaluation_capacity": r.evaluation_capacity}
    positive = {} if r.dropless else factors
    least = {name: getattr(r, name) for name in ("group", "balance", "z", "jitter")}
    return [
        *([] if r.experts >= 1 else [f"experts={r.experts}: at least one is needed"]),
        *(
            []
            if 1 <= r.chosen <= max(r.experts, 1)
            else [f"chosen={r.chosen} of {r.experts} experts: 1 to {r.experts}"]
        ),
        *(
            f"{name}={n}: no token would reach an expert; give a positive number"
            if n <= 0
            else f"{name}={n}: no number of slots; give a positive number, or dropless=true to serve every choice"
            for name, n in positive.items()
            if not 0 < n < math.inf
        ),
        *([] if 0 < r.threshold <= 1 else [f"threshold={r.threshold} must be above 0 and at most 1"]),
        *(f"{name}={n} must be at least 0" for name, n in least.items() if not n >= 0),
        *([] if r.jitter < 1 else [f"jitter={r.jitter} must be below 1"]),
    ]


class Choices(NamedTuple):
    """Where the tokens want to go.

    Attributes:
      expert: int32 [G, S, K]; E where a choice is not made, or the token is padding.
      gate: the weight of each choice, float32 [G, S, K]; 0 where it is not made. The only part with a gradient.
      confidence: the largest probability, float32 [G, S].
    """

    expert: jax.Array
    gate: jax.Array
    confidence: jax.Array


Report = dict[str, jax.Array]
"""What a sparse layer says of itself: losses and shares, scalars; `load` and `probability`, [E]."""


def into_groups(tokens: jax.Array, size: int) -> jax.Array:
    """[tokens, ...] as [G, size, ...]; size 0 makes one group.

    Raises:
      RecipeError: the tokens do not divide into groups, with the nearest sizes that do.
    """
    count = tokens.shape[0]
    size = size or count
    if count % size:
        near = [n for n in range(1, count + 1) if count % n == 0]
        below, above = max(n for n in near if n < size or n == 1), min((n for n in near if n > size), default=count)
        raise RecipeError(
            f"experts: {count} tokens of a device do not divide into groups of {size}. "
            f"Take group={below} or group={above}, or a batch of a multiple of {size} tokens on each device."
        )
    return tokens.reshape(count // size, size, *tokens.shape[1:])


def logits_of(x: jax.Array, kernel: jax.Array, routing: Routing, key: jax.Array | None = None) -> jax.Array:
    """x [G, S, M] times the router's kernel [M, E], float32 [G, S, E]; `key` draws the jitter, one for each group.

    In full float32 whatever the types and the hardware: what is exponentiated must not be rounded.
    """
    x = x.astype(jnp.float32)
    if key is not None and routing.jitter:
        low, high = 1 - routing.jitter, 1 + routing.jitter
        x *= _by_group(lambda k: jax.random.uniform(k, x.shape[1:], minval=low, maxval=high), key)
    logits = jnp.einsum("gsm,me->gse", x, kernel.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return jax.lax.reduce_precision(logits, 8, 7) if routing.dtype == "bfloat16" else logits


def choose(
    logits: jax.Array, routing: Routing, *, train: bool, counts: jax.Array | None = None, key: jax.Array | None = None
) -> Choices:
    """The K largest probabilities of each token, and which of them are kept.

    Args:
      logits: [G, S, E].
      routing: the settings.
      train: whether `second` or `evaluation_second` decides on further choices.
      counts: bool [G, S], false for padding, which goes nowhere and takes no slot.
      key: keys [G], for `random`.
    """
    probability = jax.nn.softmax(logits, -1)
    top, expert = jax.lax.top_k(probability, routing.chosen)
    gate = top / (top.sum(-1, keepdims=True) + 1e-9) if routing.chosen > 1 else top
    kept = _kept(gate, routing, routing.second if train else routing.evaluation_second, key)
    if counts is not None:
        kept &= counts[..., None]
    expert = jnp.where(kept, expert, routing.experts).astype(jnp.int32)
    return Choices(expert, jnp.where(kept, gate, 0.0), jax.lax.stop_gradient(top[..., 0]))


def _kept(gate: jax.Array, routing: Routing, policy: Second, key: jax.Array | None) -> jax.Array:
    first = jnp.arange(routing.chosen) == 0
    if policy == "all" or routing.chosen == 1:
        return jnp.ones(gate.shape, bool)
    if policy == "none":
        return jnp.broadcast_to(first, gate.shape)
    if policy == "threshold":
        return first | (gate > routing.threshold)
    assert key is not None, "second='random' draws"
    draws = _by_group(lambda k: jax.random.uniform(k, gate.shape[1:]), key)
    return first | (draws * routing.threshold < jax.lax.stop_gradient(gate))


def _by_group(draw: Callable[[jax.Array], jax.Array], keys: jax.Array) -> jax.Array:
    """One draw for each group, from a key of its own: the same on whichever device the group lies."""
    return jax.vmap(draw)(keys)


def group_keys(key: jax.Array, groups: int, first: jax.Array | int = 0) -> jax.Array:
    """Keys of groups number `first` and following."""
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(first + jnp.arange(groups))


def weights_of_groups(counts: jax.Array, examples: int) -> jax.Array:
    """What each group [G, S] weighs in a mean over groups, [G, 1]: examples weigh the same, their groups by tokens.

    What is all padding weighs nothing. So means over the devices, each of which weighs as many examples as it has, do
    not depend on how many there are. Groups that span examples weigh by tokens.

    Args:
      counts: which tokens are no padding, bool or numbers [G, S].
      examples: whose tokens these are, one behind the other.
    """
    groups = len(counts)
    tokens = counts.sum(1, dtype=jnp.float32).reshape(examples if groups % examples == 0 else 1, -1)
    each = tokens.sum(1, keepdims=True)
    return (tokens / jnp.maximum(each, 1) / jnp.maximum((each > 0).sum(), 1)).reshape(groups, 1)


def losses(
    logits: jax.Array, choices: Choices, routing: Routing, counts: jax.Array | None = None, examples: int = 1
) -> Report:
    """`balance` and `z`, without their coefficients, means over the tokens that count; padding is left out.

    balance = E * sum_e f_e P_e in each group: f_e the share of tokens whose first choice is e, before any is dropped,
    and P_e their mean probability; 1 if balanced. z = mean of (log sum exp of the logits)^2. Groups weigh as
    `weights_of_groups` says, whose argument `examples` is.
    """
    counted = jnp.ones(logits.shape[:2]) if counts is None else counts.astype(jnp.float32)
    tokens = counted.sum(1, keepdims=True)
    weight = counted / jnp.maximum(tokens, 1.0)
    part = weights_of_groups(counted, examples)
    first = jax.nn.one_hot(choices.expert[..., 0], routing.experts)
    probability = jax.nn.softmax(logits, -1)
    share, mean = (jnp.einsum("gse,gs->ge", values, weight) for values in (first, probability))
    balance = routing.experts * (jax.lax.stop_gradient(share) * mean).sum(-1, keepdims=True)
    z = (jnp.square(jax.nn.logsumexp(logits, -1)) * weight).sum(1, keepdims=True)
    each = {"balance": balance, "z": z, "load": share, "probability": mean}
    totals = {name: (part * values).sum(0) for name, values in each.items()}
    return totals | {name: totals[name][0] for name in ("balance", "z")}


def routing_figures(
    logits: jax.Array, choices: Choices, served: jax.Array, counts: jax.Array | None = None, examples: int = 1
) -> Report:
    """What a run may want to see; no gradient. `served` is bool [G, S, K]: the choices that were.

    `dropped`: share of tokens that reached no expert. `served_first`, `served_second`: of the first and of all further
    choices that were made, how many were served. `entropy` of the probabilities, nats. `confidence`: mean gate of what
    is served. `broken`: tokens whose logits are not finite. All but `broken` are means over groups, as in `losses`.
    """
    logits, gate = jax.lax.stop_gradient((logits, choices.gate))
    counts = jnp.ones(logits.shape[:2], bool) if counts is None else counts
    made = choices.expert < logits.shape[-1]
    log_p = jax.nn.log_softmax(logits, -1)
    weights = weights_of_groups(counts, examples)[:, 0]

    def mean(values: jax.Array, where: jax.Array) -> jax.Array:
        dims = tuple(range(1, values.ndim))
        return (weights * jnp.where(where, values, 0).sum(dims) / jnp.maximum(where.sum(dims), 1)).sum()

    return {
        "dropped": mean(~served.any(-1), counts),
        "served_first": mean(served[..., 0], made[..., 0]),
        "served_second": mean(served[..., 1:], made[..., 1:]),
        "entropy": mean(-(jnp.exp(log_p) * log_p).sum(-1), counts),
        "confidence": mean(gate, served),
        "broken": (counts & ~jnp.isfinite(logits).all(-1)).sum(dtype=jnp.float32),
    }


def priority(choices: Choices, order: Order) -> jax.Array:
    """In which order the choices of each group take slots: numbers `token * K + choice`, int32 [G or 1, S * K]."""
    _, tokens, chosen = choices.expert.shape
    numbers = jnp.arange(tokens * chosen, dtype=jnp.int32).reshape(1, tokens, chosen)
    if order == "tokens":
        return numbers.reshape(1, -1)
    if order == "confident":
        numbers = numbers[0][jnp.argsort(-choices.confidence, axis=-1, stable=True)]
    return jnp.swapaxes(numbers, 1, 2).reshape(numbers.shape[0], -1)


def ranks(choices: Choices, order: Order) -> jax.Array:
    """How many choices of its group come before each one at its expert, int32 [G, S, K]. By sorting: S K log(S K)."""
    return jax.vmap(lambda expert, first: _ranks(expert, first))(
        choices.expert.reshape(choices.expert.shape[0], -1),
        jnp.broadcast_to(priority(choices, order), (choices.expert.shape[0], choices.expert[0].size)),
    ).reshape(choices.expert.shape)


def _ranks(expert: jax.Array, first: jax.Array) -> jax.Array:
    wanted = expert[first]
    by_expert = jnp.argsort(wanted, stable=True)
    sorted_experts = wanted[by_expert]
    begins = jnp.searchsorted(sorted_experts, sorted_experts, side="left", method="sort")
    places = jnp.arange(len(expert), dtype=jnp.int32) - begins.astype(jnp.int32)
    return places[jnp.argsort(first[by_expert])]  # a permutation turned round by sorting: a scatter takes longer
