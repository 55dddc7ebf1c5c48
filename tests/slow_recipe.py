"""`tiny_recipe.tiny`, with a rank 1 that is slow as long as a file `slow` lies where it runs."""

import os
import time
from pathlib import Path

from tiny_recipe import tiny

from multipod.elastic.worker.probe import Probe

__all__ = ["tiny"]

HELD_S = 0.3
fast = Probe.__call__


def slow(self: Probe) -> float:
    """Behaves as a host that is slower by `HELD_S` for the work that is timed."""
    seconds = fast(self)
    if seconds and Path("slow").exists():
        time.sleep(HELD_S)
        seconds += HELD_S
    return seconds


if os.environ.get("MULTIPOD_PROCESS_ID") == "1":
    Probe.__call__ = slow
