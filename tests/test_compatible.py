"""What goes with what: the table against the errors, and against the page that is printed from it."""

from pathlib import Path

import pytest

from multipod.errors import LayoutError
from multipod.layout.compatible import CONFLICTS, FEATURES, LayoutUse, check_compatible, conflicts, ruled_out
from multipod.layout.fields import from_fields
from multipod.layout.matrix import page
from multipod.layout.split import ModelSplit, PipelineSplit
from multipod.layout.sync import Sync

PAGE = Path(__file__).parent.parent / "docs" / "layouts-matrix.md"

EXAMPLES = {
    "spatial": {"split": ModelSplit(spatial=(2,))},
    "model": {"split": ModelSplit(model=2)},
    "expert": {"split": ModelSplit(expert=2)},
    "pipeline": {"pipeline": PipelineSplit(2)},
    "synchronous": {"pipeline": PipelineSplit(2)},
    "asynchronous": {"pipeline": PipelineSplit(2, "pipemare")},
    "unsharded": {},
    "zero1": {"sync": Sync(sharding="zero1")},
    "fsdp": {"sync": Sync(sharding="fsdp")},
    "sum": {},
    "not xla": {"sync": Sync("ring")},
    "adasum": {"sync": Sync("adasum-gradients")},
    "local state": {"sync": Sync("adasum")},
    "adasum-rows": {"sync": Sync("adasum-rows")},
    "report": {"sync": Sync("adasum", report_orthogonality=True)},
    "gather": {"sync": Sync(sharding="zero1", gather_dtype="bfloat16")},
    "wire": {"sync": Sync(sum_dtype="bfloat16")},
    "buckets": {"sync": Sync(bucket_bytes=1)},
    "failed": {"failed": ((0, 0),)},
    "accumulate": {"accumulate": 2},
    "clip": {"clip": 1.0},
    "clip before": {"clip_before_sum": True},
    "sparse": {"sparse": True},
    "bad updates": {"bad_updates": "skip"},
    "warmup": {"late_warmup": 2},
    "layer decay": {"layer_decay": 0.8},
    "ema": {"ema": True},
    "batch norm": {"batch_norm": True},
    "survive": {"survives": True},
    "convert": {"converts": True},
}


@pytest.mark.parametrize("name", FEATURES)
def test_a_feature_is_seen_where_it_is(name):
    assert FEATURES[name].setting(LayoutUse(**EXAMPLES[name]))
    assert FEATURES[name].plain == bool(FEATURES[name].setting(LayoutUse()))


def test_every_row_names_features_and_says_what_to_do():
    for conflict in CONFLICTS:
        assert {*conflict.these, *conflict.those} <= FEATURES.keys()
        assert not conflict.reason.endswith(".")
        assert conflict.remedy.endswith(".")
    assert conflicts(LayoutUse()) == ()


def test_all_that_does_not_go_together_is_said_at_once():
    wrong = LayoutUse(pipeline=PipelineSplit(2), sync=Sync(sharding="fsdp"), accumulate=2, survives=True)
    with pytest.raises(LayoutError) as error:
        check_compatible(wrong)
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == [
        "layout.stage=2 with layout.shard_weights=true",
        "layout.stage=2 with accumulate=2",
        "--survive with layout.stage=2",
    ]
    with pytest.raises(LayoutError, match="nothing is gathered"):
        from_fields({"gather_dtype": "bfloat16"})


def test_what_a_layout_rules_out():
    assert list(ruled_out(LayoutUse())) == []
    found = list(ruled_out(LayoutUse(sync=Sync(sharding="fsdp"))))
    assert ("layout.shard_weights=true", "clipping on each device") in found


def test_the_page_is_printed_from_the_table():
    """`python -m multipod.layout.matrix > docs/layouts-matrix.md` writes it."""
    assert PAGE.read_text() == page()
