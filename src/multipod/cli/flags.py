"""The settings from outside that decide how fast a platform is: what they do, and which are set here."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

JAX_GPU = "docs.jax.dev/en/latest/gpu_performance_tips.html"
NVIDIA = "docs.nvidia.com/jax-toolbox/performance-profiling/gpu-performance"
NCCL = "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
XLA = "openxla.org/xla/flags_guidance"
RUNTIME = "docs/design/runtime.md"
JAX_MEMORY = "docs.jax.dev/en/latest/gpu_memory_allocation.html"


@dataclass(frozen=True)
class PlatformSetting:
    """A setting that matters on a platform.

    Attributes:
      name: of an environment variable, or, beginning with `--`, of a flag.
      variable: the environment variable that the flag stands in; the name itself for a variable.
      value: one to try first; "" where it depends on the machine.
      what: what it does.
      source: where it is documented.
    """

    name: str
    variable: str
    value: str
    what: str
    source: str

    def found(self, environment: Mapping[str, str]) -> str | None:
        """What it is set to; None where it is not set."""
        if not self.name.startswith("--"):
            return environment.get(self.name)
        for word in reversed(shlex.split(environment.get(self.variable, ""))):
            name, equals, value = word.partition("=")
            if name == self.name:
                return value if equals else "true"
        return None


def _xla(name: str, value: str, what: str, source: str) -> PlatformSetting:
    return PlatformSetting(f"--{name}", "XLA_FLAGS", value, what, source)


def _libtpu(name: str, value: str, what: str) -> PlatformSetting:
    return PlatformSetting(f"--{name}", "LIBTPU_INIT_ARGS", value, what, XLA)


def _variable(name: str, value: str, what: str, source: str) -> PlatformSetting:
    return PlatformSetting(name, name, value, what, source)


SETTINGS: Mapping[str, tuple[PlatformSetting, ...]] = {
    "gpu": (
        _xla("xla_gpu_enable_latency_hiding_scheduler", "true", "collectives run beside kernels", JAX_GPU),
        _xla("xla_gpu_enable_pipelined_all_gather", "true", "gathers of the next layer begin early (fsdp)", NVIDIA),
        _xla("xla_gpu_enable_pipelined_reduce_scatter", "true", "scatters of the last layer end late (fsdp)", NVIDIA),
        _xla("xla_gpu_enable_pipelined_all_reduce", "true", "the same for all-reduces in loops", NVIDIA),
        _xla("xla_gpu_all_reduce_combine_threshold_bytes", "134217728", "XLA joins messages up to this size", NVIDIA),
        _xla("xla_gpu_enable_command_buffer", "", "CUDA graphs: '' is off, which helps debugging", NVIDIA),
        _xla("xla_gpu_per_fusion_autotune_cache_dir", "", "keeps what autotuning found between runs", NVIDIA),
        _variable("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9", "share of the memory that JAX takes at once", JAX_MEMORY),
        _variable("NCCL_DEBUG", "WARN", "what NCCL says; INFO tells its rings, trees and networks", NCCL),
        _variable("NCCL_SOCKET_IFNAME", "", "the network interface of hosts that have several", NCCL),
        _variable("NCCL_IB_HCA", "", "the InfiniBand adapters to use", NCCL),
        _variable("NCCL_NVLS_ENABLE", "", "sums in NVSwitch (Hopper and later); 0 where memory is short", NCCL),
    ),
    "tpu": (
        _libtpu("xla_tpu_enable_latency_hiding_scheduler", "true", "collectives run beside compute"),
        _libtpu("xla_tpu_enable_async_collective_fusion", "true", "collectives are joined with compute"),
        _libtpu("xla_tpu_enable_async_collective_fusion_fuse_all_gather", "true", "gathers too (fsdp)"),
        _libtpu("xla_tpu_enable_async_collective_fusion_multiple_steps", "true", "over several computations"),
        _libtpu("xla_tpu_overlap_compute_collective_tc", "true", "compute and collectives share the core"),
        _libtpu("xla_enable_async_all_gather", "true", "gathers do not block"),
        _libtpu("xla_tpu_enable_data_parallel_all_reduce_opt", "true", "gradient sums of data parallel runs overlap"),
        _libtpu("xla_tpu_data_parallel_opt_different_sized_ops", "true", "also where tensors differ in size"),
        _libtpu("xla_tpu_scoped_vmem_limit_kib", "", "on-chip memory of one kernel (fused attention)"),
    ),
    "cpu": (
        _variable("NPROC", "", "threads of XLA's pool; multipod sets two for each virtual device", RUNTIME),
        _xla("xla_cpu_collective_timeout_seconds", "", "multipod sets it from --timeout", RUNTIME),
    ),
}
"""By platform. Each flag of XLA was looked up in jaxlib 0.10.2, each of libtpu in libtpu 0.0.52 (2026-11-22)."""
