"""The optimizer of the published runs of GNMT: Adam, an exponential warm-up, and at most four halvings."""

from multipod.optim.adamw import AdamW
from multipod.optim.rates import Drops, WarmUp

WMT16_PAIRS = 3_442_299
"""Pairs of WMT16's English and German of which both sides have at most 48 tokens (Google's MLPerf code)."""


def gnmt_adam(
    batch: int, peak: float, warmup: int, epochs: int, begin: float, interval: float, clip_before_sum: bool = True
) -> tuple[AdamW, int]:
    """Returns GNMT's optimizer and its updates.

    The rate begins at a hundredth of its peak, and halves at update `begin` and every `interval` updates behind it,
    four times; a halving behind the run's end is left out.
    """
    updates = epochs * (WMT16_PAIRS // batch)
    halvings = [begin + number * interval for number in range(4)]
    falling = Drops(peak, at=tuple(at / updates for at in halvings if at <= updates), factor=0.5)
    rate = WarmUp(falling, warmup / updates, start=0.01, exponential=True)
    return AdamW(rate, beta1=0.9, beta2=0.999, eps=1e-8, clip=5.0, clip_before_sum=clip_before_sum), updates
