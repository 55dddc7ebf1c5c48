"""`--json`: one JSON value for other programs, in place of tables."""

import json
import math
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")


def print_json(value: Any) -> None:
    """Prints a value on standard output as JSON."""
    click.echo(json.dumps(plain(value), indent=1))


def plain(value: Any) -> Any:
    """The value as JSON has it.

    Fields of dataclasses become named values, arrays lists, fractions and arrays' scalars numbers, paths text, and what
    is not finite None.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
