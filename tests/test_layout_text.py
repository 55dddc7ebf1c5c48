"""Layouts as text: what `--layout` takes, and what a run says of itself."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multipod.errors import LayoutError, RecipeError
from multipod.layout.layout import Layout
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.layout.sync import Sync
from multipod.layout.text import layout_changes, layout_help, spelled
from multipod.recipe.override import override
from multipod.recipes.digits import digits

SIZES = st.integers(1, 8)


def laid(text):
    return override(digits(), layout_changes(text)).layout


def test_words_in_any_order_become_fields():
    layout = laid("gather=bfloat16,data=2x4,update,model=2,spatial=2x2,buckets=4MB,sum=ring,wire=bfloat16,tile=2x4")
    assert layout == Layout(
        (2, 4),
        split=ModelSplit(spatial=(2, 2), model=2),
        sync=Sync("ring", "zero1", gather_dtype="bfloat16", sum_dtype="bfloat16", bucket_bytes=4_000_000),
        replica_shape=(2, 4),
    )
    assert laid("data=-1,model=2").mesh == ()
    assert laid("update=false").sync.sharding == "none"
    assert laid("buckets=500KB").sync.bucket_bytes == 500_000


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("dp=2x2,tp=4,zero1", "data=2x2,model=4,update"),
        ("fsdp,ep=4,sp=2", "weights,expert=4,spatial=2"),
        ("pp=2,schedule=gpipe", "stage=2,schedule=gpipe"),
    ],
)
def test_the_fields_words_mean_what_ours_mean(theirs, ours):
    assert laid(theirs) == laid(ours)
    assert all(word.partition("=")[0] in layout_help() for word in f"{theirs},{ours}".split(","))


def test_fields_have_flat_names_and_paths():
    flat = ["layout.model=2", "layout.shard_weights=true", "layout.stage=1", "layout.tile=1x2"]
    nested = ["layout.split.model=2", "layout.sync.sharding=fsdp", "layout.replica_shape=1x2"]
    assert override(digits(), flat) == override(digits(), nested)
    staged = override(digits(), ["layout.pipeline.stages=2", "layout.pipeline.micro_batches=4"])
    assert staged.layout.pipeline == PipelineSplit(2, micro_batches=4)
    assert override(staged, ["layout.stage=1"]) == digits()
    with pytest.raises(LayoutError, match=r"layout.chunks=7 without a pipeline: there are no stages"):
        override(digits(), ["layout.chunks=7"])
    with pytest.raises(LayoutError, match=r"layout.chunks=7: 1f1b has one part of the model on each device"):
        override(digits(), ["layout.chunks=7", "layout.stage=2"])
    with pytest.raises(RecipeError, match=r"no field 'layout.split.modle'"):
        override(digits(), ["layout.split.modle=2"])


@settings(max_examples=40, deadline=None)
@given(mesh=st.tuples(SIZES, SIZES), model=SIZES, spatial=st.sampled_from([(), (2,), (2, 4)]), update=st.booleans())
def test_what_is_spelled_is_read_again(mesh, model, spatial, update):
    layout = Layout(
        mesh, split=ModelSplit(spatial=spatial, model=model), sync=Sync("ring", sharding="zero1" if update else "none")
    )
    assert laid(spelled(layout)) == layout


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("modle=2", "no 'modle' in a layout. Nearest: model."),
        ("buckets=lots", "buckets='lots' is no number of bytes. Write 4MB"),
        ("gather=bfloat16", "nothing is gathered"),
        ("data=", "'data' has no value"),
        ("tp", "'tp' has no value"),
        ("zero1=", "'zero1' has no value"),
    ],
)
def test_what_means_nothing_is_refused(text, words):
    with pytest.raises(LayoutError, match=words):
        laid(text)
