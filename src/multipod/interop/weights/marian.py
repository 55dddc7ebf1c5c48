"""Marian's translators as Hugging Face's transformers have them (MarianMTModel), which are a `Transformer` here."""

from collections.abc import Iterator, Mapping

from multipod.errors import WeightsError
from multipod.interop.weights.forms import OneRow
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
from multipod.models.transformer import Transformer
from multipod.nn.dense import Activation

EPSILON = 1e-5
"""Of their layer norms, whatever the configuration."""
TABLE_NAME, HEAD = "model.shared.weight", "lm_head.weight"
SOURCE, TARGET = "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight"
ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu", "swish": "silu", "silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh"
}  # fmt: skip
"""What they call an activation, and ours."""


def _of_marian(model: Transformer) -> dict[str, Place]:
    """Returns the places of a model that Marian has too.

    Raises:
      WeightsError: it computes what Marian's do not, all of it listed.
    """
    wanted = {"norm": "post", "attention_bias": True, "epsilon": EPSILON, "waves": "paper", "logit_bias": True}
    wrong = [
        f"{name}={getattr(model, name)!r}, and theirs is {value!r}"
        for name, value in wanted.items()
        if getattr(model, name) != value
    ]
    if wrong:
        listed = "\n  ".join(wrong)
        raise WeightsError(
            f"MarianMTModel of transformers computes otherwise than this Transformer:\n  {listed}\nTake a model that "
            "was made by marian_like() (multipod.models.transformer), or write a family (docs/weights.md)."
        )
    layers = [layer for stack in ("encoder", "decoder") for layer in _of_stack(model, stack)]
    tables = {"embedding": TABLE_NAME} if model.tied else {"embedding": SOURCE, "target_table": TARGET, "scores": HEAD}
    named = [NamedLayer(ours, theirs.removesuffix(".weight"), TABLE) for ours, theirs in tables.items()]
    return places_of([*named, *layers]) | {"logit_bias": Place(("final_logits_bias",), OneRow())}


def _of_stack(model: Transformer, stack: str) -> Iterator[NamedLayer]:
    attentions = {"attention": "self_attn"} | ({"cross": "encoder_attn"} if stack == "decoder" else {})
    for n in range(model.encoder_layers if stack == "encoder" else model.decoder_layers):
        ours, theirs = f"{stack}/{n}", f"model.{stack}.layers.{n}"
        for a, b in attentions.items():
            for part, letter in {"query": "q", "key": "k", "value": "v"}.items():
                yield NamedLayer(f"{ours}/{a}/{part}", f"{theirs}.{b}.{letter}_proj", TO_HEADS)
            yield NamedLayer(f"{ours}/{a}/out", f"{theirs}.{b}.out_proj", FROM_HEADS)
            yield NamedLayer(f"{ours}/{a}_residual/norm", f"{theirs}.{b}_layer_norm", NORM)
        yield NamedLayer(f"{ours}/mlp/inner", f"{theirs}.fc1", LINEAR)
        yield NamedLayer(f"{ours}/mlp/outer", f"{theirs}.fc2", LINEAR)
        yield NamedLayer(f"{ours}/mlp_residual/norm", f"{theirs}.final_layer_norm", NORM)


def _modern(tensors: Tensors) -> Tensors:
    """The table once where all three are the same one, by whichever names a file has it."""
    tables = {name: tensors[name] for name in (TABLE_NAME, SOURCE, TARGET, HEAD) if name in tensors}
    if not tables or not (TABLE_NAME in tables or len(tables) == 1):
        return tensors
    first = next(iter(tables.values()))
    if not all(table.shape == first.shape and (table == first).all() for table in tables.values()):
        return tensors
    return {name: tensor for name, tensor in tensors.items() if name not in tables} | {TABLE_NAME: first}


def _objections(model: Transformer, config: Mapping[str, object]) -> list[str]:
    """Fields of which shapes tell nothing."""
    activation = config.get("activation_function")
    tied = "model.tied", model.tied
    heads = "model.heads", model.heads
    wanted: dict[str, tuple[str, object]] = {
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "share_encoder_decoder_embeddings": tied,
        "tie_word_embeddings": tied,
        "pad_token_id": ("model.pad", model.pad),
        "scale_embedding": ("always", True),
        "normalize_before": ("model.norm", model.norm == "pre"),
        "normalize_embedding": ("always", False),
        "add_final_layer_norm": ("always", False),
        "static_position_embeddings": ("always", True),
    }
    found = [
        f"{name} is {config[name]!r} there, and {ours!r} here ({field})"
        for name, (field, ours) in wanted.items()
        if config.get(name) not in (None, ours)
    ]
    if activation is not None and ACTIVATIONS.get(str(activation)) != model.activation:
        found.append(f"activation_function is {activation!r} there, and {model.activation!r} here (model.activation)")
    return found


def _config(model: Transformer) -> dict[str, object]:
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "vocab_size": model.vocab,
        "decoder_vocab_size": model.vocab,
        "d_model": model.features,
        "encoder_layers": model.encoder_layers,
        "decoder_layers": model.decoder_layers,
        "encoder_attention_heads": model.heads,
        "decoder_attention_heads": model.heads,
        "encoder_ffn_dim": model.hidden,
        "decoder_ffn_dim": model.hidden,
        "activation_function": next(theirs for theirs, ours in ACTIVATIONS.items() if ours == model.activation),
        "dropout": model.dropout,
        "attention_dropout": model.dropout,
        "activation_dropout": model.dropout,
        "scale_embedding": True,
        "static_position_embeddings": True,
        "share_encoder_decoder_embeddings": model.tied,
        "tie_word_embeddings": model.tied,
        "is_encoder_decoder": True,
        "pad_token_id": model.pad,
        "decoder_start_token_id": model.pad,
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }


TRANSFORMERS = (
    Family(
        "transformers",
        (Transformer,),
        _of_marian,
        modern=_modern,
        ignored=(r"model\.(en|de)coder\.embed_positions\.weight",),
        objections=_objections,
        config=_config,
    ),
)
