"""TFLite's two words for padding, and the sizes that follow."""

from typing import Any

from multipod.micro.lowering.lower import Lowering, Value
from multipod.micro.lowering.moves import emit_pad


def sizes_after(x: Value, padding: str, reach: Any, strides: Any) -> tuple[int, ...]:
    """Height and width of what windows of this reach make of x, with TFLite's `padding`."""
    lost = [size - 1 if padding == "VALID" else 0 for size in reach]
    return tuple(-(-(full - less) // step) for full, less, step in zip(x.shape[1:3], lost, strides, strict=True))


def same_padding(size: int, reach: int, stride: int) -> tuple[int, int]:
    """What TFLite's SAME adds before and after: as little as gives ceil(size / stride), the odd one after."""
    total = max((-(-size // stride) - 1) * stride + reach - size, 0)
    return total // 2, total - total // 2


def padding_of(low: Lowering, x: Value, around: Any, reach: Any, strides: Any, fill: float = 0.0) -> tuple[Value, str]:
    """TFLite's word for this padding, and x padded beforehand where it has none."""
    around = tuple(map(tuple, around))
    if not any(map(any, around)):
        return x, "VALID"
    same = tuple(same_padding(*sizes) for sizes in zip(x.shape[1:3], reach, strides, strict=True))
    if fill == 0 and around == same:
        return x, "SAME"
    return emit_pad(low, x, ((0, 0), *around, (0, 0)), fill), "VALID"
