"""The sparse feed-forward layer: a router, and GEGLU experts of which every token uses a few.

Letters as in `routing.py`; F are the hidden features of an expert.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal, variance_scaling

from multipod.errors import LayoutError
from multipod.nn.by_example import Dropout
from multipod.nn.dense import ACTIVATIONS, Activation, ComputeDtype
from multipod.nn.dims import constant, param
from multipod.nn.experts import einsum, exchange, grouped, sorting
from multipod.nn.experts.routing import (
    Choices,
    Report,
    Routing,
    choose,
    group_keys,
    into_groups,
    logits_of,
    losses,
    routing_figures,
)

Path = Literal["sorted", "einsum"]
"""`sorted`: rows sorted by expert (`sorting.py`). `einsum`: one-hot products (`einsum.py`), the reference, which also
is what shards by itself where XLA splits the experts. Both give the same results."""


EXPERT_AXIS = "expert"
"""The mesh axis of `multipod.layout` that splits experts."""


@dataclass(frozen=True)
class ExpertSpec:
    """The experts of a sparse layer.

    Attributes:
      routing: who is sent where.
      hidden: F, hidden features of an expert.
      gated: GEGLU: two kernels in, one of them through the activation. False: one kernel in.
      scaled: a learnt factor for every hidden feature of every expert, 1 at first.
      activation: of the gate, or of the one kernel.
      dropout: share of hidden features dropped in training.
      path: how tokens get to experts and back.
      dtype: type of the experts' products.
    """

    routing: Routing
    hidden: int
    gated: bool = True
    scaled: bool = True
    activation: Activation = "gelu"
    dropout: float = 0.0
    path: Path = "sorted"
    dtype: ComputeDtype = "float32"


class ExpertWeights(NamedTuple):
    """The kernels of some experts: `gate`, `inner` [E, M, F], `outer` [E, F, M], `factor` [E, F]."""

    gate: jax.Array | None
    inner: jax.Array
    outer: jax.Array
    factor: jax.Array | None


class Experts(nnx.Module):
    """The parameters of experts: y = [(act(x gate) * (x inner)) * factor] outer, without biases.

    Source: arXiv:2202.08906 (`factor`: its "multiplicative bias", which can only be one number for each hidden feature,
    not of the shape printed); arXiv:2002.05202 (GEGLU). Kernels start with a tenth of the usual variance, as in
    arXiv:2101.03961.
    """

    def __init__(self, spec: ExpertSpec, features: int, rngs: nnx.Rngs) -> None:
        count, init = spec.routing.experts, variance_scaling(0.1, "fan_in", "truncated_normal", batch_axis=0)
        inward, outward = (count, features, spec.hidden), (count, spec.hidden, features)
        dims = ("experts", "embed", "mlp")
        self.gate = param(init, inward, dims, rngs) if spec.gated else None
        self.inner = param(init, inward, dims, rngs)
        self.outer = param(init, outward, ("experts", "mlp", "embed"), rngs)
        self.factor = constant(1.0, (count, spec.hidden), ("experts", "mlp")) if spec.scaled else None

    def weights(self) -> ExpertWeights:
        """The arrays."""
        gate, factor = (None if one is None else one[...] for one in (self.gate, self.factor))
        return ExpertWeights(gate, self.inner[...], self.outer[...], factor)


def apply_to_slots(
    spec: ExpertSpec, key: jax.Array | None, weights: ExpertWeights, x: jax.Array, numbers: jax.Array
) -> jax.Array:
    """x [E, slots, M] through each one's expert; `numbers` [E, slots] are the choices', for dropout by `key`."""
    inward = lambda kernel: jnp.einsum("ecm,emf->ecf", x, kernel.astype(spec.dtype))  # noqa: E731
    hidden = _active(spec, None if weights.gate is None else inward(weights.gate), inward(weights.inner))
    if weights.factor is not None:
        hidden *= weights.factor.astype(hidden.dtype)[:, None]
    return jnp.einsum("ecf,efm->ecm", _dropped(spec, key, hidden, numbers), weights.outer.astype(spec.dtype))


def apply_to_rows(
    spec: ExpertSpec, key: jax.Array | None, weights: ExpertWeights, x: jax.Array, sizes: jax.Array, numbers: jax.Array
) -> jax.Array:
    """Rows x [rows, M], sorted by expert (`grouped.py`), through each one's expert; `numbers` [rows] as above."""
    inward = lambda kernel: grouped.product(x, kernel.astype(spec.dtype), sizes)  # noqa: E731
    hidden = _active(spec, None if weights.gate is None else inward(weights.gate), inward(weights.inner))
    outer = weights.outer
    if weights.factor is not None:
        # On the kernel's rows, one for each hidden feature: a factor for each token would be a gather of [rows, F].
        outer *= weights.factor[..., None]
    return grouped.product(_dropped(spec, key, hidden, numbers), outer.astype(spec.dtype), sizes)


def _active(spec: ExpertSpec, gate: jax.Array | None, inner: jax.Array) -> jax.Array:
    active = ACTIVATIONS[spec.activation]
    return active(inner) if gate is None else active(gate) * inner


def _dropped(spec: ExpertSpec, key: jax.Array | None, hidden: jax.Array, numbers: jax.Array) -> jax.Array:
    """Drops by the number of the choice, so that both paths and any number of devices drop the same."""
    if key is None:
        return hidden
    kept = 1 - spec.dropout
    draw = lambda number: jax.random.bernoulli(jax.random.fold_in(key, number), kept, hidden.shape[-1:])  # noqa: E731
    mask = jax.vmap(draw)(numbers.reshape(-1)).reshape(hidden.shape)
    return jnp.where(mask, hidden / kept, 0).astype(hidden.dtype)


class SparseMlp(nnx.Module):
    """Router and experts. A token that reaches no expert gets zero, and lives on in the residual around the layer.

    Inside `jax.shard_map`, `axis` names the mesh axes over which the experts are split (`exchange.py`): the parameters
    are then this device's experts, and the tokens this device's tokens. Where a layout has split the experts, which
    shows in how many there are, it is the axis `expert`.
    """

    def __init__(self, spec: ExpertSpec, features: int, rngs: nnx.Rngs) -> None:
        # "router", not "experts": every device needs the whole router.
        self.router = param(normal(0.02), (features, spec.routing.experts), ("embed", "router"), rngs)
        self.experts = Experts(spec, features, rngs)
        self.spec = spec
        self.random = Dropout(0.5, rngs=rngs)  # its generator and whether it trains are what is used

    def __call__(
        self,
        x: jax.Array,
        counts: jax.Array | None = None,
        *,
        axis: exchange.Axis = (),
        key: jax.Array | None = None,
        group: int | None = None,
        dropless: bool = False,
    ) -> tuple[jax.Array, Report]:
        """x [..., M] to the same, and the layer's report: `losses` and `routing_figures` of `routing.py`.

        Args:
          x: tokens; a group is `routing.group` neighbours.
          counts: bool [...], false for padding, which is sent nowhere.
          axis: mesh axes that the experts are split over.
          group: tokens of a group, in place of `routing.group`.
          dropless: serve every choice, whatever `routing` says.
          key: of all that is drawn; by default the module's own, which must be the same on all devices for results
            that do not depend on their number.

        Raises:
          RecipeError: tokens that do not divide into groups.
          LayoutError: experts that do not divide over `axis`.
        """
        routing, train = self.spec.routing, not self.random.deterministic
        size = routing.group if group is None else group
        tokens = into_groups(x.reshape(-1, x.shape[-1]), size)
        counted = None if counts is None else into_groups(counts.reshape(-1), size)
        groups = len(tokens)
        axis = axis or self._axis()
        key = self._key(key, train)
        keys = None if key is None else group_keys(key, groups, exchange.first_group(axis, groups))
        logits = logits_of(tokens, self.router[...], routing, keys if train else None)
        choices = choose(logits, routing, train=train, counts=counted, key=keys)
        dropless |= routing.dropless
        y, served = self._through_experts(
            tokens.astype(self.spec.dtype), choices, axis, key if train else None, dropless
        )
        examples = len(x) if x.ndim > 2 else 1
        report = losses(logits, choices, routing, counted, examples)
        report |= routing_figures(logits, choices, served, counted, examples)
        return y.astype(x.dtype).reshape(x.shape), report

    def _axis(self) -> exchange.Axis:
        """The axis of the layout that splits the experts, if one does."""
        split = self.experts.inner.shape[0] != self.spec.routing.experts
        return EXPERT_AXIS if split and exchange.is_mapped(EXPERT_AXIS) else ()

    def _key(self, key: jax.Array | None, train: bool) -> jax.Array | None:
        routing = self.spec.routing
        second = routing.second if train else routing.evaluation_second
        draws = (second == "random" and routing.chosen > 1) or (train and (routing.jitter or self.spec.dropout))
        return self.random.rngs() if key is None and draws else key

    def _through_experts(
        self, x: jax.Array, choices: Choices, axis: exchange.Axis, key: jax.Array | None, dropless: bool
    ) -> tuple[jax.Array, jax.Array]:
        spec, routing, weights = self.spec, self.spec.routing, self.experts.weights()
        key = key if spec.dropout else None
        slots = replace(routing, group=x.shape[1]).slots(train=not self.random.deterministic)
        slots = 0 if dropless else slots
        check_split(routing.experts, len(weights.inner), exchange.devices(axis))
        if axis:
            return exchange.exchange_through(
                partial(apply_to_slots, spec, key), weights, x, choices, routing, slots, axis
            )
        if spec.path == "einsum":
            return _by_einsum(spec, key, weights, x, choices, slots or x.shape[1])
        return _by_sorting(spec, key, weights, x, choices, slots)


def check_split(experts: int, held: int, devices: int) -> None:
    """Refuses an expert axis that does not divide the experts.

    Raises:
      LayoutError: with the sizes that do.
    """
    if held * devices != experts:
        fits = [str(n) for n in range(1, experts + 1) if experts % n == 0]
        raise LayoutError(
            f"experts: {experts} experts do not divide over an expert axis of {devices} devices with {held} on each. "
            f"Take an axis of {' or '.join(fits)} devices, or another number of experts."
        )


def _by_einsum(
    spec: ExpertSpec, key: jax.Array | None, weights: ExpertWeights, x: jax.Array, choices: Choices, slots: int
) -> tuple[jax.Array, jax.Array]:
    dispatch, combine, served = einsum.masks(choices, spec.routing, slots)
    packed = einsum.send_to_slots(x, dispatch)
    numbers = einsum.numbers(choices, spec.routing, slots) + _first_choice(choices)
    y = apply_to_slots(spec, key, weights, packed.reshape(spec.routing.experts, -1, x.shape[-1]), numbers)
    return einsum.return_to_tokens(y.reshape(packed.shape), combine), served


def _first_choice(choices: Choices) -> jax.Array | int:
    """The number, over the whole batch, of the first choice of this device's tokens."""
    groups = len(choices.expert)
    return exchange.first_group((), groups) * (choices.expert.size // groups)


def _by_sorting(
    spec: ExpertSpec, key: jax.Array | None, weights: ExpertWeights, x: jax.Array, choices: Choices, slots: int
) -> tuple[jax.Array, jax.Array]:
    where, served = sorting.plan_dispatch(choices, spec.routing, slots)
    rows = sorting.send_to_rows(x.reshape(-1, x.shape[-1]), where)
    y = apply_to_rows(spec, key, weights, rows, where.sizes, where.choice + _first_choice(choices))
    gate = choices.gate.reshape(-1, spec.routing.chosen).astype(y.dtype)
    return sorting.return_to_tokens(y, gate, where).reshape(x.shape), served
