"""The published DLRMs: those of Criteo's data sets, by the authors and by MLPerf."""

from typing import Any

from multipod.models.dlrm import Dlrm
from multipod.models.dlrm_interactions import CrossInteraction

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

MLPERF_V2_ROWS = (
    40_000_000, 39_060, 17_295, 7424, 20_265, 3, 7122, 1543, 63, 40_000_000, 3_067_956, 405_282, 10, 2209, 11_938, 155,
    4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
"""Rows of each table of DLRM-DCNv2: distinct ids of Criteo's Terabyte set, 40 M at most; 204,184,588 together.

Source: the command of MLPerf's reference, github.com/mlcommons/training, recommendation_v2/torchrec_dlrm/README.MD.
"""

MLPERF_V2_HOTS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Ids of each field of an example of DLRM-DCNv2's multi-hot data, 214 together; source as above."""


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


def mlperf_v2(**fields: Any) -> Dlrm:
    """MLPerf's DLRM-DCNv2 (v3.0 to v6.0): 128 features, 26.14 G parameters in tables, 10,627,200 in the cross network.

    171,392 more are below and 5,245,953 on top. Layers begin as DLRM's authors have it; the reference leaves them to
    PyTorch's defaults.
    """
    sizes: dict[str, Any] = {"rows": MLPERF_V2_ROWS, "hots": MLPERF_V2_HOTS, "interaction": CrossInteraction(3, 512)}
    return mlperf(**(sizes | fields))
