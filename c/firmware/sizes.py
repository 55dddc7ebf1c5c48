"""The bytes of every function of the runtime on one chip, as a Markdown table.

    python c/firmware/sizes.py [--target cortex-m4] [--define MPM_PORTABLE] [--markdown FILE.md]

Compiled as measure.py does. A program holds those functions only that its kernels call.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import measure


def functions(target: measure.Target, objects: list[Path]) -> dict[str, dict[str, int]]:
    """Bytes by object file, then by function or table."""
    nm = target.compiler.replace("gcc", "nm")
    found: dict[str, dict[str, int]] = {}
    for path in objects:
        own: dict[str, int] = {}
        for line in measure.run(nm, "-S", "--size-sort", "--reverse-sort", path).splitlines():
            _, size, kind, name = line.split()
            if kind.lower() in "trd":
                own[name.split(".")[0]] = own.get(name.split(".")[0], 0) + int(size, 16)
        found[path.stem] = own
    return found


def table(target: str, flags: str, found: dict[str, dict[str, int]]) -> str:
    lines = [f"# Sizes by function, {target}", "", "Bytes of code and of constants in flash, " + flags + ":", ""]
    lines += ["```", "python c/firmware/sizes.py" + f" --target {target} --markdown docs/results/micro_sizes.md", "```"]
    lines += ["", "| file | bytes | functions |", "| --- | ---: | --- |"]
    for name, own in found.items():
        listed = ", ".join(f"{function} {size:,}" for function, size in own.items())
        lines.append(f"| {name} | {sum(own.values()):,} | {listed} |")
    lines.append(f"| all | {sum(sum(own.values()) for own in found.values()):,} | |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="cortex-m4", choices=measure.TARGETS)
    parser.add_argument("--define", action="append", default=[], help="for the compiler, as MPM_PORTABLE")
    parser.add_argument("--markdown", type=Path, help="write the table there instead of printing it")
    chosen = parser.parse_args()
    if lacks := measure.missing([chosen.target]):
        print("\n".join(lacks), file=sys.stderr)
        return 2
    target = measure.TARGETS[chosen.target]
    with tempfile.TemporaryDirectory() as scratch:
        objects = measure.compile_runtime(target, Path(scratch), tuple(f"-D{one}" for one in chosen.define))
        flags = "core `-Os`, kernels `-O2`" + "".join(f", `-D{one}`" for one in chosen.define)
        text = table(chosen.target, flags, functions(target, objects))
    if chosen.markdown:
        chosen.markdown.write_text(text, encoding="utf-8")
    else:
        print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
