"""Layouts as text: what `--layout` takes, and what a run says of itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.errors import LayoutError
from multipod.layout.layout import Layout
from multipod.layout.text import layout_changes, spelled
from multipod.recipe.override import override
from multipod.recipes.digits import digits

SIZES = st.integers(1, 8)


def laid(text):
    return override(digits(), layout_changes(text)).layout


def test_words_in_any_order_become_fields():
    layout = laid("gather=bfloat16,data=2x4,update,model=2,spatial=2x2,buckets=4MB,sum=ring,wire=bfloat16,tile=2x4")
    assert layout == Layout(
        (2, 4), "ring", True, spatial=(2, 2), model=2, tile=(2, 4),
        gather_dtype="bfloat16", sum_dtype="bfloat16", bucket_bytes=4_000_000,
    )  # fmt: skip
    assert laid("data=-1,model=2").mesh == ()
    assert laid("update=false").shard_update is False
    assert laid("buckets=500KB").bucket_bytes == 500_000


@settings(max_examples=40, deadline=None)
@given(mesh=st.tuples(SIZES, SIZES), model=SIZES, spatial=st.sampled_from([(), (2,), (2, 4)]), update=st.booleans())
def test_what_is_spelled_is_read_again(mesh, model, spatial, update):
    layout = Layout(mesh, "ring", update, model=model, spatial=spatial)
    assert laid(spelled(layout)) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle=2", "no 'modle' in a layout. Nearest: model."),
        ("buckets=lots", "buckets='lots' is no number of bytes. Write 4MB"),
        ("gather=bfloat16", "nothing is gathered"),
    ],
)
def test_what_means_nothing_is_refused(text, words):
    with pytest.raises(LayoutError, match=words):
        laid(text)
