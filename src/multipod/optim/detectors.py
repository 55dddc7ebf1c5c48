"""The optimizers of the published runs of SSD and Mask R-CNN: momentum, a linear warm-up, and two drops to a tenth."""

from multipod.optim.rates import Drops, WarmUp
from multipod.optim.sgd import Sgd

COCO_EXAMPLES = 118_287
"""Training images of COCO 2017."""


def ssd_sgd(
    batch: int, rate_per_32: float, warmup_epochs: float, drops: tuple[float, float], epochs: int
) -> tuple[Sgd, int]:
    """Returns SSD's optimizer and its updates; `drops` are epochs.

    The published runs also decay the scales and shifts of batch norm, and ours not.
    """
    falling = Drops(rate_per_32 * batch / 32, at=tuple(drop / epochs for drop in drops))
    rate = WarmUp(falling, warmup_epochs / epochs)
    optimizer = Sgd(rate, nesterov=False, weight_decay=5e-4, weight_decay_in="loss")
    return optimizer, int(epochs * COCO_EXAMPLES / batch)


def mask_rcnn_sgd(batch: int, peak: float, warmup: int, drops: tuple[int, int], epochs: int) -> tuple[Sgd, int]:
    """Returns Mask R-CNN's optimizer and its updates; `warmup` and `drops` are updates.

    The published runs give biases twice the rate, and ours not.
    """
    updates = epochs * (COCO_EXAMPLES // batch)
    rate = WarmUp(Drops(peak, at=tuple(drop / updates for drop in drops)), warmup / updates)
    return Sgd(rate, nesterov=False, weight_decay=1e-4), updates
