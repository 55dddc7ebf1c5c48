"""`--json`: one JSON value for other programs, in place of tables."""

import json
import math
from typing import Any

import click

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON in place of tables.")


def print_json(value: Any) -> None:
    """Prints a value on standard output as JSON."""
    click.echo(json.dumps(plain(value), indent=1))


def plain(value: Any) -> Any:
    """The value as JSON has it: fractions and arrays' scalars become numbers, what is not finite None."""
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
