"""The optimizers of published large-batch runs, with their batches, lengths and sources.

Rates are peak rates, never per 256 examples. Published polynomial decays run for one update more than the
run has left after its warm-up; ours end with the run. On ImageNet a run of `epochs` has, as in the
MLPerf logs, the updates of whole blocks of four epochs. Numbers whose source is a log or code were read there; those of
the LARS table of arXiv:1909.09756 and of table 2 of arXiv:2011.00071 were noted second-hand.
"""

import math
from dataclasses import dataclass

from multipod.errors import RecipeError, nearest
from multipod.optim.adamw import AdamW
from multipod.optim.lamb import Lamb
from multipod.optim.lars import Lars, LarsScaled
from multipod.optim.optimizer import Optimizer
from multipod.optim.rates import Drops, Exponential, Linear, Polynomial, Rsqrt, WarmUp
from multipod.optim.rmsprop import RmsProp
from multipod.optim.sgd import Sgd

IMAGENET_EXAMPLES = 1_281_167
"""Training images of ILSVRC 2012."""


@dataclass(frozen=True)
class Preset:
    """The optimizer of one published run.

    Attributes:
      optimizer: with the run's numbers.
      batch: examples in an update, over all devices.
      updates: planned length; 0 where the source does not say and the schedule does not ask.
      source: where the numbers are from, and what is not sure about them.
    """

    optimizer: Optimizer
    batch: int
    updates: int
    source: str


def find_preset(name: str) -> Preset:
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
) -> Preset:
    """ResNet-50 with LARS. The scaled form has its weight decay in the loss, the other in the optimizer."""
    optimizer = form(
        WarmUp(Polynomial(rate, end=1e-4), _warmup(batch, warmup_epochs, updates)),
        momentum=momentum,
        weight_decay=weight_decay,
        weight_decay_in="loss" if form is LarsScaled else "optimizer",
        eps=eps,
    )
    return Preset(optimizer, batch, updates, source)


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

PRESETS: dict[str, Preset] = {
    # arXiv:1909.09756: one pod, LARS scaled.
    "resnet50-4k-lars-scaled": _resnet(LarsScaled, 4096, 10.0, 5, 22536, f"{_V06}, 32 cores", weight_decay=2e-4),
    "resnet50-16k-lars-scaled": _resnet(LarsScaled, 16384, 25.0, 5, 5634, f"{_V06}, 128 cores", weight_decay=2e-4),
    "resnet50-32k-lars-scaled": _resnet(LarsScaled, 32768, 31.2, 25, 2983, f"{_V06}, 512 to 2048 cores", eps=1e-5),
    "resnet50-32k-lars-scaled-256": _resnet(LarsScaled, 32768, 33.0, 25, 2983, f"{_V06}, 256 cores", weight_decay=2e-4),
    "resnet50-32k-lars": _resnet(Lars, 32768, 31.2, 25, 2983, f"{_ABLATION}: unscaled; length as the scaled run's"),
    "resnet50-32k-lars-tuned": _resnet(
        Lars, 32768, 29.0, 18, count_updates(32768, 64), f"{_ABLATION}: unscaled, tuned; {_V07}, JAX", momentum=0.929
    ),
    # arXiv:2011.03641: the multipod.
    "resnet50-8k-lars": _resnet(
        Lars, 8192, 10.0, 5, count_updates(8192, 56), f"{_V07}, JAX below 16384", weight_decay=2e-4
    ),
    "resnet50-16k-lars": _resnet(
        Lars, 16384, 25.0, 5, count_updates(16384, 56), f"{_V07}, JAX below 32768", weight_decay=2e-4
    ),
    "resnet50-64k-lars": _resnet(Lars, 65536, 24.699, 31, 1738, f"{_V07}, TensorFlow", momentum=0.951807),
    "resnet50-64k-lars-jax": _resnet(Lars, 65536, 23.081, 33, 1817, f"{_V07}, JAX", momentum=0.953721),
    "bert-8k-lamb": Preset(
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
    "transformer-2k-adam-tf": _transformer(1.875, 831, (0.88, 0.92), 2048, f"{_V07}, TensorFlow"),
    "transformer-2k-adam-jax": _transformer(3.3092, 664, (0.90866, 0.91987), 2048, f"{_V07}, JAX"),
    # arXiv:1909.09756 again.
    "transformer-512-adam": _transformer(2.0, 1000, (0.9, 0.98), 512, _V06),
    "transformer-2k-adam": _transformer(1.3, 550, (0.86, 0.92), 2048, _V06),
    "maskrcnn-128-sgd": Preset(
        Sgd(WarmUp(Drops(0.16, at=(9750 / 14784, 13000 / 14784)), 1000 / 14784), nesterov=False),
        128,
        14784,
        f"{_V06}; start of the warm-up and weight decay not known: 0",
    ),
    # arXiv:1811.06992: ImageNet on one pod.
    "resnet50-16k-lars-2018": _resnet(LarsScaled, 16384, 25.0, 5, count_updates(16384, 90), _SUPERCOMPUTER),
    "resnet50-32k-lars-2018": _resnet(LarsScaled, 32768, 34.0, 12, 3558, _SUPERCOMPUTER),
    "resnet50-64k-lars-2018": _resnet(LarsScaled, 65536, 35.0, 34, count_updates(65536, 90), _SUPERCOMPUTER),
    # arXiv:2011.00071: EfficientNet. The rows of B2 and of B5 differ only in how far they scale.
    "efficientnet-b2-4k-rmsprop": _efficientnet_rmsprop(4096),
    "efficientnet-b2-8k-rmsprop": _efficientnet_rmsprop(8192),
    "efficientnet-b2-16k-rmsprop": _efficientnet_rmsprop(16384),
    "efficientnet-b2-16k-lars": _efficientnet_lars(16384, 0.236, 50),
    "efficientnet-b2-32k-lars": _efficientnet_lars(32768, 0.118, 50),
    "efficientnet-b5-4k-rmsprop": _efficientnet_rmsprop(4096),
    "efficientnet-b5-8k-rmsprop": _efficientnet_rmsprop(8192),
    "efficientnet-b5-16k-rmsprop": _efficientnet_rmsprop(16384),
    "efficientnet-b5-16k-lars": _efficientnet_lars(16384, 0.236, 50),
    "efficientnet-b5-32k-lars": _efficientnet_lars(32768, 0.118, 50),
    "efficientnet-b5-64k-lars": _efficientnet_lars(65536, 0.081, 43),
}
