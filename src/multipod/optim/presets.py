"""The optimizers of published large-batch runs as functions of the batch: what `--set preset=NAME` takes.

Rates are peak rates, never per 256 examples. Published polynomial decays run for one update more than the
run has left after its warm-up; ours end with the run. On ImageNet a run of `epochs` has, as in the
MLPerf logs, the updates of whole blocks of four epochs. Numbers whose source is a log or code were read there; those of
the LARS table of arXiv:1909.09756 and of table 2 of arXiv:2011.00071 were noted second-hand.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

from multipod.errors import RecipeError, nearest
from multipod.optim.adamw import AdamW
from multipod.optim.detectors import mask_rcnn_sgd, ssd_sgd
from multipod.optim.lamb import Lamb
from multipod.optim.lars import Lars, LarsScaled
from multipod.optim.optimizer import RegularizedOptimizer
from multipod.optim.rates import Exponential, HeldPolynomial, Linear, Polynomial, Rsqrt, WarmUp
from multipod.optim.rmsprop import RmsProp
from multipod.optim.sgd import Sgd
from multipod.optim.translators import gnmt_adam

IMAGENET_EXAMPLES = 1_281_167
"""Training images of ILSVRC 2012."""


@dataclass(frozen=True)
class Preset:
    """The optimizer of one run.

    Attributes:
      optimizer: with the run's numbers; each of them warms up.
      batch: examples in an update, over all devices.
      updates: planned length; 0 where the source does not say and the schedule does not ask.
      source: where the numbers are from, and what is not sure about them.
      norm_examples: over which batch norm took its statistics; 0 where the source does not say, or there is none.
    """

    optimizer: RegularizedOptimizer
    batch: int
    updates: int
    source: str
    norm_examples: int = 0

    @property
    def rate(self) -> WarmUp:
        """The optimizer's rate."""
        assert isinstance(self.optimizer.rate, WarmUp)
        return self.optimizer.rate


@dataclass(frozen=True)
class Scaled:
    """Published runs of one optimizer, and the rule by which batches between and beside theirs get their numbers.

    A batch takes the numbers of the published run with the largest batch that is not above it, or of the first run, as
    Google's ResNet code chooses its rows. Warm-up and length keep that run's epochs, and the peak rate is multiplied by
    (batch / the run's)^power.

    Attributes:
      runs: by rising batches.
      power: 0 leaves the peak, 0.5 takes the root of the batch, 1 the batch.
      rule: where the power is from.
    """

    runs: tuple[Preset, ...]
    power: float
    rule: str

    def at(self, batch: int) -> Preset:
        """Returns the optimizer and the length for a batch; at a published one the very numbers that were published."""
        run = self.runs[max(0, bisect_right([run.batch for run in self.runs], batch) - 1)]
        if run.batch == batch:
            return run
        longer = run.batch / batch
        optimizer = replace(run.optimizer, rate=_scaled(run.rate, longer**-self.power, longer))
        source = f"{run.source}; {self.rule}"
        return Preset(optimizer, batch, round(run.updates * longer), source, run.norm_examples)

    def beyond(self, batch: int) -> str:
        """Says that a batch lies outside the published range, with the range; empty where it lies inside."""
        least, most = self.runs[0].batch, self.runs[-1].batch
        where = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        return "" if least <= batch <= most else f"batch {batch:,} was not published (only {where}): {self.rule}"


def _scaled(rate: WarmUp, factor: float, longer: float) -> WarmUp:
    """Returns a rate with its peak `factor` times as high, over a run that has `longer` times the updates."""
    then = replace(rate.then, peak=rate.then.peak * factor)
    return replace(rate, then=then, updates=max(1, round(rate.updates * longer)) if rate.updates else 0)


def find_preset(name: str) -> Scaled:
    """Returns the preset of that name.

    Raises:
      RecipeError: no such preset, with the nearest names.
    """
    if name not in PRESETS:
        raise RecipeError(f"no optimizer preset is called {name!r}. {nearest(name, PRESETS)}")
    return PRESETS[name]


def _resnet(
    form: type[Lars],
    batch: int,
    rate: float,
    warmup_epochs: float,
    updates: int,
    source: str,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    eps: float = 0.0,
    norm_examples: int = 64,
) -> Preset:
    """ResNet-50 with LARS. The scaled form has its weight decay in the loss, the other in the optimizer."""
    optimizer = form(
        WarmUp(Polynomial(rate, end=1e-4), _warmup(batch, warmup_epochs, updates)),
        momentum=momentum,
        weight_decay=weight_decay,
        weight_decay_in="loss" if form is LarsScaled else "optimizer",
        eps=eps,
    )
    return Preset(optimizer, batch, updates, source, norm_examples)


def _efficientnet_rmsprop(batch: int) -> Preset:
    """EfficientNet's own optimizer, its rate 0.016 for each 256 examples; the stairs begin at update 0."""
    updates = count_updates(batch, 350)
    stairs = Exponential(0.016 * batch / 256, factor=0.97, every=2.4 / 350, from_start=True)
    rate = WarmUp(stairs, _warmup(batch, 5, updates))
    optimizer = RmsProp(rate, weight_decay=1e-5, weight_decay_in="loss", eps=1e-3, beta2=0.9)
    return Preset(optimizer, batch, updates, f"{_EFFICIENTNET}, row RMSProp {batch}")


def _efficientnet_lars(batch: int, rate_per_256: float, warmup_epochs: int) -> Preset:
    """EfficientNet with LARS; the released code decays weights both in the loss and in the optimizer."""
    updates = count_updates(batch, 350)
    rate = WarmUp(Polynomial(rate_per_256 * batch / 256, end=0.1), _warmup(batch, warmup_epochs, updates))
    optimizer = Lars(rate, weight_decay=1e-5, weight_decay_in="both")
    return Preset(optimizer, batch, updates, f"{_EFFICIENTNET}, row LARS {batch}")


def _transformer(constant: float, warmup_updates: int, betas: tuple[float, float], batch: int, source: str) -> Preset:
    """Transformer-big (1024 features) with Adam and the rsqrt schedule."""
    rate = WarmUp(Rsqrt(constant / math.sqrt(1024 * warmup_updates)), updates=warmup_updates)
    optimizer = AdamW(rate, beta1=betas[0], beta2=betas[1], eps=1e-9)
    return Preset(optimizer, batch, 0, source)


def _dlrm(batch: int, rate_per_2048: float, warmup: int, fall: int, fall_updates: int) -> Preset:
    """DLRM with plain SGD: a linear warm-up, a constant rate, and from update `fall` on a quadratic fall to 0."""
    updates = fall + fall_updates
    held = HeldPolynomial(rate_per_2048 * batch / 2048, until=fall / updates, power=2.0)
    optimizer = Sgd(WarmUp(held, warmup / updates), momentum=0.0, nesterov=False)
    return Preset(optimizer, batch, updates, f"{_DLRM}, batch {batch}")


def _ssd(
    batch: int, rate_per_32: float, warmup_epochs: float, drops: tuple[float, float], epochs: int, who: str
) -> Preset:
    optimizer, updates = ssd_sgd(batch, rate_per_32, warmup_epochs, drops, epochs)
    return Preset(optimizer, batch, updates, f"{_V07}, SSD on TPU v4, {who}", norm_examples=64)


def _mask_rcnn(batch: int, peak: float, warmup: int, drops: tuple[int, int], who: str) -> Preset:
    optimizer, updates = mask_rcnn_sgd(batch, peak, warmup, drops, epochs=20)
    return Preset(optimizer, batch, updates, f"{_V07}, Mask R-CNN on TPU v4, {who}")


def _gnmt(
    batch: int, peak: float, warmup: int, epochs: int, begin: float, interval: float, source: str, own: bool = True
) -> Preset:
    optimizer, updates = gnmt_adam(batch, peak, warmup, epochs, begin, interval, clip_before_sum=own)
    return Preset(optimizer, batch, updates, source)


def count_updates(batch: int, epochs: int, examples: int = IMAGENET_EXAMPLES) -> int:
    """Returns the updates in that many epochs, counted as MLPerf runs did: each block of four epochs is rounded up."""
    return math.ceil(4 * examples / batch) * epochs // 4


def _warmup(batch: int, epochs: float, updates: int) -> float:
    """Returns the share of `updates` in that many epochs of ImageNet, whole updates, rounded down as published."""
    return math.floor(epochs * IMAGENET_EXAMPLES / batch) / updates


_V06 = "MLPerf Training v0.6 result logs (arXiv:1909.09756)"
_ABLATION = "arXiv:1909.09756, LARS table, batch 32768 on 2048 cores"
_V07 = "MLPerf Training v0.7 code and logs (arXiv:2011.03641)"
_SUPERCOMPUTER = "Google's public ResNet code, Dec 2018 (arXiv:1811.06992); momentum form and L2 from that code's LARS"
_EFFICIENTNET = "arXiv:2011.00071, table 2; forms from the authors' released code"
_DLRM = "MLPerf Training v0.7 scripts for DLRM on TPU v4 (arXiv:2011.03641)"

_GNMT = "WMT16 (arXiv:1609.08144); halved at the first update named, and each interval after it"

_ROWS = "the rate is that of the next smaller published batch, or of the smallest, as in Google's ResNet code"
_ROOT = "the rate goes with the root of the batch, as LAMB's paper scales it (arXiv:1904.00962)"
_LINEAR = "the rate goes with the batch (arXiv:1706.02677)"
_ALONE = "the peak rate stays, since nobody published how it goes with the batch"

PRESETS: dict[str, Scaled] = {
    # arXiv:2011.03641: the multipod. The rows of the JAX submission's script.
    "resnet50-lars": Scaled(
        (
            *(
                _resnet(Lars, batch, 10.0, 5, count_updates(batch, 56), f"{_V07}, JAX below 16384", weight_decay=2e-4)
                for batch in (4096, 8192)
            ),
            _resnet(Lars, 16384, 25.0, 5, count_updates(16384, 56), f"{_V07}, JAX below 32768", weight_decay=2e-4),
            _resnet(
                *(Lars, 32768, 29.0, 18, count_updates(32768, 64)),
                source=f"{_ABLATION}: unscaled, tuned; {_V07}, JAX",
                momentum=0.929,
            ),
            _resnet(Lars, 65536, 23.081, 33, count_updates(65536, 92), f"{_V07}, JAX", momentum=0.953721),
        ),
        0.0,
        _ROWS,
    ),
    "resnet50-lars-tf": Scaled(
        (_resnet(Lars, 65536, 24.699, 31, count_updates(65536, 88), f"{_V07}, TensorFlow", momentum=0.951807),),
        0.0,
        _ROWS,
    ),
    # arXiv:1909.09756: one pod, LARS scaled.
    "resnet50-lars-scaled": Scaled(
        (
            _resnet(LarsScaled, 4096, 10.0, 5, 22536, f"{_V06}, 32 cores", weight_decay=2e-4, norm_examples=128),
            _resnet(LarsScaled, 16384, 25.0, 5, 5634, f"{_V06}, 128 cores", weight_decay=2e-4, norm_examples=128),
            _resnet(LarsScaled, 32768, 31.2, 25, 2983, f"{_V06}, 512 to 2048 cores", eps=1e-5, norm_examples=128),
        ),
        0.0,
        _ROWS,
    ),
    # arXiv:1811.06992: ImageNet on one pod.
    "resnet50-lars-2018": Scaled(
        (
            _resnet(LarsScaled, 16384, 25.0, 5, count_updates(16384, 90), _SUPERCOMPUTER, norm_examples=0),
            _resnet(LarsScaled, 32768, 34.0, 12, 3558, _SUPERCOMPUTER, norm_examples=0),
            _resnet(LarsScaled, 65536, 35.0, 34, count_updates(65536, 90), _SUPERCOMPUTER, norm_examples=0),
        ),
        0.0,
        _ROWS,
    ),
    "bert-lamb": Scaled(
        (
            Preset(
                Lamb(
                    # The warm-up of 287 begins at update -76; the decay over 560 counts from 0: the rate jumps at 211.
                    WarmUp(Linear(0.00288293, from_start=True), 211 / 560, start=76 / 287),
                    beta1=0.88,
                    beta2=0.88,
                    eps=1e-6,
                    weight_decay=0.0166629,
                    clip=1.0,
                    clip_before_sum=True,
                ),
                8192,
                560,
                f"{_V07}, BERT from the phase-1 checkpoint",
            ),
        ),
        0.5,
        _ROOT,
    ),
    # From 512 to 2048 the published peak falls by an eighth.
    "transformer-adam": Scaled(
        (
            _transformer(2.0, 1000, (0.9, 0.98), 512, _V06),
            _transformer(1.3, 550, (0.86, 0.92), 2048, _V06),
        ),
        0.0,
        _ALONE,
    ),
    "transformer-adam-tf": Scaled((_transformer(1.875, 831, (0.88, 0.92), 2048, f"{_V07}, TensorFlow"),), 0.0, _ALONE),
    "transformer-adam-jax": Scaled((_transformer(3.3092, 664, (0.90866, 0.91987), 2048, f"{_V07}, JAX"),), 0.0, _ALONE),
    # arXiv:2011.00071: the same for B2, up to 16384 and 32768, and for B5, up to 16384 and 65536.
    "efficientnet-rmsprop": Scaled(
        tuple(map(_efficientnet_rmsprop, (4096, 8192, 16384))), 1.0, "the rate is 0.016 for each 256 examples"
    ),
    "efficientnet-lars": Scaled(
        (
            _efficientnet_lars(16384, 0.236, 50),
            _efficientnet_lars(32768, 0.118, 50),
            _efficientnet_lars(65536, 0.081, 43),
        ),
        0.0,
        "the peak stays, as from 16384 to 32768 in table 2",
    ),
    "ssd-sgd": Scaled(
        (
            _ssd(1024, 3.1e-3, 5, (42.6, 53.3), 64, "16 and 128 cores"),
            _ssd(2048, 2.5e-3, 20, (56, 70), 80, "512 cores"),
            _ssd(4096, 1.2e-3, 26, (64, 80), 120, "JAX"),
        ),
        1.0,
        _LINEAR,
    ),
    "mask-rcnn-sgd": Scaled(
        (
            _mask_rcnn(128, 0.16, 1000, (9750, 13_000), "16 cores"),
            _mask_rcnn(256, 0.24, 1800, (5625, 7500), "128 cores"),
        ),
        1.0,
        _LINEAR,
    ),
    # The reference begins to halve after two thirds of its updates, and Google's code clips on each device.
    "gnmt-adam": Scaled(
        (
            _gnmt(128, 1e-3, 200, 8, 143_426, 17_928, f"{_GNMT}, the reference", own=False),
            _gnmt(4096, 3.5e-3, 150, 8, 4000, 300, f"{_V06}, 32 cores; {_GNMT}"),
            _gnmt(8192, 4.5e-3, 150, 10, 1924, 241, f"{_V07}, 1,024 cores; {_GNMT}"),
        ),
        0.0,
        _ALONE,
    ),
    "dlrm-sgd": Scaled(
        (
            _dlrm(32768, 1.125, 8_000, 70_000, 30_000),
            _dlrm(55296, 0.887, 2_750, 49_315, 27_772),
        ),
        1.0,
        _LINEAR,
    ),
}
"""Every preset by its name; a recipe's `preset` is one of these."""


def preset_lines() -> Sequence[str]:
    """Returns a line for each preset: its name, its optimizer, and the batches that were published."""
    wide = max(map(len, PRESETS))
    return [
        f"{name:{wide}}  {type(rule.runs[0].optimizer).__name__}, published at batch "
        f"{', '.join(f'{run.batch:,}' for run in rule.runs)}"
        for name, rule in PRESETS.items()
    ]
