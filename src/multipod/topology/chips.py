"""Chips: what one does in a second, what it remembers, how it is linked. Every figure has its source."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Chip:
    """One chip, as its maker describes it.

    Attributes:
      name: in the catalogue.
      flop_per_s: peak, for each type of number it multiplies; dense.
      memory_bytes: of its own memory.
      memory_bytes_per_s: peak bandwidth of that memory.
      link_latency_s: of one link to a neighbour (a port, on a switch).
      link_bytes_per_s: of one link in one direction.
      links: how many such links it has.
      source: where the figures are from, and which of them are estimates.
    """

    name: str
    flop_per_s: dict[str, float] = field(hash=False)
    memory_bytes: float
    memory_bytes_per_s: float
    link_latency_s: float
    link_bytes_per_s: float
    links: int
    source: str


_T, _G, _GIB = 1e12, 1e9, 2**30

_HOP = (
    "The latency of a link is an estimate: 1 us is what the JAX scaling book (jax-ml.github.io/scaling-book) assumes."
)
_NVLINK = (
    "All NVLinks of a GPU count as one port on the NVSwitch. Its latency is an estimate from NCCL's tuning constants."
)

CHIPS = {
    chip.name: chip
    for chip in (
        Chip(
            "tpu-v2",
            {"bfloat16": 45 * _T},
            memory_bytes=16 * _GIB,
            memory_bytes_per_s=700 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=62 * _G,
            links=4,
            source="Jouppi et al., 2020, doi:10.1145/3360307: 700 GB/s, links of 496 Gbit/s, both as later texts quote "
            f"them (some have 600 GB/s); 45 TFLOP/s: Google Cloud. {_HOP}",
        ),
        Chip(
            "tpu-v3",
            {"bfloat16": 123 * _T},
            memory_bytes=32 * _GIB,
            memory_bytes_per_s=900 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=82 * _G,
            links=4,
            source="cloud.google.com/tpu/docs/v3; links of 656 Gbit/s: Jouppi et al., 2020, doi:10.1145/3360307, which "
            "agrees with the page's all-reduce bandwidth of 340 TB/s a pod. Its bisection bandwidth and the scaling "
            f"book say 100 GB/s. {_HOP}",
        ),
        Chip(
            "tpu-v4",
            {"bfloat16": 275 * _T, "int8": 275 * _T},
            memory_bytes=32 * _GIB,
            memory_bytes_per_s=1200 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=50 * _G,
            links=6,
            source="cloud.google.com/tpu/docs/v4; links: Jouppi et al., 2023, arXiv:2304.01433. The scaling book has "
            f"45 GB/s. {_HOP}",
        ),
        Chip(
            "tpu-v5e",
            {"bfloat16": 197 * _T, "int8": 393 * _T},
            memory_bytes=16e9,
            memory_bytes_per_s=819 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=50 * _G,
            links=4,
            source="cloud.google.com/tpu/docs/v5e: 400 GB/s a chip, both ways, over 4 links. The scaling book has 45 "
            f"GB/s a link. {_HOP}",
        ),
        Chip(
            "tpu-v5p",
            {"bfloat16": 459 * _T, "int8": 918 * _T},
            memory_bytes=95 * _GIB,
            memory_bytes_per_s=2765 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=100 * _G,
            links=6,
            source="cloud.google.com/tpu/docs/v5p: 1,200 GB/s a chip, both ways, over 6 links; int8: the scaling book, "
            f"which has 90 GB/s a link. {_HOP}",
        ),
        Chip(
            "tpu-v6e",
            {"bfloat16": 918 * _T, "int8": 1836 * _T},
            memory_bytes=32e9,
            memory_bytes_per_s=1640 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=100 * _G,
            links=4,
            source="cloud.google.com/tpu/docs/v6e: 800 GB/s a chip, both ways, over 4 links (older versions of the "
            "page: 3,584 Gbit/s one way; newer: memory at 1,600 GB/s). The scaling book has 90 GB/s a link. "
            f"{_HOP}",
        ),
        Chip(
            "a100",
            {"bfloat16": 312 * _T, "tensorfloat32": 156 * _T, "float32": 19.5 * _T, "int8": 624 * _T},
            memory_bytes=80e9,
            memory_bytes_per_s=2039 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=300 * _G,
            links=1,
            source=f"NVIDIA A100 80GB SXM datasheet, dense figures; 12 NVLinks, 600 GB/s both ways. {_NVLINK}",
        ),
        Chip(
            "h100",
            {"bfloat16": 989.4 * _T, "tensorfloat32": 494.7 * _T, "float32": 66.9 * _T, "int8": 1978.9 * _T},
            memory_bytes=80e9,
            memory_bytes_per_s=3350 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=450 * _G,
            links=1,
            source="NVIDIA H100 SXM datasheet, halved where it counts zeros of sparse matrices; 18 NVLinks, 900 GB/s "
            f"both ways. {_NVLINK}",
        ),
        Chip(
            "h200",
            {"bfloat16": 989.4 * _T, "tensorfloat32": 494.7 * _T, "float32": 66.9 * _T, "int8": 1978.9 * _T},
            memory_bytes=141e9,
            memory_bytes_per_s=4800 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=450 * _G,
            links=1,
            source="NVIDIA H200 SXM datasheet, halved where it counts zeros of sparse matrices; 18 NVLinks, 900 GB/s "
            f"both ways. {_NVLINK}",
        ),
        Chip(
            "cpu-core",
            {"bfloat16": 670 * _G, "float32": 126 * _G},
            memory_bytes=12 * _GIB,
            memory_bytes_per_s=12 * _G,
            link_latency_s=1e-6,
            link_bytes_per_s=6 * _G,
            links=1,
            source="measured in 2026 on one core of a virtual machine (Xeon with AVX-512 and AMX, 12 GiB a core): "
            "matrices of 2048 x 2048, copies of 16 MB. A link is one copy through memory shared with another process; "
            "its latency is an estimate.",
        ),
    )
}
"""The chips that are known by name. `flop_per_s` has what the source says, so float32 is missing for TPUs."""
