"""Weights of other libraries: the same outputs and gradients as theirs, and state dicts that they load bit for bit."""

import itertools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multipod.errors import WeightsError
from multipod.interop.weights.convert import to_ours, to_theirs
from multipod.interop.weights.families import family_of
from multipod.interop.weights.files import read_weights, write_weights
from multipod.models.bert import Bert
from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_interactions import CrossInteraction, DotInteraction
from multipod.models.efficientnet import EfficientNet
from multipod.models.resnet import ResNet
from multipod.models.st_moe import t5_like
from multipod.models.transformer import Transformer, marian_like
from multipod.nn.experts.routing import Routing

torch = pytest.importorskip("torch")
KEY = jax.random.key(0)
RANDOM = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def seeded():
    """Weights that no test before has a part in: a unit at ReLU's kink would turn over by a rounding."""
    torch.manual_seed(3)


def randomized(theirs, deviation=None):
    """The model with random numbers in every tensor that usually begins as zeros or ones."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, tensor in theirs.state_dict().items():
            if name.endswith(("running_var", "norm.weight", "LayerNorm.weight", "layer_norm.weight")):
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif tensor.is_floating_point() and tensor.ndim == 1:
                tensor.normal_(0, 0.1, generator=generator)
            elif deviation is not None and tensor.is_floating_point():
                tensor.normal_(0, deviation, generator=generator)
    return theirs.eval()


def state_of(theirs):
    return {name: tensor.detach().numpy() for name, tensor in theirs.state_dict().items()}


def imported(model, tensors, library, **options):
    """Our parameters and statistics, made of their tensors."""
    shapes = jax.eval_shape(model.init, KEY)
    return to_ours(family_of(model, library=library), model, tensors, *shapes, **options)


def check(model, theirs, library, batch, expected, outputs=lambda out: out, atol=1e-5):
    """Holds our outputs against `expected`, a torch tensor, the gradients of a weighted sum, and the way back."""
    family, tensors = family_of(model, library=library), state_of(theirs)
    params, statistics = imported(model, tensors, library)
    weights = RANDOM.normal(size=tuple(expected.shape)).astype(np.float32)

    def loss(params):
        out = outputs(model.apply(params, statistics, batch, train=False, key=KEY)[0])
        return (out * weights).sum(), out

    (_, out), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    scale = max(1.0, float(expected.detach().abs().max()))
    np.testing.assert_allclose(out, expected.detach().numpy(), rtol=0, atol=atol * scale)
    theirs.zero_grad()
    (expected * torch.from_numpy(weights)).sum().backward()
    ours = to_theirs(family, model, gradients, {})
    named = {name: tensor for name, tensor in theirs.named_parameters() if name in ours}
    assert {*named} == {*family.modern(ours)} - {name for name, _ in theirs.named_buffers()}
    worst = max(float(tensor.grad.abs().max()) for tensor in named.values())
    for name, tensor in named.items():
        size = max(float(tensor.grad.abs().max()), 1e-2 * worst)
        np.testing.assert_allclose(ours[name], tensor.grad.numpy(), rtol=0, atol=1e-4 * size, err_msg=name)
    back = to_theirs(family, model, params, statistics)
    assert [name for name, array in back.items() if not np.array_equal(array, tensors[name])] == []
    return params, statistics


def as_torch(image):
    return torch.from_numpy(image.transpose(0, 3, 1, 2).copy())


IMAGE = RANDOM.normal(size=(2, 40, 40, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def torchvision():
    from torchvision_reference import torchvision

    return torchvision


@pytest.fixture(scope="module")
def timm(torchvision):
    return pytest.importorskip("timm")


@pytest.fixture(scope="module")
def transformers(torchvision):
    return pytest.importorskip("transformers")


def test_a_resnet_of_torchvision_gives_the_same_outputs_and_gradients(torchvision):
    theirs = randomized(torchvision.models.resnet18(num_classes=7))
    check(ResNet(18, classes=7), theirs, "torchvision", {"image": IMAGE}, theirs(as_torch(IMAGE)))


@pytest.mark.slow
def test_a_resnet_of_bottlenecks_gives_the_same_outputs(timm):
    theirs = randomized(timm.create_model("resnet50", num_classes=7))
    assert_same(ResNet(50, classes=7), theirs, "timm")


@pytest.mark.parametrize("depth", [18, 34, 50, 101, 152])
def test_the_names_of_every_resnet_are_those_of_both_libraries(depth, torchvision, timm):
    with torch.device("meta"):
        theirs = getattr(torchvision.models, f"resnet{depth}")().state_dict()
        assert {*timm.create_model(f"resnet{depth}").state_dict()} == {*theirs}
    named = {name for place in family_of(ResNet(depth)).places(ResNet(depth)).values() for name in place.names}
    rare = {name for name in named if "downsample" in name or name.endswith((".bias", "conv1.bias"))}
    assert {name for name in theirs if "num_batches" not in name} <= named
    assert named - {*theirs} <= rare  # a shortcut that is the identity, the bias of a convolution


EFFICIENT = {"padding": "symmetric", "epsilon": 1e-5, "classes": 7, "dropout": 0.0, "stochastic_depth": 0.0}


@pytest.mark.slow
def test_efficientnets_of_both_libraries_give_the_same_outputs_and_gradients(timm, torchvision):
    theirs = randomized(timm.models.efficientnet._gen_efficientnet("efficientnet_b0", 0.25, 0.3, num_classes=7))
    model = EfficientNet(0.25, 0.3, **EFFICIENT)
    params, statistics = check(model, theirs, "timm", {"image": IMAGE}, theirs(as_torch(IMAGE)))
    module = torchvision.models.efficientnet
    setting, last = module._efficientnet_conf("efficientnet_b0", width_mult=0.25, depth_mult=0.3)
    other = module.EfficientNet(setting, 0.0, num_classes=7, last_channel=last).eval()
    state = to_theirs(family_of(model, library="torchvision"), model, params, statistics)
    other.load_state_dict({name: torch.tensor(array) for name, array in state.items()})
    np.testing.assert_array_equal(other(as_torch(IMAGE)).detach(), theirs(as_torch(IMAGE)).detach())
    again, _ = imported(model, state_of(other), "torchvision")
    assert all(np.array_equal(again[name], params[name]) for name in params)


def test_an_efficientnet_of_its_authors_gives_the_same_outputs(timm):
    make = timm.models.efficientnet._gen_efficientnet
    theirs = make("tf_efficientnet_b0", 0.25, 0.3, num_classes=7, bn_eps=1e-3, pad_type="same")
    assert_same(EfficientNet(0.25, 0.3, classes=7, dropout=0.0, stochastic_depth=0.0), randomized(theirs), "timm")


def assert_same(model, theirs, library):
    params, statistics = imported(model, state_of(theirs), library)
    ours = jax.jit(lambda image: model.apply(params, statistics, {"image": image}, train=False, key=KEY)[0])(IMAGE)
    np.testing.assert_allclose(ours, theirs(as_torch(IMAGE)).detach().numpy(), atol=1e-5)


TOKENS = RANDOM.integers(3, 40, (3, 9)).astype(np.int32)
TOKENS[1, 6:] = 0


def bert_of(transformers, kind="BertForPreTraining", **changes):
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 12}
    more = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 64, "attn_implementation": "eager"}
    return randomized(getattr(transformers, kind)(transformers.BertConfig(**{**sizes, **more, **changes})), 0.2)


BERT = Bert(40, features=32, hidden=64, heads=4, layers=2, positions=12, dropout=0.0)


def test_bert_gives_the_same_outputs_and_gradients(transformers):
    theirs, tokens = bert_of(transformers), torch.from_numpy(TOKENS).long()
    kinds = (TOKENS % 2).astype(np.int32)
    out = theirs(tokens, attention_mask=tokens != 0, token_type_ids=torch.from_numpy(kinds).long())
    real = (TOKENS != 0)[..., None]
    check(
        BERT,
        theirs,
        "transformers",
        {"token": TOKENS, "type": kinds},
        torch.cat([(out.prediction_logits * torch.from_numpy(real)).flatten(), out.seq_relationship_logits.flatten()]),
        lambda ours: jnp.concatenate([(ours["token"] * real).ravel(), ours["next"].ravel()]),
    )


def test_bert_without_the_second_head_and_with_former_names_is_read(transformers):
    theirs = bert_of(transformers, "BertForMaskedLM")
    state = state_of(theirs)
    former = {k.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): v
              for k, v in state.items() if k != "cls.predictions.bias"}  # fmt: skip
    for tensors in (state, former):
        params, _ = imported(replace(BERT, next_sentence=False), tensors, "transformers")
        np.testing.assert_array_equal(params["token_bias"], state["cls.predictions.bias"])
        np.testing.assert_array_equal(params["embedding_norm/scale"], state["bert.embeddings.LayerNorm.weight"])
    alone = {k.removeprefix("bert."): v for k, v in state_of(bert_of(transformers)).items() if k.startswith("bert.")}
    heads = ("transform*", "token_bias", "next/*")
    fresh = BERT.init(KEY)
    params, _ = to_ours(family_of(BERT), BERT, alone, *fresh, fresh=heads)
    np.testing.assert_array_equal(params["transform/kernel"], fresh[0]["transform/kernel"])
    np.testing.assert_array_equal(params["pooler/kernel"], alone["pooler.dense.weight"].T)


TEXT = {"vocab": 40, "features": 16, "hidden": 24, "heads": 2, "kv": 4, "layers": 2}
SOURCE = RANDOM.integers(3, 40, (3, 70)).astype(np.int32)
SOURCE[2, 50:] = 0
TARGET = np.concatenate([np.zeros((3, 1)), RANDOM.integers(3, 40, (3, 60))], 1).astype(np.int32)


def t5_config(transformers, **changes):
    sizes = {"vocab_size": 40, "d_model": 16, "d_ff": 24, "num_heads": 2, "d_kv": 4, "num_layers": 2}
    kind = changes.pop("kind", "T5")
    more = {"num_decoder_layers": 2, "decoder_start_token_id": 0, "attn_implementation": "eager"}
    return getattr(transformers, f"{kind}Config")(**{**sizes, **more, **changes})


def logits_of(theirs):
    source = torch.from_numpy(SOURCE).long()
    target = torch.from_numpy(TARGET).long()
    return theirs(input_ids=source, attention_mask=source != 0, decoder_input_ids=target).logits


def text_batch():
    return {"source": SOURCE, "target": TARGET}


def test_distances_fall_in_the_buckets_of_t5(transformers):
    from multipod.nn.text.relative_positions import buckets

    distance = np.arange(-300, 301)
    find = transformers.models.t5.modeling_t5.T5Attention._relative_position_bucket
    for both in (True, False):
        theirs = find(torch.from_numpy(distance), bidirectional=both, num_buckets=32, max_distance=128)
        np.testing.assert_array_equal(buckets(distance, both_ways=both), theirs)


def test_t5_gives_the_same_outputs_and_gradients(transformers):
    theirs = randomized(transformers.T5ForConditionalGeneration(t5_config(transformers)), 0.2)
    model = t5_like(**TEXT, dense_gated=False, activation="relu", tied=True)
    check(model, theirs, "transformers", text_batch(), logits_of(theirs), lambda out: out["logits"])


def test_t5_of_the_second_form_gives_the_same_outputs_and_gradients(transformers):
    config = t5_config(transformers, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    theirs = transformers.T5ForConditionalGeneration(config)
    theirs.lm_head.weight = torch.nn.Parameter(torch.zeros(40, 16))
    randomized(theirs, 0.2)
    check(t5_like(**TEXT), theirs, "transformers", text_batch(), logits_of(theirs), lambda out: out["logits"])


def test_switch_transformers_gives_the_same_outputs_and_gradients(transformers):
    config = t5_config(
        transformers, kind="SwitchTransformers", num_experts=4, expert_capacity=10**6, num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1, router_jitter_noise=0.0,
    )  # fmt: skip
    theirs = randomized(transformers.SwitchTransformersForConditionalGeneration(config), 0.2)
    check(SWITCH, theirs, "transformers", text_batch(), logits_of(theirs), lambda out: out["logits"])


def test_answers_are_those_of_transformers(transformers):
    """Sixteen likeliest tokens, one for one, both with keys and values that are kept."""
    config = t5_config(transformers, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    theirs = transformers.T5ForConditionalGeneration(config)
    theirs.lm_head.weight = torch.nn.Parameter(torch.zeros(40, 16))
    randomized(theirs, 0.2)
    model, source = t5_like(**TEXT), torch.from_numpy(SOURCE).long()
    params, _ = imported(model, state_of(theirs), "transformers")
    told = jax.jit(lambda params: model.generate(params, {"source": SOURCE}, start=0, end=-1, length=16))(params)
    theirs.generation_config.eos_token_id = None
    known = theirs.generate(
        source, attention_mask=(source != 0).long(), max_new_tokens=16, do_sample=False, suppress_tokens=[0]
    )
    np.testing.assert_array_equal(told, known[:, 1:].numpy())
    assert len(np.unique(told)) > 4


SWITCH = t5_like(
    **TEXT, every=2, gated=False, dense_gated=False, activation="relu", tied=True, group_rows=1,
    routing=Routing(4, chosen=1, dropless=True),
)  # fmt: skip


MARIAN = marian_like(40, features=16, hidden=24, heads=2, encoder_layers=2, decoder_layers=3, dropout=0.0)
MARIAN_SOURCE = np.where(SOURCE == 0, 39, SOURCE % 39)  # whose last token is the padding


def marian_of(transformers, deviation=0.2, **changes):
    sizes = {"vocab_size": 40, "d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "encoder_layers": 2}
    more = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 3, "scale_embedding": True}
    tokens = {"pad_token_id": 39, "decoder_start_token_id": 39, "eos_token_id": 0, "activation_function": "swish"}
    form = {"attn_implementation": "eager", "forced_eos_token_id": None}
    config = transformers.MarianConfig(**{**sizes, **more, **tokens, **form, **changes})
    theirs = randomized(transformers.MarianMTModel(config), deviation)
    for stack in (theirs.model.encoder, theirs.model.decoder):
        with torch.no_grad():
            stack.embed_positions.weight.copy_(stack.embed_positions.create_weight())
    return theirs


def marian_logits(theirs, target):
    source = torch.from_numpy(MARIAN_SOURCE).long()
    return theirs(
        input_ids=source, attention_mask=source != 39, decoder_input_ids=torch.from_numpy(target).long()
    ).logits


@pytest.mark.parametrize(
    ("changes", "ours"),
    [
        ({}, {}),
        ({"activation_function": "relu"}, {"activation": "relu"}),
        ({"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False}, {"tied": False}),
    ],
    ids=["swish", "relu", "untied"],
)
def test_marian_gives_the_same_outputs_and_gradients(changes, ours, transformers):
    """The target begins with another token than padding, whose row gets no gradient of its look-up there."""
    theirs, model = marian_of(transformers, **changes), replace(MARIAN, **ours)
    target = np.where(TARGET == 0, 1, TARGET % 39)
    batch = {"source": MARIAN_SOURCE, "target": target}
    check(model, theirs, "transformers", batch, marian_logits(theirs, target))
    assert family_of(model).objections(model, theirs.config.to_dict()) == []


def test_translations_are_those_of_marian(transformers):
    """Sixteen likeliest tokens, one for one, behind the padding, which begins a target."""
    theirs = marian_of(transformers, deviation=0.1, tie_word_embeddings=False, share_encoder_decoder_embeddings=False)
    with torch.no_grad():  # so that a token depends on the one before
        theirs.model.decoder.embed_tokens.weight *= 8
        theirs.final_logits_bias *= 0
    model = replace(MARIAN, tied=False)
    params, _ = imported(model, state_of(theirs), "transformers")
    source = torch.from_numpy(MARIAN_SOURCE).long()
    theirs.generation_config.eos_token_id = None
    known = theirs.generate(
        source, attention_mask=(source != 39).long(), max_new_tokens=16, do_sample=False, num_beams=1
    )
    batch = {"source": MARIAN_SOURCE}
    told = jax.jit(lambda params: model.translate_greedily(params, batch, start=39, end=-1, length=16))(params)
    np.testing.assert_array_equal(told, known[:, 1:].numpy())
    assert len(np.unique(told)) > 4


def test_what_marian_does_not_have_is_refused_by_name():
    other = Transformer(40, features=16, hidden=24, heads=2, encoder_layers=1, decoder_layers=1)
    with pytest.raises(WeightsError) as refused:
        small_state(other)
    for line in ("norm='pre', and theirs is 'post'", "attention_bias=False, and theirs", "waves='authors', and theirs"):
        assert line in str(refused.value)
    config = {"scale_embedding": False, "activation_function": "tanh", "normalize_before": True, "pad_token_id": 7}
    assert family_of(MARIAN).objections(MARIAN, config) == [
        "pad_token_id is 7 there, and 39 here (model.pad)",
        "scale_embedding is False there, and True here (always)",
        "normalize_before is True there, and False here (model.norm)",
        "activation_function is 'tanh' there, and 'silu' here (model.activation)",
    ]


class ReferenceDlrm(torch.nn.Module):
    """The layers of the authors' network under their names, with one id a field."""

    def __init__(self, model):
        super().__init__()
        self.emb_l = torch.nn.ModuleList([torch.nn.Embedding(n, model.features) for n in model.rows])
        self.bot_l = self.mlp([model.dense, *model.bottom, model.features], torch.nn.ReLU())
        pairs = (len(model.rows) + 1) * len(model.rows) // 2
        self.top_l = self.mlp([model.features + pairs, *model.top, 1], torch.nn.Sigmoid())

    @staticmethod
    def mlp(sizes, last):
        layers = []
        for below, above in itertools.pairwise(sizes):
            layers += [torch.nn.Linear(below, above), torch.nn.ReLU()]
        return torch.nn.Sequential(*layers[:-1], last)

    def forward(self, dense, ids):
        x = self.bot_l(dense)
        vectors = torch.stack([x, *(table(ids[:, k]) for k, table in enumerate(self.emb_l))], 1)
        products = vectors @ vectors.transpose(1, 2)
        pairs = [products[:, i, j] for i in range(vectors.shape[1]) for j in range(i)]
        return self.top_l[:-1](torch.cat([x, torch.stack(pairs, 1)], 1))[:, 0]


@pytest.mark.parametrize(
    "changes", [{}, {"interaction": DotInteraction("masked")}, {"tables": "table"}, {"tables": "row"}]
)
def test_dlrm_gives_the_same_outputs_and_gradients(changes):
    from multipod.models.dlrm_tables import TablePlacement

    changes = {k: TablePlacement(v, parts=2) if k == "tables" else v for k, v in changes.items()}
    model = Dlrm((5, 8, 3), features=4, dense=6, bottom=(8,), top=(7, 5), **changes)
    theirs = randomized(ReferenceDlrm(model), 0.5)
    dense, ids = RANDOM.normal(size=(6, 6)).astype(np.float32), RANDOM.integers(0, 3, (6, 3)).astype(np.int32)
    expected = theirs(torch.from_numpy(dense), torch.from_numpy(ids).long())
    check(model, theirs, "dlrm", {"dense": dense, "ids": ids}, expected)


def test_a_dlrm_with_a_cross_network_is_refused():
    model = Dlrm((5, 8, 3), features=4, dense=6, bottom=(8,), top=(7, 5), interaction=CrossInteraction(1, 2))
    with pytest.raises(WeightsError, match=r"this one has a cross network.* Convert a model of interaction=dot"):
        small_state(model)


# What does not fit, files, and the way of a run.

SMALL = replace(BERT, layers=1, features=8, hidden=8, heads=2, vocab=12)


def small_state(model=SMALL):
    params, statistics = model.init(KEY)
    return to_theirs(family_of(model), model, params, statistics)


def test_all_that_does_not_fit_is_listed_with_the_nearest():
    state = small_state()
    state["bert.pooler.dens.weight"] = state.pop("bert.pooler.dense.weight")
    state["cls.predictions.bias"] = np.zeros(13, np.float32)
    state["bert.encoder.layer.1.output.dense.bias"] = np.zeros(8, np.float32)
    with pytest.raises(WeightsError) as error:
        imported(SMALL, state, "transformers")
    lines = str(error.value).splitlines()
    assert lines[0] == "Bert: 4 tensors of transformers's do not fit:"
    assert lines[1:5] == [
        "  bert.pooler.dense.weight: missing, for our pooler/kernel (nearest: bert.pooler.dens.weight)",
        "  cls.predictions.bias: (13,), and the model needs (12,)",
        "  bert.pooler.dens.weight: the model has no place for it (nearest: bert.pooler.dense.weight)",
        "  bert.encoder.layer.1.output.dense.bias: the model has no place for it",
    ]
    params, _ = to_ours(
        family_of(SMALL), SMALL, state, *SMALL.init(KEY), fresh=["pooler/*", "token_bias"],
        without=["bert.pooler.*", "cls.predictions.bias", "bert.encoder.layer.1.*"],
    )  # fmt: skip
    assert params["token_bias"].shape == (12,)


def test_a_configuration_that_computes_otherwise_is_told():
    family = family_of(SMALL)
    assert family.objections(SMALL, family.config(SMALL)) == []
    assert family.objections(SMALL, {"num_attention_heads": 4, "hidden_act": "gelu"}) == [
        "num_attention_heads is 4 there, and 2 here"
    ]
    for model in (MARIAN, SWITCH, t5_like(**TEXT), t5_like(**TEXT, dense_gated=False, activation="relu", tied=True)):
        assert family_of(model).objections(model, family_of(model).config(model)) == []
    wrong = family_of(SWITCH).objections(replace(SWITCH, tied=False, scaled_attention=True), {"dense_act_fn": "relu"})
    assert wrong == [
        "tie_word_embeddings is True there, and False here (model.tied)",
        "scaled attention is False there, and True here (model.scaled_attention)",
    ]


def test_a_model_without_a_table_and_a_library_without_the_model_are_told():
    with pytest.raises(WeightsError, match=r"no table of names .* a str\. There are tables for Bert, Dlrm"):
        family_of("")
    with pytest.raises(WeightsError, match=r"^timm has no Bert\. Known: transformers\.$"):
        family_of(BERT, library="timm")


def test_weights_are_read_from_files_folders_parts_and_pickles(tmp_path):
    state = small_state()
    (file,) = write_weights(tmp_path / "one.safetensors", state, {})
    assert_equal(read_weights(file).tensors, state)
    files = write_weights(tmp_path / "folder", state, {"model_type": "bert"})
    assert [one.name for one in files] == ["model.safetensors", "config.json"]
    assert read_weights(tmp_path / "folder").config == {"model_type": "bert"}
    parts = tmp_path / "parts"
    names = sorted(state)
    write_weights(parts / "model-1.safetensors", {name: state[name] for name in names[::2]}, {})
    write_weights(parts / "model-2.safetensors", {name: state[name] for name in names[1::2]}, {})
    where = {name: f"model-{1 + k % 2}.safetensors" for k, name in enumerate(names)}
    (parts / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    assert_equal(read_weights(parts).tensors, state)
    wrapped = {"state_dict": {f"module.{name}": torch.tensor(array) for name, array in state.items()}, "epoch": 3}
    torch.save(wrapped, tmp_path / "two.pth")
    assert_equal(read_weights(tmp_path / "two.pth").tensors, state)
    torch.save({"a": torch.ones(2, dtype=torch.bfloat16)}, tmp_path / "three.pt")
    assert read_weights(tmp_path / "three.pt").tensors["a"].astype(np.float32).tolist() == [1, 1]


def assert_equal(found, state):
    assert {*found} == {*state}
    assert all(np.array_equal(found[name], state[name]) for name in state)


def test_files_that_cannot_be_read_are_told(tmp_path):
    torch.save({"model": torch.nn.Linear(2, 2)}, tmp_path / "whole.pt")
    with pytest.raises(WeightsError, match="holds more than tensors, or is damaged"):
        read_weights(tmp_path / "whole.pt")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(WeightsError, match="is damaged"):
        read_weights(tmp_path / "bad.safetensors")
    with pytest.raises(WeightsError, match="no such file or folder"):
        read_weights(tmp_path / "nothing.pt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(WeightsError, match="has no weights"):
        read_weights(tmp_path / "empty")
    index = tmp_path / "empty" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(WeightsError, match=r"parts that are not there: gone\.safetensors"):
        read_weights(tmp_path / "empty")
    with pytest.raises(WeightsError, match=r"written as \.safetensors"):
        write_weights(tmp_path / "x.pt", {}, {})


def test_the_hub_is_read_from_its_cache_where_there_is_no_network(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub import constants

    cache, commit = tmp_path / "models--our--bert", "0" * 40
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text(commit)
    write_weights(cache / "snapshots" / commit, small_state(), {"model_type": "bert"})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.HfApi, "list_repo_files", offline)
    assert_equal(read_weights("hf:our/bert").tensors, small_state())
    with pytest.raises(WeightsError, match="hf:our/gpt cannot be fetched and is not in the cache of the hub: offline"):
        read_weights("hf:our/gpt")


def offline(self, **options):
    raise ConnectionError("offline.")


@pytest.mark.parametrize("kind", ["bert", "t5", "switch", "marian", "untied marian"])
def test_transformers_loads_an_exported_folder_bit_for_bit(kind, tmp_path, transformers):
    model, name = {
        "bert": (BERT, "BertForPreTraining"),
        "t5": (t5_like(**TEXT), "T5ForConditionalGeneration"),
        "switch": (SWITCH, "SwitchTransformersForConditionalGeneration"),
        "marian": (MARIAN, "MarianMTModel"),
        "untied marian": (replace(MARIAN, tied=False, activation="gelu_tanh"), "MarianMTModel"),
    }[kind]
    family, (params, statistics) = family_of(model), model.init(KEY)
    state = to_theirs(family, model, params, statistics)
    write_weights(tmp_path / "out", state, family.config(model))
    theirs, report = getattr(transformers, name).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found = theirs.state_dict()
    assert [name for name, array in state.items() if not np.array_equal(found[name], array)] == []
