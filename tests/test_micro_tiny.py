"""MLPerf Tiny's networks, made small, through the exporter: the same int8 bytes in three runtimes."""

import shutil

import numpy as np
import pytest
from flax import nnx

from multipod.micro import Interpreter, convert
from multipod.micro.graph import to_real, to_stored

pytest.importorskip("flatbuffers")
from test_micro_export import litert, tflm
from tiny_networks import SMALL

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["keywords", "anomalies"])
def test_the_same_bytes_everywhere(name):
    network = SMALL[name].make(nnx.Rngs(0))
    examples = SMALL[name].examples(6)
    exported = convert(lambda x: network(x), examples[0], calibration=examples, report=False)
    ours = Interpreter(exported.model)
    kinds = [op.kind for op in exported.graph.ops]
    assert set(kinds) <= {"CONV_2D", "DEPTHWISE_CONV_2D", "AVERAGE_POOL_2D", "RESHAPE", "FULLY_CONNECTED", "SOFTMAX"}
    for example in examples[4:]:
        stored = to_stored(example, exported.graph.inputs[0])
        (output,) = ours.run(stored)
        np.testing.assert_array_equal(output, tflm(exported.model, stored)[0])
        # LiteRT's dense layers round ties otherwise: a step here and there, in the last of ten perhaps two
        np.testing.assert_allclose(output, litert(exported.model, stored)[0], atol=0 if name == "keywords" else 2)
        real = to_real(output, exported.graph.outputs[0])
        np.testing.assert_allclose(real, network(example), atol=0.05 * np.abs(network(example)).max())
