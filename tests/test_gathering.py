"""What hosts exchange for an evaluation: typed values, of which none can be code."""

import pickle
from dataclasses import asdict

import numpy as np
import pytest
from fake_hosts import ThreadHost, on_hosts

from multipod.errors import MetricError
from multipod.metrics.bleu import BleuCounts
from multipod.metrics.coco import Detections
from multipod.metrics.hosts import gather_parts
from multipod.metrics.ranking import PackedScores

MASK = {"size": [4, 5], "counts": b"0\xff01"}
PARTS = [
    (BleuCounts, BleuCounts((1, 2, 3, 4), (5, 6, 7, 8), 9, 10, 11)),
    (PackedScores, PackedScores(np.array([3, 1 << 63], np.uint64), 1)),
    (
        Detections,
        Detections(np.arange(2), np.ones((2, 4), np.float32), np.array([0.5, 0.1]), np.arange(2), (MASK,) * 2),
    ),
    (list[tuple[int, str, str]], [(3, "told", "wänted"), (np.int64(4), "", "")]),
    (dict[int, dict[str, dict[str, float]]], {7: {"box": {"AP": 0.25, "AP50": float("nan")}}}),
    (np.ndarray, np.zeros((0, 3), np.int8)),
]


@pytest.mark.parametrize(("kind", "value"), PARTS)
def test_what_arrives_is_what_was_sent(kind, value):
    for got in on_hosts(2, lambda host: gather_parts(lambda: value, kind, host)):
        assert len(got) == 2
        for part in got:
            assert type(part) is type(value)
            np.testing.assert_equal(_fields(part), _fields(value))


def _fields(value):
    return asdict(value) if hasattr(value, "__dataclass_fields__") else value


class Harmful:
    """Calls a function of the sender's choice where it is unpickled."""

    called = False

    def __reduce__(self):
        return setattr, (Harmful, "called", True)


@pytest.mark.parametrize(
    "sent", [pickle.dumps((True, Harmful())), b"\0" + pickle.dumps(Harmful()), b"\0", b"\0\x93\xa2|O\x90\xc4\x00"]
)
def test_what_is_something_else_is_refused_and_never_run(sent):
    class Lying(ThreadHost):
        def gather(self, message: bytes) -> list[bytes]:
            return super().gather(sent if self.index else message)

    def ask(host: ThreadHost) -> list[np.ndarray]:
        return gather_parts(lambda: np.ones(2), np.ndarray, Lying(host.index, host.room))

    for error in on_hosts(2, ask):
        assert isinstance(error, MetricError)
        assert str(error).startswith("rank 1")
    assert not Harmful.called


def test_objects_are_not_sent():
    with pytest.raises(TypeError, match="object is nothing that hosts exchange"):
        raise on_hosts(1 + 1, lambda host: gather_parts(object, object, host))[0]
