"""T5, T5 1.1 and Switch Transformers of Hugging Face's transformers, all of which are an `StMoe` here."""

from collections.abc import Iterator, Mapping

from multipod.interop.weights.forms import Matrix
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
from multipod.models.st_moe import StMoe

TABLE_NAME = "shared.weight"
AGAIN = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
ACTIVATIONS = {"relu": "relu", "gelu_tanh": "gelu_new", "gelu": "gelu", "silu": "silu"}
"""Ours, and what they call it."""


def _is_switch(model: StMoe) -> bool:
    return model.every > 0


def _of_stack(model: StMoe, stack: str) -> Iterator[NamedLayer]:
    cross = stack == "decoder"
    yield NamedLayer(f"{stack}_norm", f"{stack}.final_layer_norm", NORM)
    yield NamedLayer(f"{stack}_position", f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias", TABLE)
    for n in range(model.layers):
        ours, theirs = f"{stack}/{n}", f"{stack}.block.{n}.layer"
        yield from _attention(f"{ours}/attention", f"{theirs}.0", "SelfAttention")
        if cross:
            yield from _attention(f"{ours}/cross", f"{theirs}.1", "EncDecAttention")
        block = f"{theirs}.{2 if cross else 1}"
        mlp = f"{block}.mlp" if _is_switch(model) else f"{block}.DenseReluDense"
        if model.is_sparse(n):
            yield NamedLayer(f"{ours}/sparse_residual/norm", f"{block}.layer_norm", NORM)
            continue
        yield NamedLayer(f"{ours}/mlp_residual/norm", f"{block}.layer_norm", NORM)
        kernels = {"gate": "wi_0", "inner": "wi_1"} if model.dense_gated else {"inner": "wi"}
        yield from (NamedLayer(f"{ours}/mlp/{a}", f"{mlp}.{b}", LINEAR) for a, b in {**kernels, "outer": "wo"}.items())


def _attention(ours: str, theirs: str, name: str) -> Iterator[NamedLayer]:
    for part, letter in {"query": "q", "key": "k", "value": "v"}.items():
        yield NamedLayer(f"{ours}/{part}", f"{theirs}.{name}.{letter}", TO_HEADS)
    yield NamedLayer(f"{ours}/out", f"{theirs}.{name}.o", FROM_HEADS)
    yield NamedLayer(f"{ours}_residual/norm", f"{theirs}.layer_norm", NORM)


def _of_experts(model: StMoe) -> dict[str, Place]:
    """The routers, and the experts' kernels, of which theirs are a tensor for each expert."""
    found = {}
    for stack, block in (("encoder", 1), ("decoder", 2)):
        for n in filter(model.is_sparse, range(model.layers)):
            theirs = f"{stack}.block.{n}.layer.{block}.mlp"
            ours, each = f"{stack}/{n}/sparse", range(model.routing.experts)
            found[f"{ours}/router"] = Place((f"{theirs}.router.classifier.weight",), Matrix())
            for kernel, name in {"inner": "wi", "outer": "wo"}.items():
                names = tuple(f"{theirs}.experts.expert_{e}.{name}.weight" for e in each)
                found[f"{ours}/experts/{kernel}"] = Place(names, Matrix(), stacked=True)
    return found


def _of_t5(model: StMoe) -> dict[str, Place]:
    layers = [NamedLayer("embedding", "shared", TABLE), NamedLayer("head", "lm_head", LINEAR)]
    return places_of([*layers, *_of_stack(model, "encoder"), *_of_stack(model, "decoder")]) | _of_experts(model)


def _modern(tensors: Tensors) -> Tensors:
    """The shared table once, and no head where it is that table."""
    table = next((tensors[name] for name in (TABLE_NAME, *AGAIN) if name in tensors), None)
    if table is None:
        return tensors
    head = tensors.get("lm_head.weight")
    tied = head is not None and head.shape == table.shape and (head == table).all()
    drop = {*AGAIN, *(["lm_head.weight"] if tied else [])}
    return {name: tensor for name, tensor in tensors.items() if name not in drop} | {TABLE_NAME: table}


def _objections(model: StMoe, config: Mapping[str, object]) -> list[str]:
    """Fields of which shapes tell nothing."""
    gated, activation = _dense(config)
    tied = config.get("tie_word_embeddings", True)
    wanted = {
        "num_heads": (config.get("num_heads"), model.heads, "heads"),
        "the activation": (activation, ACTIVATIONS[model.activation], "activation"),
        "gating": (gated, model.dense_gated, "dense_gated"),
        "tie_word_embeddings": (config.get("scale_decoder_outputs", tied), model.tied, "tied"),
        "scaled attention": (False, model.scaled_attention, "scaled_attention"),
        "relative_attention_num_buckets": (config.get("relative_attention_num_buckets", 32), 32, "no field"),
        "relative_attention_max_distance": (config.get("relative_attention_max_distance", 128), 128, "no field"),
        "layer_norm_epsilon": (config.get("layer_norm_epsilon", 1e-6), 1e-6, "no field"),
        "a block beside the experts": (False, model.beside and _is_switch(model), "beside"),
        "experts of a token": (1, model.routing.chosen if _is_switch(model) else 1, "routing.chosen"),
    }
    return [
        f"{what} is {theirs!r} there, and {ours!r} here (model.{field})"
        for what, (theirs, ours, field) in wanted.items()
        if theirs is not None and theirs != ours
    ]


def _dense(config: Mapping[str, object]) -> tuple[bool | None, str | None]:
    """Whether a dense block is gated, and its activation, where the configuration says it."""
    projection = config.get("feed_forward_proj", config.get("dense_act_fn"))
    if not isinstance(projection, str):
        return None, None
    gated, name = projection.startswith("gated-"), projection.removeprefix("gated-")
    return gated, "gelu_new" if gated and name == "gelu" else name


def _config(model: StMoe) -> dict[str, object]:
    sizes = {
        "vocab_size": model.vocab,
        "d_model": model.features,
        "d_kv": model.kv,
        "d_ff": model.hidden,
        "num_layers": model.layers,
        "num_decoder_layers": model.layers,
        "num_heads": model.heads,
        "dropout_rate": model.dropout,
        "layer_norm_epsilon": 1e-6,
        "pad_token_id": 0,
        "decoder_start_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": model.tied,
        "is_encoder_decoder": True,
    }
    activation = ACTIVATIONS[model.activation]
    if not _is_switch(model):
        projection = f"gated-{'gelu' if activation == 'gelu_new' else activation}" if model.dense_gated else activation
        kind = {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "feed_forward_proj": projection}
        return {**kind, **sizes}
    sparse = model.layers // model.every
    return {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": "switch_transformers",
        **sizes,
        "dense_act_fn": activation,
        "num_experts": model.routing.experts,
        "num_sparse_encoder_layers": sparse,
        "num_sparse_decoder_layers": sparse,
        "router_jitter_noise": model.routing.jitter,
        "router_z_loss_coef": model.routing.z,
        "router_aux_loss_coef": model.routing.balance,
        "expert_capacity": 2**20 if model.routing.dropless else 64,
    }


TRANSFORMERS = (Family("transformers", (StMoe,), _of_t5, modern=_modern, objections=_objections, config=_config),)
