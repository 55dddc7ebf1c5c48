"""The help of every command, word for word, in help.txt beside this file: what changes there is seen and meant.

python tests/test_help.py        # writes it anew
"""

import difflib
from collections.abc import Iterator
from pathlib import Path

import click

from multipod.cli.main import cli

FILE = Path(__file__).with_name("help.txt")


def helps(command: click.Command, context: click.Context) -> Iterator[str]:
    """The help of a command and of all below it that are shown."""
    yield f"$ {context.command_path} --help\n{command.get_help(context)}\n"
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from helps(below, click.Context(below, context, info_name=name))


def whole_help() -> str:
    """All of it, for a terminal of 100 columns."""
    width = {"terminal_width": 100, "max_content_width": 100}
    return "\n".join(helps(cli, click.Context(cli, info_name="multipod", **cli.context_settings, **width)))


def test_help_is_as_it_was_agreed():
    changes = list(difflib.unified_diff(FILE.read_text().splitlines(), whole_help().splitlines(), lineterm="", n=1))
    assert changes == [], "if this is meant: python tests/test_help.py"


if __name__ == "__main__":
    FILE.write_text(whole_help())
