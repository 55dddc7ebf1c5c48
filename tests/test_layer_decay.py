"""Rates that fall from layer to layer, against one Optax optimizer for each group."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from multipod.errors import LayoutError, RecipeError
from multipod.layout.mesh import make_mesh
from multipod.models.bert import tiny_bert
from multipod.optim.adamw import AdamW
from multipod.optim.layer_decay import layer_factors
from multipod.optim.rates import Constant
from multipod.optim.sgd import Sgd
from multipod.recipe.override import override
from multipod.recipes.find import load
from multipod.step.program import program_of


def test_the_factors_of_a_bert() -> None:
    """BEiT's exponents: heads 1, the last of two layers d, the first d^2, embeddings d^3."""
    params = jax.eval_shape(tiny_bert(300, 16).init, jax.random.key(0))[0]
    factors = layer_factors(params, 0.5)
    by_part: dict[str, set[float]] = {}
    for name, factor in factors.items():
        by_part.setdefault("/".join(name.split("/")[: 1 + name.startswith("layers")]), set()).add(factor)
    low = {key: {0.125} for key in ("tokens", "positions", "types", "embedding_norm")}
    heads = {key: {1.0} for key in ("transform", "transform_norm", "token_bias")}
    assert by_part == low | heads | {"layers/0": {0.25}, "layers/1": {0.5}}


def test_each_stack_counts_its_own_layers() -> None:
    names = ["embedding/table", "encoder/0/w", "encoder/2/w", "decoder/0/w", "scores/w"]
    assert list(layer_factors(names, 0.5).values()) == [0.5**4, 0.5**3, 0.5, 0.5, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "plain"),
    [
        (AdamW(Constant(0.1), weight_decay=0.3, layer_decay=0.8), lambda rate: optax.adamw(rate, weight_decay=0.3)),
        (Sgd(Constant(0.1), momentum=0.9, layer_decay=0.8), lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True)),
    ],
    ids=["adamw", "sgd"],
)
def test_it_is_an_optimizer_for_each_group(optimizer, plain) -> None:
    """`optax.multi_transform` with the rate of each layer written out."""
    shapes = {"tokens/table": (4, 3), "layers/0/kernel": (3, 3), "layers/1/kernel": (3, 3), "head/kernel": (3, 2)}
    keys = jax.random.split(jax.random.key(0), 5)
    params = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=False)}
    rates = dict(zip(shapes, (0.1 * 0.8**3, 0.1 * 0.8**2, 0.1 * 0.8, 0.1), strict=True))
    reference = optax.multi_transform(
        {name: plain(rate) for name, rate in rates.items()}, {name: name for name in shapes}
    )
    ours, mine, theirs = optimizer.build(10), params, params
    state, other = ours.init(params), reference.init(params)
    for number in range(3):
        key = jax.random.fold_in(keys[4], number)
        gradients = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
        changes, state = ours.update(gradients, state, mine)
        mine = optax.apply_updates(mine, changes)
        changes, other = reference.update(gradients, other, theirs)
        theirs = optax.apply_updates(theirs, changes)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), mine, theirs)
    assert all(jnp.any(mine[name] != params[name]) for name in params)


def test_it_is_a_field_of_an_optimizer_and_is_refused_in_stages() -> None:
    recipe = override(load("mlp-small"), ["optimizer.layer_decay=0.9"])
    assert recipe.optimizer.layer_decay == 0.9  # type: ignore[attr-defined]
    for wrong in ("0", "1.5"):
        with pytest.raises(RecipeError, match=r"layer_decay=.* must be above 0 and at most 1"):
            override(recipe, [f"optimizer.layer_decay={wrong}"])
    staged = override(recipe, ["layout.stage=2", "layout.mesh=1x1"])
    with pytest.raises(LayoutError, match=r"layout.stage=2 with optimizer.layer_decay=0.9: a stage cannot tell"):
        _ = program_of(staged, make_mesh(staged.layout)).shapes
