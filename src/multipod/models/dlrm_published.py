"""The published DLRMs: those of Criteo's data sets, by the authors and by MLPerf."""

from typing import Any

from multipod.models.dlrm import Dlrm

KAGGLE_ROWS = (
    1460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5683, 8_351_593, 3194, 27, 14_992, 5_461_306, 10,
    5652, 2173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
"""Distinct ids of Criteo's Kaggle set, by field; 33,762,577 together."""

TERABYTE_10M_ROWS = (
    9_980_333, 36_084, 17_217, 7378, 20_134, 3, 7112, 1442, 61, 9_758_201, 1_333_352, 313_829, 10, 2208, 11_156, 122, 4,
    970, 14, 9_994_222, 7_267_859, 9_946_608, 415_421, 12_420, 101, 36,
)  # fmt: skip
"""Distinct ids of Criteo's Terabyte set modulo 10 M, negatives sub-sampled; 49,126,297 together."""

MLPERF_ROWS = (
    39_884_406, 39_043, 17_289, 7420, 20_263, 3, 7120, 1543, 63, 38_532_951, 2_953_546, 403_346, 10, 2208, 11_938, 155,
    4, 976, 14, 39_979_771, 25_641_295, 39_664_984, 585_935, 12_972, 108, 36,
)  # fmt: skip
"""Distinct ids of Criteo's Terabyte set modulo 40 M, as MLPerf trains on it; 187,767,399 together."""


def kaggle(**fields: Any) -> Dlrm:
    """The DLRM of Criteo's Kaggle set: 16 features, 540.2 M parameters in 26 tables."""
    return Dlrm(**({"rows": KAGGLE_ROWS} | fields))


def terabyte(**fields: Any) -> Dlrm:
    """The DLRM of Criteo's Terabyte set modulo 10 M: 64 features."""
    sizes: dict[str, Any] = {"rows": TERABYTE_10M_ROWS, "features": 64, "bottom": (512, 256), "top": (512, 512, 256)}
    return Dlrm(**(sizes | fields))


def mlperf(**fields: Any) -> Dlrm:
    """MLPerf's DLRM (v0.7 to v2.1): 128 features, 24.03 G parameters in tables; 171,392 below, 2,197,505 on top."""
    sizes: dict[str, Any] = {"rows": MLPERF_ROWS, "features": 128, "bottom": (512, 256), "top": (1024, 1024, 512, 256)}
    return Dlrm(**(sizes | fields))
