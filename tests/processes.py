"""What tests need to run the command line in processes of its own."""

import os
import tempfile
from pathlib import Path

from multipod import runtime

CACHE = Path(tempfile.gettempdir()) / f"multipod-tests-{os.getuid()}"


def clean_environment() -> dict[str, str]:
    """The environment without what `runtime.prepare` wrote for this process; the tests' cache is shared."""
    ours = runtime.settings(8, runtime.Timeouts(), CACHE)
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    return kept | {"XDG_CACHE_HOME": str(CACHE), "COLUMNS": "100"}
