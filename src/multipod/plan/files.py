"""The planner's files: JSON objects that say what they are."""

import json
from pathlib import Path
from typing import Any

from multipod.errors import PlanError


def read_object(file: Path, forms: tuple[str, ...], what: str, how: str) -> dict[str, Any]:
    """What a file holds, without its `format`.

    Args:
      file: to read.
      forms: what its `format` may be, today's first.
      what: such a file, in words.
      how: how one is made, for the errors.

    Raises:
      PlanError: no such file, no JSON, or of another format.
    """
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise PlanError(f"{file}: {error.strerror}. {how}") from error
    except ValueError as error:
        raise PlanError(f"{file} is no JSON: {error}. {how}") from error
    if not isinstance(data, dict) or data.pop("format", None) not in forms:
        raise PlanError(f'{file} is no {what}: it must say "format": "{forms[0]}". {how}')
    return data
