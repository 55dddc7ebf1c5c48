"""The table of operators against the C sources, the schema, and what may be imported."""

import re
import subprocess
import sys

import pytest
from processes import clean_environment

from multipod.micro import library
from multipod.micro.header import operator_header
from multipod.micro.operators.table import OPERATORS
from multipod.micro.schema import NUMBERS

C = library.source_folder()


def test_the_c_header_has_the_numbers_of_the_table():
    written = (C / "include" / "mpm_ops.h").read_text()
    assert written == operator_header(), "run python -m multipod.micro.header > c/include/mpm_ops.h"


def test_the_numbers_are_those_of_the_schema():
    codes = pytest.importorskip("ai_edge_litert.schema_py_generated").BuiltinOperator
    assert {name: number for name, number in vars(codes).items() if name.isupper()} == NUMBERS


def test_kernels_name_their_operators():
    bare = re.compile(r"const struct mpm_kernel \w+ = \{\d|^(FLOAT_)?OPERATOR\(\w+, \d", re.MULTILINE)
    assert [path.name for path in C.glob("src/**/*.c") if bare.search(path.read_text())] == []


def test_every_operator_that_is_exported_has_a_kernel_or_a_formula():
    kernels = set(re.findall(r"X\(mpm_(\w+)\)", (C / "src" / "kernels.h").read_text()))
    lacking = [
        name
        for name, operator in OPERATORS.items()
        if operator.evaluate and not operator.formula and not any(k.startswith(name.lower()) for k in kernels)
    ]
    assert lacking == ["TABLE"]  # CAST, ADD and GATHER stand for it


def test_lines_of_c_are_at_most_120_columns_long():
    sources = [path for path in C.rglob("*.[ch]") if "build" not in path.parts]
    assert [
        f"{path.relative_to(C)}:{number}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ] == []


def test_the_interpreter_needs_no_jax():
    code = "import sys, multipod.micro.interpreter, multipod.micro.bundle; raise SystemExit('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=clean_environment(), check=False)
    assert done.returncode == 0
