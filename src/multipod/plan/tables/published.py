"""Published runs: measured steps to calibrate with, and runs to predict. Every number has its source."""

from dataclasses import dataclass, replace
from typing import Any

from multipod.layout.layout import Layout
from multipod.layout.split import ModelSplit
from multipod.layout.sync import Sync
from multipod.plan.machine import Machine, find
from multipod.plan.tables.models import MODELS
from multipod.plan.workload import Workload

LOG6 = "medians of the MLPerf v0.6 result logs, Google's entries (mlcommons/training_results_v0.6); arXiv:1909.09756"

SLICES = {16: (4, 4), 64: (8, 8), 128: (16, 8), 256: (16, 16), 512: (32, 16), 1024: (32, 32)}
"""Chips to rows x columns, from the grid table in Google's MLPerf code; sides shorter than the pod's 32 are open."""


SHARDED = Layout(sync=Sync("xla", "zero1"))
"""How Google's runs lay where nothing was split: sums by XLA, updates sharded (arXiv:2011.03641)."""


HALF_SHARDED = Layout(sync=Sync("xla", "zero1", gather_dtype="bfloat16"))
"""How those lay whose gradients were summed as bfloat16: what their gathers of weights carried is not published, and
taken to be the same."""


def split_by(**axes: Any) -> Layout:
    """`SHARDED` with replicas that are split over these axes."""
    return replace(SHARDED, split=ModelSplit(**axes))


@dataclass(frozen=True)
class PublishedStep:
    """A measured step.

    Attributes:
      model: a name of `multipod.plan.tables.models.MODELS`.
      chips: of TPU v3.
      batch: examples in an update.
      layout: how it lay.
      step_ms: measured, with its share of evaluations.
      evaluate_every: updates between them.
      run_s: score of the run; 0 if not known.
      epochs: used; 0 if not known.
      norm_group: devices that shared batch norm's statistics.
    """

    model: str
    chips: int
    batch: int
    layout: Layout
    step_ms: float
    evaluate_every: float
    run_s: float = 0.0
    epochs: float = 0.0
    norm_group: int = 1

    @property
    def workload(self) -> Workload:
        """The workload of the model."""
        return MODELS[self.model]

    def machine(self, base: Machine) -> Machine:
        """The slice that it ran on, with the calibration of `base`."""
        return base.of(pod(self.chips).topology)


EXAMPLES = {"resnet50": 1_281_167, "ssd": 118_287, "maskrcnn": 118_287, "transformer": 277 * 2048, "bert": 0}
"""Training examples of an epoch: ImageNet, COCO train2017, and WMT14 packed into rows (277 steps of 2,048 in v0.7)."""


def pod(chips: int) -> Machine:
    """A slice of a TPU v3 pod, or the (half) multipod."""
    if chips > 1024:
        return find(f"tpu-v3-multipod:32x{chips // 32}")
    rows, columns = SLICES[chips]
    return find(f"tpu-v3-pod:{rows}x{columns}")


def _resnet(cores: int, batch: int, step_ms: float, run_s: float, epochs: float, group: int) -> PublishedStep:
    every = 4 * EXAMPLES["resnet50"] / batch
    return PublishedStep("resnet50", cores // 2, batch, SHARDED, step_ms, every, run_s, epochs, group)


def _ssd(cores: int, batch: int, step_ms: float, run_s: float, spatial: int, group: int) -> PublishedStep:
    # The logs do not say when each run evaluated; about eight evaluations fall on a run of 60 to 80 epochs.
    every = 8 * EXAMPLES["ssd"] / batch
    return PublishedStep(
        "ssd", cores // 2, batch, split_by(spatial=(spatial,)), step_ms, every, run_s, norm_group=group
    )


def _transformer(cores: int, batch: int, step_ms: float, run_s: float) -> PublishedStep:
    return PublishedStep(
        "transformer", cores // 2, batch, HALF_SHARDED, step_ms, EXAMPLES["transformer"] / batch, run_s
    )


V06 = (
    _resnet(32, 4096, 131.2, 2531.2, 60.8, 1),
    _resnet(128, 16384, 131.0, 673.4, 64.8, 1),
    _resnet(256, 32768, 137.0, 411.8, 74.4, 1),
    _resnet(512, 32768, 79.65, 231.2, 72.0, 1),
    _resnet(1024, 32768, 44.2, 136.4, 76.0, 1),
    _resnet(2048, 32768, 25.25, 76.95, 72.8, 8),
    _ssd(32, 1024, 117.5, 756.5, 1, 2),
    _ssd(128, 1024, 35.5, 233.1, 1, 8),
    _ssd(256, 1024, 25.0, 165.8, 1, 16),
    _ssd(512, 2048, 24.5, 107.1, 1, 16),
    _ssd(1024, 2048, 17.2, 80.4, 4, 32),
    _ssd(2048, 2048, 13.8, 72.41, 4, 64),
    _transformer(32, 512, 172.0, 611.9),
    _transformer(128, 512, 59.2, 231.2),
    _transformer(256, 512, 44.6, 168.9),
    _transformer(512, 2048, 60.1, 94.9),
    _transformer(1024, 2048, 37.5, 62.8),
    _transformer(2048, 2048, 29.5, 50.86),
)
"""Steps and scores of v0.6; groups of batch norm as its flags say (devices; where an image lies on four, all of
them)."""

MASK_RCNN = (
    PublishedStep("maskrcnn", 16, 128, SHARDED, 452.8, 924, 6422.0),
    PublishedStep("maskrcnn", 64, 128, split_by(spatial=(4,)), 244.6, 924, 3447.6),
    PublishedStep("maskrcnn", 128, 128, split_by(spatial=(4,)), 148.7, 924, 2135.9),
)
"""Not fitted: their steps hold most of the evaluation, and their heads were placed on devices by hand."""


@dataclass(frozen=True)
class MeasuredSum:
    """A measured gradient sum: chips, bytes, seconds."""

    chips: int
    nbytes: float
    seconds: float


EFFICIENTNET = tuple(
    MeasuredSum(chips, parameters * 4, share * ms / 1e5)
    for parameters, rows in (
        (9.1e6, ((64, 2.1, 71.1), (128, 2.6, 72.0), (256, 2.5, 72.1), (512, 2.81, 72.6))),
        (30e6, ((64, 0.89, 419.7), (128, 1.24, 420.5), (256, 1.24, 425.0), (512, 1.03, 423.1))),
    )
    for chips, share, ms in rows
)
"""All-reduce shares of EfficientNet B2 and B5 in float32 (arXiv:2011.00071, table I, noted second-hand)."""


LINKS = tuple(MeasuredSum(4096, nbytes, 1.03 * nbytes / 55e9 + 316e-6) for nbytes in (102.2e6, 672e6))
"""Of ResNet-50 (float32) and BERT (bfloat16) on the multipod, from the link speed of 55 GB/s one way that explains both
all-reduce shares of arXiv:2011.03641; 1.03 vectors and 316 hops of 1 us are what its two-dimensional sum takes."""


@dataclass(frozen=True)
class PublishedRun:
    """A run to predict.

    Attributes:
      name: of the prediction.
      model: a name of `MODELS`.
      chips: of TPU v3.
      batch: examples in an update.
      layout: how it lies.
      updates: to the target.
      evaluate_every: updates between evaluations.
      source: of all of these.
      last_s: from the start of the last evaluation to its metric, on the hosts.
      norm_group: devices that share batch norm's statistics.
    """

    name: str
    model: str
    chips: int
    batch: int
    layout: Layout
    updates: float
    evaluate_every: float
    source: str
    last_s: float = 0.0
    norm_group: int = 1

    @property
    def workload(self) -> Workload:
        """The workload of the model."""
        return MODELS[self.model]


CODE7 = "Google's v0.7 code and flags (mlcommons/training_results_v0.7)"

V07 = (
    PublishedRun(
        "resnet50-4096",
        "resnet50",
        4096,
        65536,
        SHARDED,
        88 * EXAMPLES["resnet50"] / 65536,
        79,
        f"{CODE7}: batch 65,536, float32 gradients, batch norm over 8 devices, evaluated each 79 updates; 88 epochs "
        f"at this "
        "batch (arXiv:2011.03641)",
        norm_group=8,
    ),
    PublishedRun(
        "bert-4096",
        "bert",
        4096,
        8192,
        HALF_SHARDED,
        0.954 * 560,
        62,
        f"{CODE7}: batch 8,192, bfloat16 gradients, sharded LAMB, rate falling to 0 over 560 updates, evaluated each "
        f"62; the "
        "target is reached after 95.4 % of the planned updates, as in v0.6 (ResNet-50: 72.8 epochs of 76.3 planned "
        "at this "
        "scale)",
    ),
    PublishedRun(
        "transformer-4096",
        "transformer",
        4096,
        2048,
        replace(HALF_SHARDED, split=ModelSplit(model=4)),
        5.5 * 277,
        277,
        f"{CODE7}: 2,048 rows of 256 + 256 tokens, 4 devices a replica, 277 updates an epoch; 5.5 epochs: scores "
        f"over steps "
        "of the v0.6 runs at this batch (5.4 to 5.6)",
    ),
    PublishedRun(
        "ssd-4096",
        "ssd",
        4096,
        4096,
        split_by(spatial=(8,)),
        (90 + 11) * EXAMPLES["ssd"] / 4096,
        5 * EXAMPLES["ssd"] / 4096,
        f"{CODE7}: batch 4,096, 8 devices a replica, batch norm over 16 replicas, evaluated each 5 epochs, last drop "
        f"of the "
        "rate at epoch 90; the target follows 11 epochs after the last drop, as in v0.6 (81 epochs, drop at 70)",
        norm_group=128,
    ),
    PublishedRun(
        "ssd-2048",
        "ssd",
        2048,
        4096,
        split_by(spatial=(4,)),
        (80 + 11) * EXAMPLES["ssd"] / 4096,
        5 * EXAMPLES["ssd"] / 4096,
        f"{CODE7}: batch 4,096, 4 devices a replica, batch norm over 16 replicas, last drop of the rate at epoch 80; "
        f"then 11 "
        "epochs, as in v0.6; 10 to 13 s from an evaluation to its metric (v0.7 logs of the JAX front end)",
        last_s=11.5,
        norm_group=64,
    ),
    PublishedRun(
        "maskrcnn-512",
        "maskrcnn",
        512,
        256,
        split_by(spatial=(8,)),
        8000 * 14364 / 13000,
        462,
        f"{CODE7}: batch 256, 8 devices a replica, rate drops at 6,000 and 8,000; the run ends as far beyond the "
        f"last drop as "
        "in v0.6 (14,364 updates, drop at 13,000)",
    ),
)
"""Runs of MLPerf v0.7 on TPU v3. `LINKS` derives from shares of two of them; `experiments/planner.py` has one score."""
