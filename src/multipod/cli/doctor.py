"""`multipod doctor`: what is installed and found here, and whether it works."""

import os
from typing import Any

import click
from rich.console import Console
from rich.table import Column, Table

from multipod.cli.flags import SETTINGS
from multipod.cli.json_output import json_option, print_json
from multipod.cli.options import where_options
from multipod.runs.options import RuntimeOptions


def settings_table(platform: str) -> Table:
    """The settings that decide how fast a platform is, and which of them are set here."""
    columns = "setting", "set to", "first try", Column("what it does", overflow="fold")
    table = Table(*columns, title=f"settings that matter on {platform}")
    for one in SETTINGS[platform]:
        where = f" (in {one.variable})" if one.variable != one.name else ""
        table.add_row(f"{one.name}{where}", one.found(os.environ) or "-", one.value or "-", f"{one.what}; {one.source}")
    return table


def settings_figures(platform: str) -> dict[str, Any]:
    """What `--json` prints of the settings: each with what it is set to here, or None."""
    settings = [{**vars(one), "set_to": one.found(os.environ) or None} for one in SETTINGS[platform]]
    return {"platform": platform, "settings": settings}


@click.command()
@click.option("--flags-for", type=click.Choice(sorted(SETTINGS)), help="Print a platform's settings alone.")
@json_option
@where_options
def doctor(flags_for: str | None, as_json: bool, where: RuntimeOptions) -> int:
    """Print versions, devices, cluster, cache and settings that matter here, and test the collectives.

    Exits 1 if a test fails.
    """
    if flags_for and as_json:
        print_json(settings_figures(flags_for))
        return 0
    if flags_for:
        Console().print(settings_table(flags_for))
        return 0
    from multipod.cli.printing.self_tests import (
        describe_devices,
        describe_machine,
        device_platform,
        make_self_tests,
        run_test,
    )

    if as_json:
        found = dict([*describe_machine(where), *describe_devices()])
        problems = {name: run_test(test) for name, test in make_self_tests(where).items()}
        print_json({"found": found, **settings_figures(device_platform()), "self_tests": problems})
        return 1 if any(problems.values()) else 0
    console = Console()
    table = Table(Column(), Column(overflow="fold"), show_header=False, title="multipod doctor")
    for name, value in [*describe_machine(where), *describe_devices()]:
        table.add_row(name, value)
    console.print(table)
    console.print(settings_table(device_platform()))
    results = [(name, run_test(test)) for name, test in make_self_tests(where).items()]
    tests = Table("self-test", "result")
    for name, problem in results:
        tests.add_row(name, problem or "ok")
    console.print(tests)
    return 1 if any(problem for _, problem in results) else 0
