"""Writes `c/include/mpm_ops.h`, the numbers of operators by name, from `schema.NUMBERS`.

python -m multipod.micro.header > c/include/mpm_ops.h
"""

from multipod.micro.schema import NUMBERS


def operator_header() -> str:
    """The text of the header."""
    lines = [f"    MPM_OP_{name} = {number}," for name, number in NUMBERS.items()]
    return (
        "/* The schema's numbers of operators. Written by `python -m multipod.micro.header`; change that table. */\n"
        "#ifndef MPM_OPS_H\n#define MPM_OPS_H\n\nenum mpm_builtin {\n" + "\n".join(lines) + "\n};\n\n#endif\n"
    )


if __name__ == "__main__":
    print(operator_header(), end="")
