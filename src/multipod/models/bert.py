"""BERT and its two pre-training tasks (Devlin et al., 2018, arXiv:1810.04805)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import truncated_normal

from multipod.errors import RecipeError
from multipod.nn.by_example import dropout_layer
from multipod.nn.dense import ACTIVATIONS, ComputeDtype, Dense, LayerNorm
from multipod.nn.dims import constant
from multipod.nn.layered import ModelLayer, names_under
from multipod.nn.model import FlaxModel
from multipod.nn.remat import Remat, call_layer
from multipod.nn.text.embedding import Embedding
from multipod.nn.text.fused_attention import AttentionKernel
from multipod.nn.text.segments import Segments
from multipod.nn.text.transformer import EncoderLayer, LayerSpec
from multipod.pytrees import Batch, IdRange, Outputs

EPSILON = 1e-12


@dataclass(frozen=True)
class Bert(FlaxModel):
    """BERT with the heads of its pre-training. The defaults are BERT-large, uncased: 336,226,108 parameters.

    A batch holds `token` [examples, positions], 0 for padding, and may hold
      `type`: 0 or 1, first or second sentence; 0 where it is missing;
      `segment`, `position`: of packed rows, several sequences in each (`multipod.data.packing`);
      `masked`: [examples, predictions], the places whose tokens are to be told; without it, all are.

    Attributes:
      vocab: entries of the vocabulary.
      features: features between layers.
      hidden: features inside a feed-forward block.
      heads: heads of each attention.
      layers: number of layers.
      positions: longest sequence.
      types: kinds of tokens.
      next_sentence: whether there is a pooler and the head that tells whether the second sentence follows the first.
      tied: the head scores with the table of the embedding; false gives it a table of its own, which a pipeline needs
        whose stages update at different moments (PipeMare).
      dropout: share dropped of embeddings, behind each block, and of attention weights.
      dtype: type of products and activations; parameters, norms, softmax and logits are float32.
      remat: what each layer keeps for the backward pass.
      attention: who computes attention: the platform's fused kernel where it can (`nn.text.fused_attention`).
    """

    vocab: int = 30_522
    features: int = 1024
    hidden: int = 4096
    heads: int = 16
    layers: int = 24
    positions: int = 512
    types: int = 2
    next_sentence: bool = True
    tied: bool = True
    dropout: float = 0.1
    dtype: ComputeDtype = "float32"
    remat: Remat = "none"
    attention: AttentionKernel = "auto"

    def __post_init__(self) -> None:
        if self.features % self.heads:
            raise RecipeError(
                f"Bert: features={self.features} do not divide over heads={self.heads}. "
                f"Take {self.features - self.features % self.heads or self.heads} features."
            )

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _Bert(self, rngs)

    def forward(self, module: Any, batch: Batch) -> Outputs:
        """Logits of tokens, float32 [examples, predictions, vocab].

        With `next_sentence`, a dictionary: those are `token`, and `next` are [examples, 2] logits, 0: it follows.
        """
        if batch["token"].shape[1] > self.positions:
            raise RecipeError(
                f"Bert: rows of {batch['token'].shape[1]} tokens, and positions={self.positions} are learnt. "
                f"Set positions={batch['token'].shape[1]}, or cut the rows."
            )
        return module.outputs(module.encode(batch), batch)

    def ids_taken(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary, and the types."""
        words = IdRange((self.vocab,), "vocab")
        return {"token": words, "label": words, "type": IdRange((self.types,), "types")}

    def cut_points(self) -> tuple[ModelLayer, ...]:
        """The embedding, each encoder layer, and the heads, which, if `tied`, share the embedding's table of tokens."""
        embedding = names_under(self, "tokens/", "positions/", "types/", "embedding_norm/")
        table = "tokens/" if self.tied else "scores/"
        heads = names_under(self, table, "transform/", "transform_norm/", "token_bias", "pooler/", "next/")
        block = 4.0 * self.features**2 + 2 * self.features * self.hidden

        def encoder(n: int) -> ModelLayer:
            return ModelLayer(
                f"layer {n}",
                names_under(self, f"layers/{n}/"),
                lambda module, x, batch: module.encoder_layer(n, x, batch),
                block,
            )

        return (
            ModelLayer("embedding", embedding, lambda module, x, batch: module.embed(batch), 0.1 * block),
            *map(encoder, range(self.layers)),
            ModelLayer(
                "heads",
                heads,
                lambda module, x, batch: module.outputs(x, batch),
                self.features**2 + 0.15 * self.features * self.vocab,  # the masked places, about one in seven
            ),
        )


def bert_base(**changes: Any) -> Bert:
    """BERT-base, uncased: 12 layers of 768 features; 110,106,428 parameters with both heads."""
    return Bert(**{"features": 768, "hidden": 3072, "heads": 12, "layers": 12, **changes})


def tiny_bert(vocab: int = 4096, positions: int = 128, **changes: Any) -> Bert:
    """The smallest of the released BERTs (arXiv:1908.08962): 2 layers of 128 features; tells tokens only."""
    tiny = {"features": 128, "hidden": 512, "heads": 2, "layers": 2, "dropout": 0.0, "next_sentence": False}
    return Bert(vocab, positions=positions, **{**tiny, **changes})


class _Bert(nnx.Module):
    def __init__(self, spec: Bert, rngs: nnx.Rngs) -> None:
        self.spec = spec
        init, size = truncated_normal(0.02), spec.features
        layer = LayerSpec(
            size,
            spec.hidden,
            spec.heads,
            norm="post",
            epsilon=EPSILON,
            activation="gelu",
            attention_bias=True,
            dropout=spec.dropout,
            kernel=spec.attention,
            dtype=spec.dtype,
            init=init,
        )
        options = {"init": init, "dtype": spec.dtype, "rngs": rngs}
        self.tokens = Embedding(spec.vocab, size, **options)
        self.positions = Embedding(spec.positions, size, counts="positions", **options)
        self.types = Embedding(spec.types, size, counts="types", **options)
        self.embedding_norm = LayerNorm(size, epsilon=EPSILON)
        self.dropout = dropout_layer(spec.dropout, rngs)
        self.layers = nnx.List([EncoderLayer(layer, rngs) for _ in range(spec.layers)])
        self.transform = _square(size, options)
        self.transform_norm = LayerNorm(size, epsilon=EPSILON)
        self.scores = None if spec.tied else Embedding(spec.vocab, size, **options)
        self.token_bias = constant(0.0, (spec.vocab,), ("vocab",))
        self.pooler = _square(size, options) if spec.next_sentence else None
        self.next = Dense({"embed": size}, {"classes": 2}, **options) if spec.next_sentence else None

    def encode(self, batch: Batch) -> jax.Array:
        """The last layer's output, [n, positions, features]."""
        x = self.embed(batch)
        for n in range(len(self.layers)):
            x = self.encoder_layer(n, x, batch)
        return x

    def embed(self, batch: Batch) -> jax.Array:
        """What the first layer reads, [n, positions, features]."""
        token = batch["token"]
        position = batch["position"] if "position" in batch else jnp.arange(token.shape[1])
        kind = batch["type"] if "type" in batch else jnp.zeros_like(token)
        x = self.tokens(token) + self.positions(position) + self.types(kind)
        return self.dropout(self.embedding_norm(x))

    def encoder_layer(self, n: int, x: jax.Array, batch: Batch) -> jax.Array:
        """x after encoder layer n."""
        segment = batch["segment"] if "segment" in batch else (batch["token"] != 0).astype(jnp.int32)
        return call_layer(self.layers[n], x, Segments(segment, segment), remat=self.spec.remat)

    def outputs(self, x: jax.Array, batch: Batch) -> Outputs:
        """See `Bert.forward`."""
        tokens = self.token_logits(x, batch.get("masked"))
        return {"token": tokens, "next": self.next_logits(x)} if self.spec.next_sentence else tokens

    def token_logits(self, x: jax.Array, places: jax.Array | None) -> jax.Array:
        """Scores of every token at `places` [n, predictions] of x, or at all."""
        if places is not None:
            x = jnp.take_along_axis(x, places[..., None], 1)
        x = self.transform_norm(ACTIVATIONS["gelu"](self.transform(x)))
        return (self.scores or self.tokens).scores(x) + self.token_bias[...]

    def next_logits(self, x: jax.Array) -> jax.Array:
        """[n, 2], from the first token of each row."""
        assert self.pooler is not None
        assert self.next is not None
        return self.next(jnp.tanh(self.pooler(x[:, 0]))).astype(jnp.float32)


def _square(size: int, options: dict[str, Any]) -> Dense:
    """A dense layer of the heads; `embed_out` since no axis can split both dims of its kernel."""
    return Dense({"embed": size}, {"embed_out": size}, **options)
