"""`multipod doctor`: what is installed and found here, and whether it works."""

import click
from rich.console import Console
from rich.table import Column, Table

from multipod.cli.options import where_options
from multipod.runs.options import RuntimeOptions


@click.command()
@where_options
def doctor(where: RuntimeOptions) -> int:
    """Print versions, devices, cluster and cache, and test the collectives. Exits 1 if a test fails."""
    from multipod.cli.printing.self_tests import describe_devices, describe_machine, make_self_tests, run_test

    console = Console()
    table = Table(Column(), Column(overflow="fold"), show_header=False, title="multipod doctor")
    for name, value in [*describe_machine(where), *describe_devices()]:
        table.add_row(name, value)
    console.print(table)
    results = [(name, run_test(test)) for name, test in make_self_tests(where).items()]
    tests = Table("self-test", "result")
    for name, problem in results:
        tests.add_row(name, problem or "ok")
    console.print(tests)
    return 1 if any(problem for _, problem in results) else 0
