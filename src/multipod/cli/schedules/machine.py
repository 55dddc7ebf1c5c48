"""The options that say which machine is meant, and how much data: shared by the commands that need no devices."""

import functools
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, TypeVar

import click

from multipod.cli import completion
from multipod.topology.machines import parse

F = TypeVar("F", bound=Callable[..., Any])

UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
"""What may follow a number of bytes. A B after k, M, G and T is taken too."""


def on_option(required: bool = False) -> Callable[[F], F]:
    """The option --on, which names a machine."""
    about = "mesh:8x8, torus:16x32, or see `topology list`."
    return click.option("--on", required=required, metavar="MACHINE", help=about, shell_complete=completion.machines)


def machine_options(command: F) -> F:
    """Adds --on, --fail and --fail-link; the command gets one argument `topology`."""

    @on_option(required=True)
    @functools.wraps(command)
    def with_machine(*args: Any, on: str, fail: tuple[str, ...], fail_link: tuple[str, ...], **kwargs: Any) -> Any:
        return command(*args, topology=parse(on, fail, fail_link), **kwargs)

    return failure_options(with_machine)  # type: ignore[return-value]


def failure_options(command: F) -> F:
    """Adds --fail and --fail-link; the command gets `fail` and `fail_link`, as `parse` takes them."""
    fail = click.option(
        "--fail",
        multiple=True,
        metavar="PLACES",
        help="Failed chips: 2-3,2-5 is rows 2 to 3, columns 2 to 5; 0,1 is one chip. Repeatable.",
    )
    fail_link = click.option(
        "--fail-link",
        multiple=True,
        metavar="END-END",
        help="A failed link, by its two ends: 0,1-0,2. Repeatable.",
    )
    return fail(fail_link(command))


class Bytes(click.ParamType):
    """A number of bytes, as 100M, 64MiB or 1.5G; an int of at least 1."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number of bytes that `value` says; a number is taken as it is."""
        found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*([A-Za-z]*)", str(value).strip())
        unit = found and (found[2] if found[2] in UNITS else found[2].removesuffix("B"))
        if not found or unit not in UNITS:
            self.fail(
                f"{value!r} is no size. Write a number and one of k, M, G, T, KiB, MiB, GiB, TiB, as 100M.", param
            )
        size = Fraction(found[1]) * UNITS[unit]
        if size.denominator != 1 or size < 1:
            self.fail(f"{value!r} is {float(size):g} bytes. Give a whole number of bytes, at least 1.", param)
        return int(size)


BYTES = Bytes()
