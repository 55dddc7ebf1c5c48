"""What a process holds, and the peak of it; how a step's own peak is told from what was there before it."""

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

from multipod import runtime

STATUS = Path("/proc/self/status")


def resident_mb() -> float:
    """MiB that this process holds now. Linux."""
    return _status_kib("VmRSS") / 1024


def peak_mb() -> float:
    """MiB that this process held at most, since it began or since `forget_peak`."""
    try:
        return _status_kib("VmHWM") / 1024
    except OSError:  # no Linux. There, getrusage would tell the peak of the process that started this one, if larger.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def forget_peak() -> None:
    """Gives back what is free (compilers leave much behind) and lets the peak begin anew. Linux."""
    gc.collect()
    runtime.release_memory()
    Path("/proc/self/clear_refs").write_text("5")


def step_peak_mb(step: Callable[[], object]) -> float:
    """MiB that a step takes above what is there before it: its results and all that it holds on the way. Linux.

    One step goes before, so that what compilers and libraries take once is not in it.
    """
    step()
    forget_peak()
    before = resident_mb()
    step()
    return peak_mb() - before


def _status_kib(key: str) -> int:
    return next(int(line.split()[1]) for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
