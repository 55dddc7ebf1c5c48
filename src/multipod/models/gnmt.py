"""GNMT, the recurrent translator of MLPerf v0.5 to v0.7 (Wu et al., 2016, arXiv:1609.08144)."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from multipod.nn.by_example import dropout_layer
from multipod.nn.dense import ComputeDtype, Dense
from multipod.nn.merge import merge_model
from multipod.nn.model import FlaxModel
from multipod.nn.text.additive_attention import AdditiveAttention, EncodedMemory
from multipod.nn.text.beam_search import Beams, beam_search, greedy
from multipod.nn.text.embedding import Embedding
from multipod.nn.text.lstm import Lstm, LstmState, zero_state
from multipod.pytrees import Batch, IdRange, Params

PAD = 0
"""The token that fills rows of the source."""


@dataclass(frozen=True)
class Gnmt(FlaxModel):
    """LSTMs that read the source and LSTMs that write the target, with attention of the writers' first layer.

    The encoder's first layer reads both ways, each half from its own sentence's end; from the third layer on a layer's
    input is added to its output. Each decoder layer but the first reads the context beside the layer below. One table
    embeds source and target; the last layer has a table of its own.

    The defaults are MLPerf's reference with NVIDIA's vocabulary: 160,671,297 parameters. Google's code, `google`, also
    feeds the context of the step before to the decoder's first layer, has one bias a gate for two, and none behind the
    last layer: 164,796,417.

    A batch holds tokens `source` [n, places], padded with `PAD`, and `target` [n, places], which the decoder reads: it
    begins with the start token and is one place behind the label.

    Attributes:
      vocab: entries of the tables.
      features: of embeddings, states and attention.
      layers: of the encoder, and of the decoder; at least 2.
      form: whose reading of GNMT, see above.
      dropout: share dropped of what each LSTM reads.
      init_range: weights begin uniform in plus or minus this, which suits 1,024 features.
      dtype: type of products; states, gates, softmax and logits are float32.
    """

    vocab: int = 32_320
    features: int = 1024
    layers: int = 4
    form: Literal["reference", "google"] = "reference"
    dropout: float = 0.2
    init_range: float = 0.1
    dtype: ComputeDtype = "float32"

    def module(self, rngs: nnx.Rngs) -> nnx.Module:
        """A fresh module."""
        return _Gnmt(self, rngs)

    def forward(self, module: Any, batch: Batch) -> jax.Array:
        """Logits [n, target places, vocab], float32."""
        return module.decode(batch["target"], module.encode(batch["source"]))

    def ids_taken(self) -> dict[str, IdRange]:
        """Tokens of the vocabulary."""
        return dict.fromkeys(("source", "target", "label"), IdRange((self.vocab,), "vocab"))

    def translate(
        self,
        params: Params,
        batch: Batch,
        *,
        start: int,
        end: int,
        length: int,
        beam: int = 5,
        penalty: float = 0.6,
        coverage: float = 0.1,
    ) -> Beams:
        """The best translations of each source sequence; the defaults are MLPerf's.

        `coverage` times the sum over source tokens of ln(min(attention paid to it, 1)) is added to the score of a
        sequence that has ended (arXiv:1609.08144, eq. 14). See `multipod.nn.text.beam_search.beam_search`.
        """
        module = merge_model(self, params)
        rows = len(batch["source"]) * beam
        memory = jax.tree.map(lambda leaf: jnp.repeat(leaf, beam, axis=0), module.encode(batch["source"]))

        def bonus(cache: _Writing) -> jax.Array:
            attention = jnp.clip(cache.attended, jnp.finfo(jnp.float32).tiny, 1.0)
            return coverage * jnp.where(memory.mask, jnp.log(attention), 0.0).sum(-1)

        def step(tokens: jax.Array, position: jax.Array, cache: _Writing) -> tuple[jax.Array, _Writing]:
            return module.step(tokens, cache, memory)

        return beam_search(
            step,
            module.first(rows, memory),
            len(batch["source"]),
            beam=beam,
            length=length,
            start=start,
            end=end,
            penalty=penalty,
            bonus=bonus if coverage else None,
        )

    def translate_greedily(self, params: Params, batch: Batch, *, start: int, end: int, length: int) -> jax.Array:
        """The likeliest token at each place, int32 [n, length]; see `multipod.nn.text.beam_search.greedy`."""
        module = merge_model(self, params)
        memory, rows = module.encode(batch["source"]), len(batch["source"])
        step = lambda tokens, position, cache: module.step(tokens, cache, memory)  # noqa: E731
        return greedy(step, module.first(rows, memory), rows, length=length, start=start, end=end)


def small_gnmt(vocab: int = 64, **changes: Any) -> Gnmt:
    """A GNMT that trains on two cores: 64 features, two and two layers, from weights as much larger."""
    return Gnmt(vocab, **{"features": 64, "layers": 2, "dropout": 0.0, "init_range": 0.3, **changes})


class _Writing(NamedTuple):
    """The decoder between two tokens: its layers' states, the last context, and the attention paid so far."""

    states: list[LstmState]
    context: jax.Array
    attended: jax.Array


class _Gnmt(nnx.Module):
    def __init__(self, spec: Gnmt, rngs: nnx.Rngs) -> None:
        self.spec = spec
        init = partial(_uniform, spec.init_range)
        options = {"init": init, "two_biases": spec.form == "reference", "dtype": spec.dtype, "rngs": rngs}
        width = spec.features
        self.embedding = Embedding(spec.vocab, width, init=init, dtype=spec.dtype, rngs=rngs)
        self.dropout = dropout_layer(spec.dropout, rngs)
        self.backward = Lstm(width, width, **options)
        encoder = [width, 2 * width, *[width] * (spec.layers - 2)]
        self.encoder = nnx.List([Lstm(inputs, width, **options) for inputs in encoder])
        self.attention = AdditiveAttention(width, init=init, dtype=spec.dtype, rngs=rngs)
        first = width if spec.form == "reference" else 2 * width
        decoder = [first, *[2 * width] * (spec.layers - 1)]
        self.decoder = nnx.List([Lstm(inputs, width, **options) for inputs in decoder])
        bias = spec.form == "reference"
        self.scores = Dense({"embed": width}, {"vocab": spec.vocab}, bias=bias, init=init, dtype=spec.dtype, rngs=rngs)

    def encode(self, source: jax.Array) -> EncodedMemory:
        """What the decoder attends to."""
        mask = source != PAD
        x = self.dropout(self.embedding(source))
        forward, backward = self.encoder[0](x, mask), self.backward(x, mask, reverse=True)
        x = jnp.concatenate([forward, backward], -1)
        for number, layer in enumerate(list(self.encoder)[1:]):
            y = layer(self.dropout(x), mask)
            x = x + y if number else y
        return self.attention.memory(x, mask)

    def decode(self, target: jax.Array, memory: EncodedMemory) -> jax.Array:
        """Logits behind every place of the target."""
        x = self.embedding(target)
        if self.spec.form == "reference":
            x = self.decoder[0](self.dropout(x))
            context = self.attention(x, memory).context
        else:
            x, context = self._first_layer_with_context(self.dropout(x), memory)
        for number, layer in enumerate(list(self.decoder)[1:]):
            y = layer(self.dropout(_beside(x, context)))
            x = x + y if number else y
        return self.scores(x).astype(jnp.float32)

    def _first_layer_with_context(self, x: jax.Array, memory: EncodedMemory) -> tuple[jax.Array, jax.Array]:
        """The first layer's outputs and contexts, each step reading the context of the one before."""
        first = self.decoder[0]

        def step(carry: tuple[LstmState, jax.Array], given: jax.Array) -> tuple[Any, tuple[jax.Array, jax.Array]]:
            state, context = carry
            state = first.step(_beside(given, context), state)
            context = self.attention(state.hidden[:, None], memory).context[:, 0]
            return (state, context), (state.hidden, context)

        begin = zero_state(len(x), self.spec.features), jnp.zeros((len(x), self.spec.features))
        _, outputs = lax.scan(step, begin, jnp.moveaxis(x, 1, 0))
        hidden, contexts = (jnp.moveaxis(each, 0, 1) for each in outputs)
        return hidden, contexts

    def first(self, rows: int, memory: EncodedMemory) -> _Writing:
        """The decoder before the first token."""
        width = self.spec.features
        states = [zero_state(rows, width) for _ in self.decoder]
        return _Writing(states, jnp.zeros((rows, width)), jnp.zeros(memory.mask.shape))

    def step(self, tokens: jax.Array, cache: _Writing, memory: EncodedMemory) -> tuple[jax.Array, _Writing]:
        """Logits [rows, vocab] behind the tokens [rows]."""
        x = self.embedding(tokens)
        x = x if self.spec.form == "reference" else _beside(x, cache.context)
        states = [self.decoder[0].step(x, cache.states[0])]
        attended = self.attention(states[0].hidden[:, None], memory)
        context, x = attended.context[:, 0], states[0].hidden
        for number, layer in enumerate(list(self.decoder)[1:]):
            states.append(layer.step(_beside(x, context), cache.states[number + 1]))
            x = x + states[-1].hidden if number else states[-1].hidden
        weights = cache.attended + attended.weights[:, 0]
        return self.scores(x).astype(jnp.float32), _Writing(states, context, weights)


def _uniform(
    most: float, key: jax.Array, shape: Sequence[int], dtype: Any = jnp.float32, out_sharding: Any = None
) -> jax.Array:
    return jax.random.uniform(key, shape, dtype, -most, most, out_sharding=out_sharding)


def _beside(x: jax.Array, context: jax.Array) -> jax.Array:
    return jnp.concatenate([x, context.astype(x.dtype)], -1)
