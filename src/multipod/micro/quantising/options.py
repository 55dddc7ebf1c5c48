"""How to quantise."""

from dataclasses import dataclass
from typing import Literal

from multipod.errors import ExportError

CHOICES = {
    "activations": ("int8", "int16"),
    "weights": ("int8", "int4"),
    "ranges": ("minmax", "percentile", "mse"),
    "io": ("quantised", "float32"),
}


@dataclass(frozen=True)
class Quantisation:
    """How to quantise a model. The default is what TFLite calls full integer quantisation.

    Attributes:
      activations: int8 with a zero point, or int16 without; weights are int8 with either.
      weights: int4 packs two to a byte, for convolutions and dense layers with int8 activations.
      ranges: of activations: all values seen (`minmax`), all but the outermost (`percentile`), or the range with the
        least mean squared error on the calibration set (`mse`).
      percentile: the share of values inside the range, in percent, half of the rest cut off at either end.
      bias_correction: makes the mean of each channel what it was before its weights were rounded.
      io: type of inputs and outputs: quantised like the rest, or float32 behind a QUANTIZE and a DEQUANTIZE.
      dense_per_channel: one scale for each output of a dense layer, as convolutions have. Hexagon and files for
        runtimes before 2.17 want one for all.
      keep_float: kinds of operators that stay in float32, such as ("SOFTMAX",).

    Raises:
      ExportError: a field that is not among its choices.
    """

    activations: Literal["int8", "int16"] = "int8"
    weights: Literal["int8", "int4"] = "int8"
    ranges: Literal["minmax", "percentile", "mse"] = "minmax"
    percentile: float = 99.99
    bias_correction: bool = True
    io: Literal["quantised", "float32"] = "quantised"
    dense_per_channel: bool = True
    keep_float: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        wrong = [
            f"{name}={getattr(self, name)!r} (one of {', '.join(known)})"
            for name, known in CHOICES.items()
            if getattr(self, name) not in known
        ]
        if not 50 < self.percentile <= 100:
            wrong.append(f"percentile={self.percentile} (over 50, at most 100)")
        if self.weights == "int4" and self.activations == "int16":
            wrong.append(
                "weights='int4' with activations='int16' (TFLM has no such kernels; take int8 for one of them)"
            )
        if wrong:
            raise ExportError(f"quantisation: {', '.join(wrong)}. Change it.")

    @property
    def limits(self) -> tuple[int, int]:
        """The least and greatest stored activation."""
        return (-128, 127) if self.activations == "int8" else (-32768, 32767)

    @property
    def weight_limit(self) -> int:
        """Stored weights lie in [-limit, limit]."""
        return 127 if self.weights == "int8" else 7
