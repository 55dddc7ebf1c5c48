"""`tiny_recipe.tiny`, with a rank 1 that cannot write its part of the second checkpoint, behind the next updates."""

import os

from tiny_recipe import tiny

from multipod.train.barriers import Barriers

__all__ = ["tiny"]

meet = Barriers.__call__
written = 0


def fails_once(self: Barriers, *, key: str, timeout_ms: int) -> None:
    """Fails as if the disk were full for this process alone: it does not come to where all have written."""
    global written
    written += "write_complete" in key
    if written == 2 and "write_complete" in key:
        raise OSError("no room for rank 1")
    meet(self, key=key, timeout_ms=timeout_ms)


if os.environ.get("MULTIPOD_PROCESS_ID") == "1":
    Barriers.__call__ = fails_once
