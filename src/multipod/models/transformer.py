"""The encoder-decoder Transformer for translation (Vaswani et al., 2017, arXiv:1706.03762)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from multipod.errors import RecipeError
from multipod.nn.by_example import dropout_layer
from multipod.nn.dense import Activation, ComputeDtype, LayerNorm
from multipod.nn.dims import constant
from multipod.nn.layered import ModelLayer, names_under
from multipod.nn.merge import merge_model
from multipod.nn.model import FlaxModel
from multipod.nn.remat import Remat, call_layer
from multipod.nn.text.attention import KeysValues
from multipod.nn.text.beam_search import Beams, Cache, beam_search, greedy
from multipod.nn.text.embedding import Embedding, Waves, sinusoids
from multipod.nn.text.fused_attention import AttentionKernel
from multipod.nn.text.segments import Segments
from multipod.nn.text.transformer import DecoderLayer, EncoderLayer, LayerSpec, Norm
from multipod.pytrees import Batch, IdRange, Params

PAD = 0
"""The token that fills rows, unless a model has another."""


@dataclass(frozen=True)
class Transformer(FlaxModel):
    """An encoder-decoder with one table for source, target and the last layer, and sinusoids for positions.

    The defaults are the "big" model of MLPerf v0.6 and v0.7 with a vocabulary of 2^15: 209,842,176 parameters
    (210,804,736 with the 33,708 entries of the MLPerf reference). Norms come first in each block and once more behind
    each stack, and projections in attention have no bias, as in the authors' own code; `norm="post"` is the paper's
    text.

    A batch holds tokens `source` and `target` [examples, positions]: `target` is what the decoder reads, so it begins
    with the start token and is one place behind `label` (`multipod.data.packing.shift_right`). Packed rows also have
    `source_segment`, `target_segment` (0: padding) and `source_position`, `target_position`; without them every row is
    one sequence, and `pad` is padding except at the first place of the target.

    Attributes:
      vocab: entries of the shared table.
      features: features between layers.
      hidden: features inside a feed-forward block.
      heads: heads of each attention.
      encoder_layers, decoder_layers: number of layers.
      dropout: share dropped of embeddings, behind each block, of attention weights, and inside feed-forward blocks.
      norm: layer norm before or after each block.
      activation: of the feed-forward blocks.
      dtype: type of products and activations; parameters, norms, softmax and logits are float32.
      remat: what each layer keeps for the backward pass.
      attention: who computes attention: the platform's fused kernel where it can (`nn.text.fused_attention`).
      attention_bias: whether the projections of attentions have biases.
      epsilon: of the layer norms.
      waves: of the sinusoids (`multipod.nn.text.embedding.sinusoids`).
      logit_bias: whether each token has a number that is added to its score.
      pad: the token that fills rows.
      tied: one table for source, target and the last layer; false gives each its own, which an asynchronous pipeline
        (`layout.schedule=pipemare`) needs.
    """

    vocab: int = 32_768
    features: int = 1024
    hidden: int = 4096
    heads: int = 16
    encoder_layers: int = 6
    decoder_layers: int = 6
    dropout: float = 0.1
    norm: Norm = "pre"
    activation: Activation = "relu"
    dtype: ComputeDtype = "float32"
    remat: Remat = "none"
    tied: bool = True
    attention: AttentionKernel = "auto"
    attention_bias: bool = False
    epsilon: float = 1e-6
    waves: Waves = "authors"
    logit_bias: bool = False
    pad: int = PAD

    def __post_init__(self) -> None:
        if self.features % self.heads:
            raise RecipeError(
                f"Transformer: features={self.features} do not divide over heads={self.heads}. "
                f"Take {self.features - self.features % self.heads or self.heads} features."
            )

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _Transformer(self, rngs)

    def forward(self, module: Any, batch: Batch) -> jax.Array:
        """Logits [examples, target positions, vocab], float32."""
        encoded, _ = module.encode(batch)
        return module.decode(batch, encoded)

    def ids_taken(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary."""
        words = IdRange((self.vocab,), "vocab")
        return dict.fromkeys(("source", "target", "label"), words)

    def cut_points(self) -> tuple[ModelLayer, ...]:
        """Embedding, encoder layers, the target's embedding, decoder layers, logits.

        A table that is tied is used at three places, so the stages of these share it. From the encoder's end on its
        output travels beside the decoder's.
        """
        block = 4.0 * self.features**2 + 2 * self.features * self.hidden
        table, *others = (names_under(self, f"{name}/") for name in ("embedding", "target_table", "scores"))
        target, scores = (table, table) if self.tied else others

        def encoder(n: int) -> ModelLayer:
            names = names_under(self, f"encoder/{n}/")
            return ModelLayer(f"encoder {n}", names, lambda module, x, batch: module.encoder_layer(n, x, batch), block)

        def decoder(n: int) -> ModelLayer:
            names, cost = names_under(self, f"decoder/{n}/"), block + 4.0 * self.features**2
            return ModelLayer(f"decoder {n}", names, lambda module, x, batch: module.decoder_layer(n, *x, batch), cost)

        turn = (*names_under(self, "encoder_norm/"), *target)
        head = (*names_under(self, "decoder_norm/", "logit_bias"), *scores)
        return (
            ModelLayer("embedding", table, lambda module, x, batch: module.embed(batch, "source"), 0.1 * block),
            *map(encoder, range(self.encoder_layers)),
            ModelLayer("target", turn, lambda module, x, batch: module.to_decoder(x, batch), 0.1 * block),
            *map(decoder, range(self.decoder_layers)),
            ModelLayer("logits", head, lambda module, x, batch: module.logits(x[0]), 1.0 * self.features * self.vocab),
        )

    def translate(
        self, params: Params, batch: Batch, *, start: int, end: int, length: int, beam: int = 4, penalty: float = 0.6
    ) -> Beams:
        """The best translations of each source sequence by beam search; one sequence a row, not packed.

        The defaults are those of MLPerf. See `multipod.nn.text.beam_search.beam_search`.
        """
        module = merge_model(self, params)
        step, cache = _decoder_steps(module, batch, length, beam)
        return beam_search(
            step, cache, len(batch["source"]), beam=beam, length=length, start=start, end=end, penalty=penalty
        )

    def translate_greedily(self, params: Params, batch: Batch, *, start: int, end: int, length: int) -> jax.Array:
        """The likeliest token at each place, int32 [examples, length]; see `multipod.nn.text.beam_search.greedy`."""
        module = merge_model(self, params)
        step, cache = _decoder_steps(module, batch, length, 1)
        return greedy(step, cache, len(batch["source"]), length=length, start=start, end=end)


def small_transformer(vocab: int = 4096, **changes: Any) -> Transformer:
    """A Transformer that trains on two cores: 128 features, 4 heads, two and two layers."""
    spec = {"features": 128, "hidden": 512, "heads": 4, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
    return Transformer(vocab, **{**spec, **changes})


def marian_like(vocab: int = 58_101, **changes: Any) -> Transformer:
    """A Transformer that computes what MarianMTModel of Hugging Face's transformers does, with opus-mt's sizes.

    Its last token is the padding and the start token, and 0 ends a sequence. Source: Junczys-Dowmunt et al., 2018,
    arXiv:1804.00344; Tiedemann and Thottingal, 2020 (OPUS-MT).
    """
    sizes = {"features": 512, "hidden": 2048, "heads": 8, "pad": vocab - 1}
    form = {"norm": "post", "activation": "silu", "attention_bias": True, "epsilon": 1e-5, "waves": "paper"}
    return Transformer(vocab, **{**sizes, **form, "logit_bias": True, **changes})


class EncodedSource(NamedTuple):
    """What the decoder attends to.

    Attributes:
      layers: for each decoder layer, its keys and values of the encoder's output.
      mask: which of them are tokens, bool [rows, 1, 1, positions].
    """

    layers: list[KeysValues]
    mask: jax.Array


class _Transformer(nnx.Module):
    def __init__(self, spec: Transformer, rngs: nnx.Rngs) -> None:
        self.spec = spec
        layer = LayerSpec(
            spec.features,
            spec.hidden,
            spec.heads,
            norm=spec.norm,
            epsilon=spec.epsilon,
            attention_bias=spec.attention_bias,
            activation=spec.activation,
            dropout=spec.dropout,
            hidden_dropout=spec.dropout,
            kernel=spec.attention,
            dtype=spec.dtype,
        )
        init = jax.nn.initializers.normal(spec.features**-0.5)
        self.embedding = Embedding(spec.vocab, spec.features, init=init, dtype=spec.dtype, rngs=rngs)
        # One for each side: a stage of a pipeline that has only one of them draws what the whole model does.
        self.dropout, self.target_dropout = dropout_layer(spec.dropout, rngs), dropout_layer(spec.dropout, rngs)
        self.encoder = nnx.List([EncoderLayer(layer, rngs) for _ in range(spec.encoder_layers)])
        self.decoder = nnx.List([DecoderLayer(layer, rngs) for _ in range(spec.decoder_layers)])
        last = spec.norm == "pre"
        self.encoder_norm = LayerNorm(spec.features, epsilon=spec.epsilon) if last else None
        self.decoder_norm = LayerNorm(spec.features, epsilon=spec.epsilon) if last else None
        self.logit_bias = constant(0.0, (spec.vocab,), ("vocab",)) if spec.logit_bias else None
        tables: list[Any] = [None, None]
        if not spec.tied:
            options = {"init": init, "dtype": spec.dtype, "rngs": rngs}
            tables = [Embedding(spec.vocab, spec.features, **options) for _ in tables]
        self.target_table, self.scores = tables

    def encode(self, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """The encoder's output [n, positions, features], and the source's segments."""
        x = self.embed(batch, "source")
        for n in range(len(self.encoder)):
            x = self.encoder_layer(n, x, batch)
        return self._normed(x), _segment(batch, "source", self.spec.pad)

    def decode(self, batch: Batch, encoded: jax.Array) -> jax.Array:
        """Logits for every place of batch["target"]."""
        x = self.embed(batch, "target")
        for n in range(len(self.decoder)):
            x, _ = self.decoder_layer(n, x, encoded, batch)
        return self.logits(x)

    def embed(self, batch: Batch, name: str) -> jax.Array:
        """What the first layer of the encoder (`source`) or of the decoder (`target`) reads."""
        table = self.embedding if name == "source" else self._target_table
        x = self._embedded(table, batch[name], batch.get(f"{name}_position"))
        return self.dropout(x) if name == "source" else self.target_dropout(x)

    def encoder_layer(self, n: int, x: jax.Array, batch: Batch) -> jax.Array:
        """x after encoder layer n."""
        segment = _segment(batch, "source", self.spec.pad)
        return call_layer(self.encoder[n], x, Segments(segment, segment), remat=self.spec.remat)

    def to_decoder(self, x: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """From the last encoder layer's output: what the first decoder layer reads, and what it attends to."""
        return self.embed(batch, "target"), self._normed(x)

    def decoder_layer(self, n: int, x: jax.Array, encoded: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
        """x after decoder layer n, and what it attended to."""
        segment = _segment(batch, "target", self.spec.pad)
        mask = Segments(segment, segment, causal=True)
        cross_mask = Segments(segment, _segment(batch, "source", self.spec.pad))
        return call_layer(self.decoder[n], x, encoded, mask, cross_mask, remat=self.spec.remat), encoded

    def source(self, batch: Batch) -> EncodedSource:
        """What the decoder attends to, computed once for all tokens that are generated."""
        encoded, segment = self.encode(batch)
        return EncodedSource([layer.cross.memory(encoded) for layer in self.decoder], (segment != 0)[:, None, None])

    def empty_cache(self, rows: int, length: int) -> list[KeysValues]:
        """Room for `length` positions of each decoder layer."""
        return [layer.attention.empty(rows, length) for layer in self.decoder]

    def step(
        self, tokens: jax.Array, position: jax.Array, cache: Cache, source: EncodedSource
    ) -> tuple[jax.Array, Cache]:
        """Logits [rows, vocab] behind the tokens [rows] at `position`."""
        x = self._embedded(self._target_table, tokens[:, None], jnp.full((len(tokens), 1), position))
        kept = []
        for layer, own, memory in zip(self.decoder, cache, source.layers, strict=True):
            x, own = layer.step(x, position, own, memory, source.mask)
            kept.append(own)
        return self.logits(x)[:, 0], kept

    @property
    def _target_table(self) -> Embedding:
        return self.embedding if self.target_table is None else self.target_table

    def _embedded(self, table: Embedding, tokens: jax.Array, positions: jax.Array | None) -> jax.Array:
        positions = jnp.arange(tokens.shape[1]) if positions is None else positions
        x = table(tokens) * self.spec.features**0.5
        return x + sinusoids(positions, self.spec.features, self.spec.waves).astype(x.dtype)

    def _normed(self, x: jax.Array) -> jax.Array:
        return self.encoder_norm(x) if self.encoder_norm else x

    def logits(self, x: jax.Array) -> jax.Array:
        """Scores of every token from the last decoder layer's output."""
        scores = (self.scores or self.embedding).scores(self.decoder_norm(x) if self.decoder_norm else x)
        return scores if self.logit_bias is None else scores + self.logit_bias[...]


def _segment(batch: Batch, name: str, pad: int) -> jax.Array:
    """The segments of the tokens of that name: given, or one for each row, up to its padding."""
    if f"{name}_segment" in batch:
        return batch[f"{name}_segment"]
    is_token = batch[name] != pad
    if name == "target":  # its first token is the start token, which may be the padding
        is_token |= jnp.arange(batch[name].shape[1]) == 0
    return is_token.astype(jnp.int32)


def _decoder_steps(module: _Transformer, batch: Batch, length: int, beam: int) -> tuple[Any, Cache]:
    """The step function and the empty cache for `beam` rows of each example."""
    source = jax.tree.map(lambda leaf: jnp.repeat(leaf, beam, axis=0), module.source(batch))

    def step(tokens: jax.Array, position: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        return module.step(tokens, position, cache, source)

    return step, module.empty_cache(len(batch["source"]) * beam, length)
