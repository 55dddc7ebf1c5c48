"""BERT of Hugging Face's transformers: pre-training heads, the masked head alone, and former names."""

from collections.abc import Mapping

from multipod.interop.weights.forms import SAME
from multipod.interop.weights.places import (
    FROM_HEADS,
    LINEAR,
    NORM,
    TABLE,
    TO_HEADS,
    Family,
    NamedLayer,
    Place,
    Tensors,
    places_of,
)
from multipod.models.bert import EPSILON, Bert

TABLE_NAME, BIAS = "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
TWICE = {"cls.predictions.decoder.weight": TABLE_NAME, "cls.predictions.decoder.bias": BIAS}
"""Tensors that some files hold twice, and where else."""


def _of_bert(model: Bert) -> dict[str, Place]:
    embeddings, head = "bert.embeddings", "cls.predictions.transform"
    layers = [
        NamedLayer("tokens", f"{embeddings}.word_embeddings", TABLE),
        NamedLayer("positions", f"{embeddings}.position_embeddings", TABLE),
        NamedLayer("types", f"{embeddings}.token_type_embeddings", TABLE),
        NamedLayer("embedding_norm", f"{embeddings}.LayerNorm", NORM),
        NamedLayer("transform", f"{head}.dense", LINEAR),
        NamedLayer("transform_norm", f"{head}.LayerNorm", NORM),
        NamedLayer("scores", "cls.predictions.decoder", TABLE),
        NamedLayer("pooler", "bert.pooler.dense", LINEAR),
        NamedLayer("next", "cls.seq_relationship", LINEAR),
    ]
    for n in range(model.layers):
        ours, theirs = f"layers/{n}", f"bert.encoder.layer.{n}"
        layers += [
            *(
                NamedLayer(f"{ours}/attention/{p}", f"{theirs}.attention.self.{p}", TO_HEADS)
                for p in ("query", "key", "value")
            ),
            NamedLayer(f"{ours}/attention/out", f"{theirs}.attention.output.dense", FROM_HEADS),
            NamedLayer(f"{ours}/attention_residual/norm", f"{theirs}.attention.output.LayerNorm", NORM),
            NamedLayer(f"{ours}/mlp/inner", f"{theirs}.intermediate.dense", LINEAR),
            NamedLayer(f"{ours}/mlp/outer", f"{theirs}.output.dense", LINEAR),
            NamedLayer(f"{ours}/mlp_residual/norm", f"{theirs}.output.LayerNorm", NORM),
        ]
    return places_of(layers) | {"token_bias": Place((BIAS,), SAME)}


def _modern(tensors: Tensors) -> Tensors:
    """Names with the prefix `bert.`, `weight` and `bias` for the norms' `gamma` and `beta`, and no tensor twice."""
    heads = ("bert.", "cls.", "classifier.", "qa_outputs.")
    named = {}
    for name, tensor in tensors.items():
        name = name.replace("LayerNorm.gamma", "LayerNorm.weight").replace("LayerNorm.beta", "LayerNorm.bias")
        named[name if name.startswith(heads) else f"bert.{name}"] = tensor
    if BIAS not in named and "cls.predictions.decoder.bias" in named:
        named[BIAS] = named["cls.predictions.decoder.bias"]
    same = [again for again, first in TWICE.items() if again in named and (named[again] == named.get(first)).all()]
    return {name: tensor for name, tensor in named.items() if name not in same}


def _objections(model: Bert, config: Mapping[str, object]) -> list[str]:
    # Fields of which shapes tell nothing.
    wanted = {
        "num_attention_heads": model.heads,
        "hidden_act": "gelu",
        "layer_norm_eps": EPSILON,
        "position_embedding_type": "absolute",
    }
    return [
        f"{name} is {config[name]!r} there, and {value!r} here"
        for name, value in wanted.items()
        if config.get(name) not in (None, value)
    ]


def _config(model: Bert) -> dict[str, object]:
    return {
        "architectures": ["BertForPreTraining" if model.next_sentence else "BertForMaskedLM"],
        "model_type": "bert",
        "vocab_size": model.vocab,
        "hidden_size": model.features,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "intermediate_size": model.hidden,
        "hidden_act": "gelu",
        "hidden_dropout_prob": model.dropout,
        "attention_probs_dropout_prob": model.dropout,
        "max_position_embeddings": model.positions,
        "type_vocab_size": model.types,
        "layer_norm_eps": EPSILON,
        "pad_token_id": 0,
        "tie_word_embeddings": model.tied,
    }


TRANSFORMERS = (
    Family(
        "transformers",
        (Bert,),
        _of_bert,
        modern=_modern,
        ignored=(r"bert\.embeddings\.position_ids",),
        objections=_objections,
        config=_config,
    ),
)
