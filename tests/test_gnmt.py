"""GNMT: published counts, PyTorch's LSTMs, its gradient, its search."""

import math
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from published_data import pairs, write_pairs

from multipod import runs
from multipod.data.text.grammar import Grammar
from multipod.mlperf.lines import FILE, read_lines
from multipod.models.gnmt import Gnmt, small_gnmt
from multipod.nn.dims import dims_of
from multipod.nn.merge import merge_model
from multipod.nn.text.beam_search import length_penalty
from multipod.nn.text.lstm import Lstm, LstmState, zero_state
from multipod.recipe.override import override
from multipod.recipes.find import load

FORMS = ("reference", "google")


def tiny(form: str, **changes) -> Gnmt:
    return small_gnmt(17, **{"features": 8, "layers": 4, "form": form, **changes})


def parameters(model):
    """Parameters of which none is zero, so that every one of them is seen."""
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    rng = np.random.default_rng(0)
    return {path: np.float32(0.4 * rng.normal(size=leaf.shape) + (leaf.shape == ())) for path, leaf in shapes.items()}


def sentences():
    rng = np.random.default_rng(1)
    source, target = rng.integers(3, 17, (3, 7)), rng.integers(3, 17, (3, 5))
    source[1, 4:] = 0
    source[2, 2:] = 0
    target[:, 0] = 1
    return {"source": source, "target": target}


def logits(model, params, batch):
    run = jax.jit(lambda params, batch: model.apply(params, {}, batch, train=False, key=jax.random.key(0))[0])
    return run(params, batch)


@pytest.mark.parametrize(("form", "count"), [("reference", 160_671_297), ("google", 164_796_417)])
def test_parameters_are_as_many_as_published(form, count):
    """NVIDIA's log of v0.6 prints the first."""
    model = Gnmt(form=form)
    shapes, _ = jax.eval_shape(model.init, jax.random.key(0))
    assert sum(math.prod(leaf.shape) for leaf in shapes.values()) == count
    named = dims_of(model)
    assert {path: len(named.get(path, ())) for path in shapes} == {path: leaf.ndim for path, leaf in shapes.items()}


@pytest.mark.parametrize("form", FORMS)
def test_logits_and_gradients_are_those_of_torch(form):
    torch = pytest.importorskip("torch")
    model = tiny(form)
    params, batch = parameters(model), sentences()
    theirs = {path: torch.tensor(value, requires_grad=True) for path, value in params.items()}
    expected = torch_gnmt(torch, theirs, batch, form)
    assert np.abs(logits(model, params, batch) - expected.detach().numpy()).max() < 1e-5
    weight = np.random.default_rng(2).normal(size=expected.shape).astype(np.float32)
    (expected * torch.tensor(weight)).sum().backward()
    gradients = jax.grad(lambda params: (logits(model, params, batch) * weight).sum())(params)
    for path, gradient in gradients.items():
        reference = theirs[path].grad.numpy()
        assert np.abs(gradient - reference).max() < 1e-4 * max(1, np.abs(reference).max()), path


def torch_gnmt(torch, p, batch, form):
    """The model written with `torch.nn.LSTMCell`s, a step and a sentence at a time where that is simplest."""
    functional = torch.nn.functional

    def run(name, x):
        """One sentence [time, inputs] through PyTorch's own LSTM."""
        inputs, features = p[f"{name}/kernel"].shape[0], p[f"{name}/recurrent"].shape[0]
        layer = torch.nn.LSTM(inputs, features)
        zeros = torch.zeros(4 * features)
        weights = {
            "weight_ih_l0": p[f"{name}/kernel"].T,
            "weight_hh_l0": p[f"{name}/recurrent"].T,
            "bias_ih_l0": p[f"{name}/bias"],
            "bias_hh_l0": p.get(f"{name}/recurrent_bias", zeros),
        }
        return torch.func.functional_call(layer, weights, (x,))[0]

    def attend(query, encoded):
        keys = encoded @ p["attention/key/kernel"]
        vector = p["attention/gain"] * p["attention/vector"] / p["attention/vector"].norm()
        inside = torch.tanh(query @ p["attention/query/kernel"] + keys + p["attention/bias"])
        return functional.softmax(inside @ vector, 0) @ encoded

    def first_with_context(x, encoded):
        name, features = "decoder/0", p["decoder/0/recurrent"].shape[0]
        layer = torch.nn.LSTMCell(2 * features, features)
        zeros = torch.zeros(4 * features)
        state, context, outputs = None, torch.zeros(features), []
        weights = {
            "weight_ih": p[f"{name}/kernel"].T,
            "weight_hh": p[f"{name}/recurrent"].T,
            "bias_ih": p[f"{name}/bias"],
            "bias_hh": zeros,
        }
        for token in x:
            given = (torch.cat([token, context]),) if state is None else (torch.cat([token, context]), state)
            state = torch.func.functional_call(layer, weights, given)
            context = attend(state[0], encoded)
            outputs.append((state[0], context))
        return [torch.stack(each) for each in zip(*outputs, strict=True)]

    rows = []
    for source, target in zip(batch["source"], batch["target"], strict=True):
        x = p["embedding/table"][torch.tensor(source[source != 0])]
        x = torch.cat([run("encoder/0", x), run("backward", x.flip(0)).flip(0)], 1)
        x = run("encoder/1", x)
        for number in (2, 3):
            x = x + run(f"encoder/{number}", x)
        encoded, x = x, p["embedding/table"][torch.tensor(target)]
        if form == "reference":
            x = run("decoder/0", x)
            context = torch.stack([attend(query, encoded) for query in x])
        else:
            x, context = first_with_context(x, encoded)
        x = run("decoder/1", torch.cat([x, context], 1))
        for number in (2, 3):
            x = x + run(f"decoder/{number}", torch.cat([x, context], 1))
        rows.append(x @ p["scores/kernel"] + p.get("scores/bias", torch.zeros(1)))
    return torch.stack(rows)


@pytest.mark.slow
def test_an_lstm_is_its_loop_and_its_gradient_the_loops():
    """The derivative that is written by hand, against JAX's of one step after the other; masked and reversed too."""
    layer = Lstm(3, 4, init=jax.nn.initializers.normal(0.5), rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    x = jax.random.normal(jax.random.key(1), (2, 6, 3))
    mask = jnp.array([[1] * 6, [1] * 4 + [0] * 2], bool)
    weight = jax.random.normal(jax.random.key(2), (2, 6, 4))

    def whole(state, x, reverse):
        return (nnx.merge(graph, state)(x, mask, reverse=reverse) * weight).sum()

    def stepwise(state, x, reverse):
        module, total = nnx.merge(graph, state), 0.0
        carry = zero_state(2, 4)
        for time in reversed(range(6)) if reverse else range(6):
            after = module.step(x[:, time], carry)
            carry = LstmState(*(each * mask[:, time, None] for each in after))
            total += (carry.hidden * weight[:, time]).sum()
        return total

    for reverse in (False, True):
        ours, gradients = jax.value_and_grad(whole, (0, 1))(state, x, reverse)
        expected, theirs = jax.value_and_grad(stepwise, (0, 1))(state, x, reverse)
        np.testing.assert_allclose(ours, expected, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradients, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_search_scores_as_the_whole_model_does(form):
    """Token by token as all at once: log-probability over the length penalty, and the coverage of the source."""
    model = tiny(form)
    params, batch = parameters(model), sentences()
    for coverage in (0.0, 0.1):
        search = lambda params: model.translate(params, batch, start=1, end=2, length=6, coverage=coverage)  # noqa: B023, E731
        found = jax.jit(search)(params)
        for row in range(3):
            tokens = [int(token) for token in found.tokens[row, 0]]
            tokens = tokens[: tokens.index(2) + 1] if 2 in tokens else tokens
            read = {"source": batch["source"][row : row + 1], "target": np.array([[1, *tokens[:-1]]])}
            logs = jax.nn.log_softmax(logits(model, params, read))[0]
            score = sum(logs[place, token] for place, token in enumerate(tokens)) / length_penalty(len(tokens), 0.6)
            if 2 in tokens and coverage:
                score += coverage * covered(model, params, read)
            np.testing.assert_allclose(found.scores[row, 0], score, rtol=1e-4)


def covered(model, params, batch):
    """The sum over source tokens of ln(min(attention, 1)), from the decoder's own steps."""
    module = merge_model(model, params)
    memory = module.encode(batch["source"])
    cache = module.first(1, memory)
    for token in batch["target"][0]:
        _, cache = module.step(jnp.array([token]), cache, memory)
    attended = np.asarray(cache.attended)[np.asarray(memory.mask)]
    assert abs(attended.sum() - batch["target"].shape[1]) < 1e-4
    return np.log(np.minimum(attended, 1)).sum()


def test_a_grammar_says_the_same_in_german():
    data = Grammar(train_pairs=300, test_pairs=20)
    train, test = data.train(), data.test()
    read = lambda source, numbers: [  # noqa: E731
        tuple(map(data.decode, row)) for row in zip(*itemgetter("source", "label")(source.read(numbers)), strict=True)
    ]
    learnt, judged = read(train, np.arange(300)), read(test, np.arange(20))
    assert len({*learnt, *judged}) == 320
    assert ("a house has heard the sheep.", "ein Haus hat das Schaf gehört.") in learnt + judged
    late = [german for english, german in learnt if " that " in english and " has " in english]
    assert late
    assert all(german.endswith(" hat.") for german in late)
    assert train.sized_for(np.arange(300)).chosen == (20, 20)
    small = np.flatnonzero(np.maximum(train.source.lengths, train.label.lengths) <= 10)
    assert train.sized_for(small).chosen == (10, 10)
    batch = test.read(np.arange(2))
    start, end = data.marks()
    assert (batch["target"][:, 0] == start).all()
    assert ((batch["label"] == end).sum(1) == 1).all()


@pytest.mark.slow
def test_the_recipe_is_the_references_model_and_trains_on_pairs_of_like_lengths(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    pytest.importorskip("sacrebleu")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = load("gnmt")
    params, _ = jax.eval_shape(recipe.model.init, jax.random.key(0))
    assert sum(leaf.size for leaf in params.values()) == 160_671_297
    assert recipe.updates == 10 * recipe.evaluate_every
    files = [f"data.{part}_files={write_pairs(tmp_path, part, pairs(24, 2))}" for part in ("train", "test")]
    small = ["model.features=16", "model.layers=2", "model.vocab=320", "data.vocab=320", "data.length=32"]
    small += ["data.buckets=32,", "batch=8", "updates=2", "evaluate_every=2", "evaluation_batch=8"]
    small += ["objective.beam=2", "objective.extra=2", "checkpoint_every=0", "layout.mesh=1x1", "target="]
    changed = override(recipe, [*files, *small])
    folder = tmp_path / "run"
    runs.train(changed, out=folder, log=["mlperf"])
    said = {line.key: line.value for line in read_lines(folder / FILE)}
    assert (said["submission_benchmark"], said["max_sequence_length"]) == ("gnmt", 32)
    assert said["eval_samples"] == 24
    assert 0 <= said["eval_accuracy"] < 1
