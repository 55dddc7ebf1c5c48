"""A small sparse language model of bytes, for `st_moe`: two blocks, of which the last has experts. Seconds to train."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.nn.initializers import normal

from multipod.data.stdlib_text import read_files
from multipod.nn.dense import Dense, GatedMlp, RMSNorm
from multipod.nn.experts.layer import ExpertSpec, SparseMlp
from multipod.nn.experts.routing import Report, Routing
from multipod.nn.text.attention import Attention
from multipod.nn.text.embedding import Embedding

CONTEXT, ROWS, WIDTH, HEADS, HIDDEN, EXPERTS = 64, 16, 64, 4, 128, 8
HELD_OUT, EVALUATIONS, CHUNK = 300_000, 20, 25
Weights = Any


@dataclass(frozen=True)
class Setting:
    """What is static in a program: everything of the router but its coefficients. `dense`: no experts at all."""

    routing: Routing = field(
        default_factory=lambda: Routing(EXPERTS, group=CONTEXT * ROWS, second="all", evaluation_capacity=2.0)
    )
    dense: bool = False

    def with_routing(self, **changes: Any) -> "Setting":
        """Returns this setting with other fields of `routing`."""
        return replace(self, routing=replace(self.routing, **changes))


@dataclass(frozen=True)
class RunNumbers:
    """What is not static. `router_scale` multiplies the router's initial weights."""

    seed: int = 0
    balance: float = 1e-2
    z: float = 1e-3
    rate: float = 2e-3
    steps: int = 300
    router_scale: float = 1.0


class _ByteBlock(nnx.Module):
    def __init__(self, mlp: nnx.Module, rngs: nnx.Rngs) -> None:
        self.attention = Attention(WIDTH, HEADS, rngs=rngs)
        self.norms = nnx.List([RMSNorm(WIDTH), RMSNorm(WIDTH)])
        self.mlp = mlp

    def __call__(self, x: jax.Array, mask: jax.Array) -> tuple[jax.Array, Report]:
        y = self.norms[0](x)
        x = x + self.attention(y, self.attention.memory(y), mask)
        made = self.mlp(self.norms[1](x))
        y, report = made if isinstance(made, tuple) else (made, {})
        return x + y, report


class ByteLm(nnx.Module):
    """Bytes [n, CONTEXT] to logits [n, CONTEXT, 256] and the router's report."""

    def __init__(self, setting: Setting, rngs: nnx.Rngs) -> None:
        self.embedding = Embedding(256, WIDTH, init=normal(0.5), rngs=rngs)
        self.positions = Embedding(CONTEXT, WIDTH, counts="positions", init=normal(0.1), rngs=rngs)
        last: nnx.Module = SparseMlp(ExpertSpec(setting.routing, HIDDEN), WIDTH, rngs)
        if setting.dense:
            last = GatedMlp(WIDTH, HIDDEN, rngs=rngs)
        self.blocks = nnx.List([_ByteBlock(GatedMlp(WIDTH, HIDDEN, rngs=rngs), rngs), _ByteBlock(last, rngs)])
        self.norm = RMSNorm(WIDTH)
        self.head = Dense({"embed": WIDTH}, {"vocab": 256}, bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, Report]:
        """Logits for the byte behind each one."""
        x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))[None, None]
        report: Report = {}
        for block in self.blocks:
            x, report = block(x, mask)
        return self.head(self.norm(x)), report

    def router_logits(self, tokens: jax.Array) -> jax.Array:
        """The last block's router's logits, [n, CONTEXT, E]."""
        x = self.embedding(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))[None, None]
        x, _ = self.blocks[0](x, mask)
        last = self.blocks[1]
        y = last.norms[0](x)
        x = x + last.attention(y, last.attention.memory(y), mask)
        return last.norms[1](x) @ last.mlp.router[...]


def _merged(setting: Setting, weights: Weights, *, train: bool) -> ByteLm:
    return merged_as(lambda: ByteLm(setting, nnx.Rngs(0)), weights, train=train)


def merged_as(make: Callable[[], nnx.Module], weights: Weights, *, train: bool) -> Any:
    """The module that `make` makes, with these weights; nothing is drawn, so its generators may be any."""
    graph, _, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    merged = nnx.merge(graph, weights, jax.tree.map(_filler, rest))
    merged.train() if train else merged.eval()
    return merged


def _filler(leaf: Any) -> Any:
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(0)
    return jnp.zeros(leaf.shape, leaf.dtype)


@partial(jax.jit, static_argnums=0)
def fresh(setting: Setting, seed: jax.Array, router_scale: jax.Array) -> Weights:
    """Initial weights."""
    weights = nnx.split(ByteLm(setting, nnx.Rngs(jax.random.key(seed))), nnx.Param, ...)[1]
    return jax.tree.map_with_path(
        lambda path, leaf: leaf * router_scale if "router" in jax.tree_util.keystr(path) else leaf, weights
    )


@lru_cache(maxsize=4)
def text(files: str = "**/*.py") -> tuple[np.ndarray, np.ndarray]:
    """Bytes of the standard library's files in a shuffled order: to learn from, and the last ones, held out."""
    texts = read_files(files)
    names = sorted(texts)
    np.random.default_rng(0).shuffle(names)
    stream = np.frombuffer("".join(texts[name] for name in names).encode(), np.uint8)
    held_out = min(HELD_OUT, len(stream) // 10)
    return stream[:-held_out], stream[-held_out:]


def batches(stream: np.ndarray, count: int, seed: int) -> np.ndarray:
    """So many batches, uint8 [count, ROWS, CONTEXT + 1]."""
    begins = np.random.default_rng(seed).integers(len(stream) - CONTEXT - 1, size=(count, ROWS))
    return stream[begins[..., None] + np.arange(CONTEXT + 1)]


def _loss(setting: Setting, weights: Weights, tokens: jax.Array, *, train: bool) -> tuple[jax.Array, Report]:
    tokens = tokens.astype(jnp.int32)
    logits, report = _merged(setting, weights, train=train)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean(), report


def optimizer(rate: Any, steps: Any) -> optax.GradientTransformation:
    """Adam with clipping; `rate` and `steps` may be traced."""

    def schedule(count: jax.Array) -> jax.Array:
        done = count / steps
        return rate * jnp.minimum(1, (count + 1) / 30) * jnp.maximum(0.02, 0.5 + 0.5 * jnp.cos(jnp.pi * done))

    return optax.chain(optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.scale_by_learning_rate(schedule))


@partial(jax.jit, static_argnums=0)
def _chunk(
    setting: Setting, weights: Weights, state: Any, data: jax.Array, numbers: dict[str, jax.Array], mask: Any
) -> tuple[Weights, Any, dict[str, jax.Array]]:
    transformation = optimizer(numbers["rate"], numbers["steps"])

    def step(carry: Any, tokens: jax.Array) -> tuple[Any, dict[str, jax.Array]]:
        weights, state = carry

        def total(weights: Weights) -> tuple[jax.Array, Any]:
            nats, report = _loss(setting, weights, tokens, train=True)
            extra = 0.0 if setting.dense else numbers["balance"] * report["balance"] + numbers["z"] * report["z"]
            return nats + extra, (nats, report)

        gradients, (nats, report) = jax.grad(total, has_aux=True)(weights)
        changes, state = transformation.update(gradients, state, weights)
        weights = jax.tree.map(lambda w, c, kept: w + c * kept, weights, changes, mask)
        shown = {name: report[name] for name in ("dropped", "balance", "z") if name in report}
        return (weights, state), {"nats": nats, **shown}

    (weights, state), values = jax.lax.scan(step, (weights, state), data)
    return weights, state, values


def trained(
    setting: Setting,
    run: RunNumbers,
    *,
    stream: np.ndarray | None = None,
    weights: Weights = None,
    trains: Callable[[str], bool] = lambda path: True,
) -> tuple[Weights, dict[str, np.ndarray]]:
    """Weights after `run.steps` steps, from `weights` if given, and what each step reported."""
    stream = text()[0] if stream is None else stream
    if weights is None:
        weights = fresh(setting, run.seed, run.router_scale)
    mask = jax.tree.map_with_path(
        lambda path, _: np.float32(trains(jax.tree_util.keystr(path, simple=True, separator="/"))), weights
    )
    state = optimizer(0.0, 1).init(weights)
    numbers = {name: jnp.float32(getattr(run, name)) for name in ("rate", "steps", "balance", "z")}
    data = batches(stream, run.steps, 1000 + run.seed)
    reported = []
    for begin in range(0, run.steps, CHUNK):
        weights, state, values = _chunk(setting, weights, state, data[begin : begin + CHUNK], numbers, mask)
        reported.append(jax.device_get(values))
    return weights, {name: np.concatenate([one[name] for one in reported]) for name in reported[0]}


@partial(jax.jit, static_argnums=0)
def _judged(setting: Setting, weights: Weights, data: jax.Array) -> dict[str, jax.Array]:
    def one(tokens: jax.Array) -> dict[str, jax.Array]:
        nats, report = _loss(setting, weights, tokens, train=False)
        if setting.dense:
            return {"nats": nats}
        logits = _merged(setting, weights, train=False).router_logits(tokens[:, :-1].astype(jnp.int32))
        z = jnp.square(jax.nn.logsumexp(logits, -1)).mean()
        return {"nats": nats, "z": z, "spread": logits.std(-1).mean(), "dropped": report["dropped"]}

    return jax.tree.map(jnp.mean, jax.lax.map(one, data))


def judged(setting: Setting, weights: Weights, *, stream: np.ndarray | None = None) -> dict[str, float]:
    """Held-out nats a byte, mean squared log-sum-exp of the router, spread of its logits, dropped share."""
    stream = text()[1] if stream is None else stream
    return {n: float(v) for n, v in _judged(setting, weights, batches(stream, EVALUATIONS, 7)).items()}


@partial(jax.jit, static_argnums=0)
def choices_of(setting: Setting, weights: Weights, tokens: jax.Array) -> jax.Array:
    """The first choice for each byte, int32 [n, CONTEXT]."""
    return _merged(setting, weights, train=False).router_logits(tokens.astype(jnp.int32)).argmax(-1)
