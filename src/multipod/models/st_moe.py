"""ST-MoE: a T5-like encoder-decoder with sparse layers (Zoph et al., 2022, arXiv:2202.08906)."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal, variance_scaling

from multipod.errors import RecipeError
from multipod.nn.by_example import dropout_layer
from multipod.nn.dense import Activation, ComputeDtype, Dense, FeedForward, GatedMlp, RMSNorm
from multipod.nn.experts.exchange import is_mapped
from multipod.nn.experts.layer import EXPERT_AXIS, ExpertSpec, Path, SparseMlp
from multipod.nn.experts.routing import Order, Report, Routing
from multipod.nn.merge import merge_model
from multipod.nn.model import FlaxModel
from multipod.nn.padding import example_mask
from multipod.nn.remat import Remat, call_layer
from multipod.nn.text.attention import Attention, KeysValues, store
from multipod.nn.text.beam_search import Beams, Cache, Step, beam_search, greedy
from multipod.nn.text.embedding import Embedding
from multipod.nn.text.fused_attention import AttentionKernel
from multipod.nn.text.relative_positions import RelativePositions
from multipod.nn.text.segments import Segments
from multipod.pytrees import Batch, IdRange, Outputs, Params

KERNELS = variance_scaling(0.1, "fan_in", "truncated_normal")
"""A tenth of the usual variance, as in arXiv:2101.03961, for kernels of one input dim."""

CrossMemory = tuple[KeysValues, jax.Array]
"""Keys and values of the encoder's output, and which of them are tokens, bool [rows, 1, 1, positions]."""


@dataclass(frozen=True)
class StMoe(FlaxModel):
    """T5.1.1 with an expert layer in place of every fourth feed-forward block. The defaults are ST-MoE-32B.

    A batch holds tokens `source` and `target` [examples, positions]: `target` is what the decoder reads, one place
    behind `label`. Tokens `PAD` = 0 are padding, but for the first of the target. Outputs are a dictionary: `logits`,
    `auxiliary` (the routers' losses with their coefficients, summed over layers), and `routers`, each layer's report.

    A decoder layer's tokens take their slots one after the other (`decoder_order`), since by the paper's order of
    choices a token would depend on later ones. Departures from the released code: queries are divided by the root of
    their size, which T5 has in its initial values instead (`scaled_attention`).

    The same class is T5 (`every=0`) and Switch Transformers: `t5_like` has the fields that make it so.

    Attributes:
      vocab: entries of the embedding, and of the last layer, which is another table.
      features: features between layers.
      hidden: hidden features of feed-forward blocks and of experts.
      heads, kv: heads of an attention, features of a head.
      layers: layers of the encoder, and of the decoder.
      every: one layer in so many is sparse, beginning with the `every`-th; 0: none is.
      beside: a sparse layer has a dense block too, behind the experts.
      routing: of all sparse layers; `group` is not used.
      group_rows: sequences of a group; 0: all of a device are one.
      decoder_order: `order` of the decoder's routing.
      scaled: experts have a learnt factor for each hidden feature.
      gated: GEGLU in all blocks of experts.
      dense_gated: GEGLU in dense blocks; false: one kernel in.
      activation: of the gates, or of the one kernel.
      scaled_attention: scores are divided by the root of `kv`.
      tied: logits are products of x / sqrt(features) with the embedding's table; false: the last layer has its own.
      dropout: share dropped of embeddings and behind each block.
      expert_dropout: share dropped of the experts' hidden features.
      path: how tokens get to experts.
      dtype: type of products and activations; parameters, norms, softmax, routers and logits are float32.
      remat: what each layer keeps for the backward pass.
      attention: who computes attention: the platform's fused kernel where it can (`nn.text.fused_attention`).
    """

    vocab: int = 32_128
    features: int = 5120
    hidden: int = 20_480
    heads: int = 64
    kv: int = 128
    layers: int = 24
    every: int = 4
    beside: bool = True
    routing: Routing = field(default_factory=lambda: Routing(64))
    group_rows: int = 4
    decoder_order: Order = "tokens"
    scaled: bool = True
    gated: bool = True
    dense_gated: bool = True
    activation: Activation = "gelu"
    scaled_attention: bool = True
    tied: bool = False
    dropout: float = 0.0
    expert_dropout: float = 0.0
    path: Path = "sorted"
    dtype: ComputeDtype = "float32"
    remat: Remat = "none"
    attention: AttentionKernel = "auto"

    def __post_init__(self) -> None:
        wrong = [f"{name}={getattr(self, name)}" for name in ("every", "group_rows") if getattr(self, name) < 0]
        if wrong:
            raise RecipeError(f"StMoe: {', '.join(wrong)}: give 0 or more.")
        self.decoder_routing.check_causal("StMoe: decoder")

    @property
    def decoder_routing(self) -> Routing:
        """The routing of the decoder's sparse layers."""
        return replace(self.routing, order=self.decoder_order)

    def is_sparse(self, layer: int) -> bool:
        """Whether layer number `layer`, from 0, is sparse."""
        return self.every > 0 and layer % self.every == self.every - 1

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _StMoe(self, rngs)

    def forward(self, module: Any, batch: Batch) -> dict[str, Outputs]:
        """`logits` float32 [examples, target positions, vocab], `auxiliary` and `routers`."""
        encoded, routers = module.encode(batch)
        logits, more = module.decode(batch, encoded)
        routers |= more
        each = [self.routing.balance * one["balance"] + self.routing.z * one["z"] for one in routers.values()]
        return {"logits": logits, "auxiliary": jnp.asarray(sum(each), jnp.float32), "routers": routers}

    def ids_taken(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary."""
        words = IdRange((self.vocab,), "vocab")
        return dict.fromkeys(("source", "target", "label"), words)

    def generate(self, params: Params, batch: Batch, *, start: int, end: int, length: int) -> jax.Array:
        """The likeliest token at each place behind those told before it: int32 [examples, length], 0 behind `end`.

        Only batch["source"] is read, and encoded once; keys and values of what was told are kept, so that a token costs
        one place of the decoder. `PAD` is never told. Each token of the decoder reaches its experts, whatever their
        capacity: where `forward` drops tokens of the target, the answer is that of a decoder that drops none. The
        encoder keeps its capacity.
        """
        step, cache = _decoder_steps(merge_model(self, params), batch, length, 1)
        return greedy(step, cache, len(batch["source"]), length=length, start=start, end=end, agree=_any_of_experts)

    def translate(
        self, params: Params, batch: Batch, *, start: int, end: int, length: int, beam: int = 4, penalty: float = 0.6
    ) -> Beams:
        """The best answers to each source by beam search, from the steps that `generate` takes.

        See `multipod.nn.text.beam_search.beam_search`.
        """
        step, cache = _decoder_steps(merge_model(self, params), batch, length, beam)
        rows, agree = len(batch["source"]), _any_of_experts
        return beam_search(
            step, cache, rows, beam=beam, length=length, start=start, end=end, penalty=penalty, agree=agree
        )

    def figures(self) -> dict[str, str]:
        """For `multipod show`: sizes that tensors do not tell."""
        all_of_them, active = self.parameters(), self.parameters(served=self.routing.capacity)
        flops = self.flops(512, 114)
        return {
            "parameters of experts": f"{all_of_them - self.parameters(served=0):,}",
            "parameters active for a token": f"{active:,} at {self.routing.capacity:g} slots a token",
            "FLOPs of a sequence, forward": f"{flops:.4g} (512 source and 114 target tokens)",
            # A token passes one of the two stacks: two operations for half of the weights.
            "FLOPs of a token, forward": f"{flops / 626:.4g}, as a dense model of so many parameters",
        }

    def parameters(self, *, served: float | None = None) -> int:
        """How many there are; with `served`, so many experts are counted in each sparse layer."""
        tables = (1 if self.tied else 2) * self.vocab * self.features
        return sum(self._block_sizes(served, cross)[0] for cross in (False, True)) + tables

    def flops(self, source: int, target: int) -> float:
        """Multiplications and additions of the products of a forward pass, for one sequence.

        Experts are counted by their slots: `capacity` of them for a token, whatever the number of choices.
        """
        total = 0.0
        for cross, tokens in ((False, source), (True, target)):
            _, weights = self._block_sizes(self.routing.capacity, cross)
            total += 2.0 * weights * tokens
            inner = self.heads * self.kv
            total += 4.0 * self.layers * tokens * inner * (tokens + (source if cross else 0))
            # Keys and values of the source are made once, from its own tokens.
            total += 4.0 * self.layers * self.features * inner * (source - target) if cross else 0.0
        return total + 2.0 * self.vocab * self.features * target

    def _block_sizes(self, served: float | None, cross: bool) -> tuple[int, float]:
        """Parameters of one stack, and how many weights a token is multiplied with."""
        served = self.routing.experts if served is None else served
        sparse = sum(self.is_sparse(layer) for layer in range(self.layers))
        dense = self.layers - sparse + (sparse if self.beside else 0)
        attention = 4 * self.features * self.heads * self.kv * (2 if cross else 1)
        block = (3 if self.dense_gated else 2) * self.features * self.hidden
        expert = (3 if self.gated else 2) * self.features * self.hidden
        factor = self.hidden if self.scaled else 0
        weights = self.layers * attention + dense * block + sparse * served * expert
        router = sparse * self.features * self.routing.experts
        norms = self.layers * (3 if cross else 2) + (sparse if self.beside else 0) + 1
        rest = router + norms * self.features + sparse * served * factor + 32 * self.heads
        return int(weights + rest), weights + router


def st_moe_large(**changes: Any) -> StMoe:
    """ST-MoE-L: 4.1 billion parameters, the work of T5-Large."""
    sizes = {"features": 1024, "hidden": 2816, "heads": 16, "kv": 64, "routing": Routing(32)}
    return StMoe(**{**sizes, **changes})


def t5_like(**changes: Any) -> StMoe:
    """T5 1.1 as it was released: no experts, tanh in its GEGLU, scores that are not divided. The sizes are T5-base's.

    T5 1.0 has `dense_gated=False, activation="relu", tied=True`, and Switch Transformers those and `every=2`,
    `gated=False`, and a `routing` with `chosen=1` and, as it is evaluated there, `group_rows=1`.
    """
    sizes = {"features": 768, "hidden": 2048, "heads": 12, "kv": 64, "layers": 12, "every": 0}
    kinds = {"beside": False, "scaled": False, "activation": "gelu_tanh", "scaled_attention": False}
    return StMoe(**{**sizes, **kinds, **changes})


def small_st_moe(vocab: int, **changes: Any) -> StMoe:
    """One that trains on two cores: 128 features, two and two layers of which one each is sparse, 8 experts."""
    sizes = {"features": 128, "hidden": 256, "heads": 4, "kv": 32, "layers": 2, "every": 2, "routing": Routing(8)}
    return StMoe(vocab, **{**sizes, **changes})


class _Residual(nnx.Module):
    """x + dropout(block(norm(x)))."""

    def __init__(self, spec: StMoe, rngs: nnx.Rngs) -> None:
        self.norm = RMSNorm(spec.features)
        self.dropout = dropout_layer(spec.dropout, rngs)

    def added(self, x: jax.Array, y: jax.Array) -> jax.Array:
        return x + self.dropout(y)


class _Layer(nnx.Module):
    """Self-attention, in a decoder attention to the source, and a dense block or experts, or both."""

    def __init__(self, spec: StMoe, sparse: bool, cross: bool, rngs: nnx.Rngs) -> None:
        scaled = spec.scaled_attention
        attention = {"scaled": scaled, "kv": spec.kv, "kernel": spec.attention, "dtype": spec.dtype, "rngs": rngs}
        self.attention = Attention(spec.features, spec.heads, **attention)
        self.attention_residual = _Residual(spec, rngs)
        self.cross = Attention(spec.features, spec.heads, **attention) if cross else None
        self.cross_residual = _Residual(spec, rngs) if cross else None
        routing = spec.decoder_routing if cross else spec.routing
        experts = ExpertSpec(
            routing,
            spec.hidden,
            gated=spec.gated,
            scaled=spec.scaled,
            activation=spec.activation,
            dropout=spec.expert_dropout,
            path=spec.path,
            dtype=spec.dtype,
        )
        self.sparse = SparseMlp(experts, spec.features, rngs) if sparse else None
        self.sparse_residual = _Residual(spec, rngs) if sparse else None
        dense = spec.beside or not sparse
        self.mlp = _dense_block(spec, rngs) if dense else None
        self.mlp_residual = _Residual(spec, rngs) if dense else None
        self.group_rows = spec.group_rows

    def __call__(
        self,
        x: jax.Array,
        mask: Segments,
        position: jax.Array,
        is_token: jax.Array,
        encoded: jax.Array | None = None,
        cross_mask: Segments | None = None,
    ) -> tuple[jax.Array, Report]:
        """x [n, q, features] and the report of its router, empty if it has none."""
        y = self.attention_residual.norm(x)
        x = self.attention_residual.added(x, self.attention(y, self.attention.memory(y), mask, position))
        if self.cross is not None and self.cross_residual is not None and encoded is not None:
            y = self.cross(self.cross_residual.norm(x), self.cross.memory(encoded), cross_mask)
            x = self.cross_residual.added(x, y)
        return self._feed_forward(x, is_token, group=self.group_rows * x.shape[1])

    def step(
        self,
        x: jax.Array,
        position: jax.Array,
        bias: jax.Array,
        is_token: jax.Array,
        own: KeysValues,
        source: CrossMemory,
    ) -> tuple[jax.Array, KeysValues]:
        """`__call__` of a decoder's layer for the token at `position` alone, x [n, 1, features], after those before it.

        `own` holds this layer's keys and values [n, length, h, d] of the positions before; it comes back with those of
        this one. `bias` [1, h, 1, length] is of the positions. Of `source` are the keys, the values and the mask.
        """
        assert self.cross is not None
        assert self.cross_residual is not None
        y = self.attention_residual.norm(x)
        own = store(own, self.attention.memory(y), position)
        told = (jnp.arange(own.keys.shape[1]) <= position)[None, None, None]
        x = self.attention_residual.added(x, self.attention(y, own, told, bias))
        x = self.cross_residual.added(x, self.cross(self.cross_residual.norm(x), *source))
        return self._feed_forward(x, is_token[:, None], group=0, dropless=True)[0], own

    def _feed_forward(self, x: jax.Array, is_token: jax.Array, **slots: Any) -> tuple[jax.Array, Report]:
        report: Report = {}
        if self.sparse is not None and self.sparse_residual is not None:
            y, report = self.sparse(self.sparse_residual.norm(x), is_token, **slots)
            x = self.sparse_residual.added(x, y)
        if self.mlp is not None and self.mlp_residual is not None:
            x = self.mlp_residual.added(x, self.mlp(self.mlp_residual.norm(x)))
        return x, report


def _dense_block(spec: StMoe, rngs: nnx.Rngs) -> GatedMlp | FeedForward:
    block = {"activation": spec.activation, "dropout": spec.dropout, "init": KERNELS, "dtype": spec.dtype, "rngs": rngs}
    if spec.dense_gated:
        return GatedMlp(spec.features, spec.hidden, **block)
    return FeedForward(spec.features, spec.hidden, bias=False, **block)


class _StMoe(nnx.Module):
    def __init__(self, spec: StMoe, rngs: nnx.Rngs) -> None:
        self.spec = spec
        self.embedding = Embedding(spec.vocab, spec.features, init=normal(1.0), dtype=spec.dtype, rngs=rngs)
        self.dropout = dropout_layer(spec.dropout, rngs)
        self.encoder_position = RelativePositions(spec.heads, both_ways=True, rngs=rngs)
        self.decoder_position = RelativePositions(spec.heads, both_ways=False, rngs=rngs)
        self.encoder = nnx.List([_Layer(spec, spec.is_sparse(i), False, rngs) for i in range(spec.layers)])
        self.decoder = nnx.List([_Layer(spec, spec.is_sparse(i), True, rngs) for i in range(spec.layers)])
        self.encoder_norm, self.decoder_norm = RMSNorm(spec.features), RMSNorm(spec.features)
        options = {"bias": False, "init": KERNELS, "dtype": spec.dtype, "rngs": rngs}
        self.head = None if spec.tied else Dense({"embed": spec.features}, {"vocab": spec.vocab}, **options)

    def encode(self, batch: Batch) -> tuple[jax.Array, dict[str, Report]]:
        """The encoder's output, and its routers' reports."""
        is_token = _is_token(batch["source"])
        x, segment = self.dropout(self.embedding(batch["source"])), is_token.astype(jnp.int32)
        mask, position = Segments(segment, segment), self.encoder_position(x.shape[1], x.shape[1])
        reports: dict[str, Report] = {}
        for number, layer in enumerate(self.encoder):
            x, report = call_layer(layer, x, mask, position, is_token, remat=self.spec.remat)
            reports |= {f"encoder/{number}": report} if report else {}
        return self.dropout(self.encoder_norm(x)), reports

    def decode(self, batch: Batch, encoded: jax.Array) -> tuple[jax.Array, dict[str, Report]]:
        """Logits for every place of batch["target"], and the routers' reports."""
        tokens = batch["target"]
        is_token = _is_token(tokens, starts=True)  # the start token may be PAD
        segment, source = is_token.astype(jnp.int32), _is_token(batch["source"]).astype(jnp.int32)
        mask, cross_mask = Segments(segment, segment, causal=True), Segments(segment, source)
        x = self.dropout(self.embedding(tokens))
        position = self.decoder_position(x.shape[1], x.shape[1])
        reports: dict[str, Report] = {}
        for number, layer in enumerate(self.decoder):
            x, report = call_layer(layer, x, mask, position, is_token, encoded, cross_mask, remat=self.spec.remat)
            reports |= {f"decoder/{number}": report} if report else {}
        return self._logits(self.dropout(self.decoder_norm(x))), reports

    def sources(self, batch: Batch) -> list[CrossMemory]:
        """What each decoder layer attends to of the source, computed once for all tokens that are told."""
        encoded, _ = self.encode(batch)
        mask = _is_token(batch["source"])[:, None, None]
        return [(layer.cross.memory(encoded), mask) for layer in self.decoder]

    def empty_cache(self, rows: int, length: int) -> list[KeysValues]:
        """Room for `length` positions of each decoder layer."""
        return [layer.attention.empty(rows, length) for layer in self.decoder]

    def step(
        self,
        tokens: jax.Array,
        position: jax.Array,
        is_token: jax.Array,
        cache: list[KeysValues],
        sources: list[CrossMemory],
    ) -> tuple[jax.Array, list[KeysValues]]:
        """Logits [rows, vocab] behind the tokens [rows] at `position`, and the cache with them."""
        x, kept = self.embedding(tokens[:, None]), []
        bias = self.decoder_position.at(position, cache[0].keys.shape[1])
        for layer, own, source in zip(self.decoder, cache, sources, strict=True):
            x, own = layer.step(x, position, bias, is_token, own, source)
            kept.append(own)
        return self._logits(self.decoder_norm(x))[:, 0], kept

    def _logits(self, x: jax.Array) -> jax.Array:
        if self.head is None:
            return self.embedding.scores(x * self.spec.features**-0.5)
        return self.head(x).astype(jnp.float32)


def _is_token(tokens: jax.Array, *, starts: bool = False) -> jax.Array:
    """Where there are tokens, the first of a row among them if it starts with any; rows that fill a batch have none."""
    is_token = (tokens != 0) | ((jnp.arange(tokens.shape[1]) == 0) & starts)
    rows = example_mask()
    return is_token if rows is None else is_token & rows[:, None]


def _decoder_steps(module: _StMoe, batch: Batch, length: int, beam: int) -> tuple[Step, Cache]:
    """The step function and the empty cache for `beam` rows of each example."""
    sources = jax.tree.map(lambda leaf: jnp.repeat(leaf, beam, axis=0), module.sources(batch))
    rows = example_mask()
    counts = jnp.repeat(jnp.ones(len(batch["source"]), bool) if rows is None else rows, beam)

    def step(tokens: jax.Array, position: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        is_token = counts & ((tokens != 0) | (position == 0))  # the start token may be PAD
        logits, cache = module.step(tokens, position, is_token, cache, sources)
        return logits.at[:, 0].set(-jnp.inf), cache

    return step, module.empty_cache(len(batch["source"]) * beam, length)


def _any_of_experts(goes_on: jax.Array) -> jax.Array:
    """Whether any of the devices goes on that share the experts: each needs the others in every step."""
    return jax.lax.pmax(goes_on.astype(jnp.int32), EXPERT_AXIS) > 0 if is_mapped(EXPERT_AXIS) else goes_on
