"""One of two JAX processes of `test_metric_processes.py`: prints, as JSON, what it is told of the whole evaluation.

python metric_ranks.py PORT RANK
"""

import json
import sys

import numpy as np

from multipod import runtime

runtime.prepare(cpu_devices=2)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from multipod.errors import MetricError  # noqa: E402
from multipod.layout.axes import DATA_AXES  # noqa: E402
from multipod.layout.layout import Layout  # noqa: E402
from multipod.layout.mesh import make_mesh  # noqa: E402
from multipod.metrics.hosts import gather_parts  # noqa: E402
from multipod.metrics.jax_processes import JaxProcesses  # noqa: E402
from multipod.metrics.ranking import auc  # noqa: E402
from multipod.metrics.scores import ScoreBuffer, buffered_auc, record_scores, score_buffer  # noqa: E402

LABELS = np.arange(40) % 3 == 0
SCORES = np.sin(np.arange(40)).astype(np.float32)
STEPS, ROWS = 5, 8


def buffered(hosts: JaxProcesses) -> float:
    """The area from a buffer whose rows lie on the devices of both processes."""
    mesh = make_mesh(Layout((2, 2)))
    columns = NamedSharding(mesh, PartitionSpec(None, DATA_AXES))
    whole = NamedSharding(mesh, PartitionSpec())
    placed = ScoreBuffer(columns, columns, whole)
    buffer = jax.jit(lambda: score_buffer(STEPS, ROWS), out_shardings=placed)()
    record = jax.jit(record_scores, out_shardings=placed)
    row = NamedSharding(mesh, PartitionSpec(DATA_AXES))

    def spread(step: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(step.shape, row, lambda index: step[index])

    for scores, labels in zip(SCORES.reshape(STEPS, ROWS), LABELS.reshape(STEPS, ROWS), strict=True):
        buffer = record(buffer, spread(scores), spread(labels))
    return buffered_auc(buffer, hosts)


def refusal(hosts: JaxProcesses) -> str:
    """What both are told when the second has a NaN."""
    scores = np.array([1.0, np.nan if hosts.index else 2.0])
    try:
        auc([0, 1], scores, hosts=hosts)
    except MetricError as error:
        return str(error)
    return ""


def main() -> None:
    port, rank = sys.argv[1:]
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
    hosts = JaxProcesses()
    cut = slice(0, 7) if hosts.index == 0 else slice(7, 40)
    said = {
        "rank": hosts.index,
        "labels": LABELS.tolist(),
        "scores": SCORES.tolist(),
        "parts": gather_parts(lambda: [hosts.index] * (3 * hosts.index), list[int], hosts),
        "auc": auc(LABELS[cut], SCORES[cut], hosts=hosts),
        "buffered": buffered(hosts),
        "refusal": refusal(hosts),
    }
    assert jnp.zeros(()).dtype == jnp.float32  # 64 bits are off, as in a run
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
