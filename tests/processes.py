"""What tests need to run the command line in processes of its own."""

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multipod import runtime

CACHE = Path(tempfile.gettempdir()) / f"multipod-tests-{os.getuid()}"


def clean_environment() -> dict[str, str]:
    """The environment without what `runtime.prepare` wrote for this process; the tests' cache is shared."""
    ours = runtime.settings(8, runtime.Timeouts(), CACHE)
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"XDG_CACHE_HOME": str(CACHE), "COLUMNS": "100"}


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Writing more into any file of this process is refused (EFBIG), as by a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
