"""The help of every command, word for word, in help.txt beside this file: what changes there is seen and meant.

python tests/test_help.py > tests/help.txt        # writes it anew
"""

import difflib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from processes import clean_environment

from multipod.cli.main import cli


def helps(command: click.Command, context: click.Context) -> Iterator[str]:
    """The help of a command and of all below it that are shown."""
    yield f"$ {context.command_path} --help\n{command.get_help(context)}\n"
    if isinstance(command, click.Group):
        for name in sorted(command.list_commands(context)):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from helps(below, click.Context(below, context, info_name=name))


def test_help_is_as_it_was_agreed():
    """In a process of its own: Click keeps what the first caller of a command asked of its help."""
    command = [sys.executable, __file__]
    done = subprocess.run(command, capture_output=True, text=True, env=clean_environment(), check=True)
    agreed = Path(__file__).with_name("help.txt").read_text()
    changes = list(difflib.unified_diff(agreed.splitlines(), done.stdout.splitlines(), lineterm="", n=1))
    assert changes == [], "if this is meant: python tests/test_help.py > tests/help.txt"


if __name__ == "__main__":
    width = {"terminal_width": 100, "max_content_width": 100}
    print("\n".join(helps(cli, click.Context(cli, info_name="multipod", **cli.context_settings, **width))), end="")
