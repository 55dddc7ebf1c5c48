"""Cuts of models into pipeline stages: the balance against every cut there is, and what is refused."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multipod.errors import LayoutError, ScheduleError
from multipod.layout.stages import Layer, as_asked, balanced, check_cut, equal, of_part, tied_places
from multipod.pipelines.build import one_f_one_b, pipemare


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_no_cut_has_a_cheaper_costliest_part(costs, data):
    parts = data.draw(st.integers(1, len(costs)))
    layers = [Layer(str(n), cost) for n, cost in enumerate(costs)]
    cut = balanced(layers, parts)
    assert all(cut.parts)
    assert [layer for part in cut.parts for layer in part] == layers
    known = min(
        max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *inner, len(costs))))
        for inner in itertools.combinations(range(1, len(costs)), parts - 1)
    )
    assert max(cut.costs) == known


def test_embedding_and_head_lie_at_the_ends_and_weigh():
    layers = [Layer("embedding", 3), *(Layer(f"block {n}", 2) for n in range(6)), Layer("head", 5)]
    cut = balanced(layers, 4)
    assert (cut.parts[0][0].name, cut.parts[-1][-1].name) == ("embedding", "head")
    assert cut.costs == (5, 4, 6, 5)
    assert equal(layers, 3).starts == (0, 3, 6, 8)
    assert 0 < cut.balance <= 1


def test_a_cut_may_be_given():
    layers = [Layer(str(n), n) for n in range(5)]
    assert as_asked(layers, 3, (1, 3, 1)).starts == (0, 1, 4, 5)
    for counts in ((1, 3), (1, 2, 1), (0, 4, 1)):
        with pytest.raises(LayoutError, match=r"of a model of 5 layers. Give each part its number of layers, as 3x1x1"):
            as_asked(layers, 3, counts)


def test_tied_weights_are_found():
    layers = [
        Layer("embedding", weights=("table",)),
        Layer("block", weights=("w",)),
        Layer("head", weights=("table", "b")),
    ]
    cut = equal(layers, 3)
    assert cut.tied == {"table": (0, 2)}
    assert tied_places(cut) == (((0, "table"), (2, "table")),)
    assert of_part(cut, 2, {"table": 1, "w": 2, "b": 3}) == {"table": 1, "b": 3}
    assert check_cut(cut, one_f_one_b(3, 4), 24, data_devices=2) == 3
    with pytest.raises(ScheduleError, match=r"cannot stay equal: table \(parts 0, 2\)"):
        check_cut(cut, pipemare(3, 4), 24)


def test_what_does_not_fit_is_listed():
    with pytest.raises(LayoutError, match=r"4 stages for 3 layers: every stage needs one. Take 1 to 3 stages"):
        balanced([Layer("a")] * 3, 4)
    with pytest.raises(LayoutError, match="layers b have costs that are no numbers from 0 on"):
        equal([Layer("a"), Layer("b", float("nan"))], 2)
    normed = equal([Layer("conv"), Layer("norm", batch_statistics=True)], 2)
    with pytest.raises(LayoutError) as refused:
        check_cut(normed, one_f_one_b(2, 4), 10)
    assert "batch=10 does not divide into 4 micro-batches on 1 data devices; batch=8 or 12 does" in str(refused.value)
    assert "norm normalise over the batch: in a pipeline that is a micro-batch of 2 examples" in str(refused.value)
