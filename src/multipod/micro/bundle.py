"""Writes a firmware project around a model: C sources, the kernels it needs, a linker script, a Makefile, a main."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multipod.errors import MicroError, nearest
from multipod.micro import library, model_file
from multipod.micro.interpreter import Interpreter, random_inputs
from multipod.micro.schema import NUMBERS, TYPES

ANY_TYPE = 255
CUSTOM = NUMBERS["CUSTOM"]


@dataclass(frozen=True)
class Target:
    """A chip as QEMU emulates it: compiler, flags, machine, and where code and memory lie."""

    prefix: str
    flags: str
    qemu: str
    packages: str
    code: tuple[int, int]
    ram: tuple[int, int]

    @property
    def linker_script(self) -> str:
        """Sections as `c/firmware/startup.c` expects them."""
        small = "" if self.prefix.startswith("arm") else " .sdata .sdata.* .srodata .srodata.*"
        return _LINKER_SCRIPT.format(
            code=self.code[0], code_size=self.code[1], ram=self.ram[0], ram_size=self.ram[1], small=small
        )


_ARM = "gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm"
_RISCV = "gcc-riscv64-unknown-elf picolibc-riscv64-unknown-elf qemu-system-misc"
_AN547 = ((0x10000000, 512 << 10), (0x30000000, 512 << 10))
_MPS2 = ((0x0, 4 << 20), (0x20000000, 4 << 20))


def _cortex(name: str, machine: str, flags: str, code: tuple[int, int], ram: tuple[int, int]) -> Target:
    common = f"-mcpu={name} -mthumb {flags} --specs=nano.specs"
    return Target("arm-none-eabi-", common, f"qemu-system-arm -M {machine}", _ARM, code, ram)


TARGETS = {
    "cortex-m0": _cortex("cortex-m0", "microbit", "-mfloat-abi=soft", (0x0, 256 << 10), (0x20000000, 16 << 10)),
    "cortex-m3": _cortex("cortex-m3", "mps2-an385", "-mfloat-abi=soft", *_MPS2),
    "cortex-m4": _cortex("cortex-m4", "mps2-an386", "-mfloat-abi=soft", *_MPS2),
    "cortex-m55": _cortex("cortex-m55", "mps3-an547", "-mfloat-abi=hard", *_AN547),
    "rv32imac": Target(
        "riscv64-unknown-elf-", "-march=rv32imac -mabi=ilp32 --specs=picolibc.specs",
        "qemu-system-riscv32 -M virt -bios none", _RISCV, (0x80000000, 8 << 20), (0x80800000, 8 << 20),
    ),
}  # fmt: skip
"""Chips that bundles are written for. Another one is a line here."""


def bundle(
    model: bytes, target: str, folder: Path, inputs: Sequence[np.ndarray] | None = None, name: str = "model"
) -> None:
    """Writes a project for `model` into `folder`, with `inputs` built in (random numbers if left out).

    `make` in it builds the firmware, `make run` runs it in QEMU, `make test` compares what it prints with
    `expected.txt`: the outputs of the same runtime on this machine. Files that are there are overwritten.

    Raises:
      MicroError: no such target, or a model that the runtime refuses or that does not fit the chip.
      NativeError: no C compiler on this machine, whose outputs are to be the expected ones.
    """
    if target not in TARGETS:
        raise MicroError(f"bundle: no target {target!r}. {nearest(target, TARGETS)}")
    chip, interpreter = TARGETS[target], Interpreter(model)
    arena = -(-interpreter.arena_bytes // 16) * 16
    if len(model) > chip.code[1] or arena > chip.ram[1]:
        raise MicroError(
            f"bundle: {len(model):,} bytes of model and {arena:,} of arena do not fit {target} as QEMU has it, with "
            f"{chip.code[1]:,} bytes of flash and {chip.ram[1]:,} of RAM. Take a larger target or a smaller model."
        )
    values = list(inputs) if inputs is not None else random_inputs(interpreter)
    outputs = interpreter.run(*values)
    folder.mkdir(parents=True, exist_ok=True)
    _copy_runtime(folder / "runtime")
    names = kernels_of(model)
    files = {
        "model.h": _MODEL_H.format(bytes=len(model), arena=arena, kernels=len(names)),
        "model.c": _array("model_data", model, "const uint8_t model_data[MODEL_BYTES] __attribute__((aligned(16)))"),
        "kernels.c": _kernel_table(names),
        "input.c": _inputs(values),
        "main.c": _MAIN_C,
        "link.ld": chip.linker_script,
        "Makefile": _makefile(chip, name),
        "compare.awk": _COMPARE_AWK,
        "expected.txt": "".join(_printed(number, output) for number, output in enumerate(outputs)),
    }
    for file, text in files.items():
        (folder / file).write_text(text)


def kernels_of(model: bytes) -> list[str]:
    """The names of the C kernels that a model needs: of its operators, those for their types.

    Raises:
      MicroError: the file cannot be read.
    """
    graphs = model_file.read(model)
    if not graphs:
        raise MicroError("bundle: no subgraph of the file can be read. Is it a .tflite file?")
    wanted: list[str] = []
    table = _table()
    for graph in graphs:
        for op in graph.operators:
            number, custom = NUMBERS.get(op.name, CUSTOM), op.name.removeprefix("custom ")
            types = [TYPES[graph.tensors[i].dtype] if i >= 0 else ANY_TYPE for i in op.inputs]
            for name, (builtin, kind, deciding, custom_name) in table.items():
                fits = kind == ANY_TYPE or (deciding < len(types) and types[deciding] == kind)
                if builtin == number and fits and custom_name in ("", custom):
                    wanted.append(name)
    return list(dict.fromkeys(wanted))


def _table() -> dict[str, tuple[int, int, int, str]]:
    """Every kernel of the compiled runtime: its operator's number, its type, which input has it, its custom name."""

    text = (library.source_folder() / "src" / "kernels.h").read_text()
    kernels = {}
    for name in re.findall(r"\bX\((mpm_\w+)\)", text):
        kernel = library.KernelStruct.in_dll(library.load(), name)
        kernels[name] = (kernel.builtin, kernel.type, kernel.type_input, (kernel.custom or b"").decode())
    return kernels


def _copy_runtime(folder: Path) -> None:
    source = library.source_folder()
    for part in ("include", "src"):
        shutil.copytree(source / part, folder / part, dirs_exist_ok=True)
    (folder / "src" / "all_kernels.c").unlink()
    shutil.copy(source / "firmware" / "startup.c", folder / "startup.c")


def _bytes_text(data: bytes) -> str:
    rows = (", ".join(str(byte) for byte in data[at : at + 24]) for at in range(0, len(data), 24))
    return ",\n    ".join(rows)


def _array(name: str, data: bytes, declaration: str) -> str:
    return f'/* Written by multipod. */\n#include "model.h"\n\n{declaration} = {{\n    {_bytes_text(data)}}};\n'


def _inputs(values: Sequence[np.ndarray]) -> str:
    parts = [
        f"static const uint8_t input_{n}[] __attribute__((aligned(16))) = {{\n    "
        f"{_bytes_text(np.ascontiguousarray(value).tobytes())}}};\n"
        for n, value in enumerate(values)
    ]
    table = ", ".join(f"input_{n}" for n in range(len(values)))
    return '/* What main gives the model. */\n#include "model.h"\n\n' + "".join(parts) + (
        f"const uint8_t *const model_inputs[] = {{{table}}};\n"
    )  # fmt: skip


def _kernel_table(names: Sequence[str]) -> str:
    declared = "".join(f"extern const struct mpm_kernel {name};\n" for name in names)
    listed = ", ".join(f"&{name}" for name in names)
    return (
        "/* The kernels that the model needs; the linker drops all others. */\n"
        f'#include "model.h"\n\n{declared}\nconst struct mpm_kernel *const model_kernels[] = {{{listed}}};\n'
    )


def _printed(number: int, output: np.ndarray) -> str:
    """What main prints for an output: its bytes, and that they are of float32 where they are."""
    kind = " float32" if output.dtype == np.float32 else ""
    return f"output {number}{kind}:" + "".join(f" {byte:02x}" for byte in output.tobytes()) + "\n"


def _makefile(chip: Target, name: str) -> str:
    return _MAKEFILE.format(
        prefix=chip.prefix, flags=chip.flags, qemu=chip.qemu, packages=chip.packages, name=re.sub(r"\W", "_", name)
    )


_MODEL_H = """\
/* Written by multipod: the model, its kernels, and how much memory it needs. */
#ifndef MODEL_H
#define MODEL_H
#include <mpm.h>

#define MODEL_BYTES {bytes}u
#define MODEL_ARENA_BYTES {arena}u /* measured with 64-bit pointers: a 32-bit chip needs less */
#define MODEL_KERNELS {kernels}u
extern const uint8_t model_data[MODEL_BYTES];
extern const struct mpm_kernel *const model_kernels[];
extern const uint8_t *const model_inputs[];
#endif
"""

_MAIN_C = """\
/* Runs the model once on the inputs of input.c and prints its outputs. The place to begin a program of your own. */
#include <string.h>

#include "model.h"

void firmware_print(const char *text); /* startup.c: by semihosting */

static uint8_t memory[MODEL_ARENA_BYTES] __attribute__((aligned(16)));

static void print_byte(uint8_t value) {
    const char text[4] = {' ', "0123456789abcdef"[value >> 4], "0123456789abcdef"[value & 15], 0};
    firmware_print(text);
}

static void print_output(uint32_t number, const struct mpm_tensor *t) {
    const char digit[2] = {(char)('0' + number % 10), 0};
    uint32_t i;
    firmware_print("output ");
    firmware_print(digit);
    firmware_print(t->type == MPM_FLOAT32 ? " float32:" : ":");
    for (i = 0; i < t->bytes; i++) print_byte(((const uint8_t *)t->data)[i]);
    firmware_print("\\n");
}

static void print_number(const char *name, int32_t value) {
    char text[12];
    int at = 11;
    uint32_t rest = value < 0 ? 0u - (uint32_t)value : (uint32_t)value;
    text[at] = 0;
    do {
        text[--at] = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest != 0);
    firmware_print(name);
    if (value < 0) firmware_print("-");
    firmware_print(text + at);
}

/* All that the runtime knows of what went wrong; `at` is what the status says in mpm.h. */
static int print_error(const struct mpm_interpreter *m) {
    firmware_print(m->error.what);
    print_number(": status ", m->error.status);
    if (m->error.status == MPM_ARENA_TOO_SMALL) {
        print_number(", bytes needed ", (int32_t)m->error.at);
        print_number(", bytes given ", (int32_t)sizeof memory);
    } else {
        print_number(", at ", (int32_t)m->error.at);
    }
    print_number(", subgraph ", m->error.subgraph);
    print_number(", operator ", m->error.op);
    print_number(", tensor ", m->error.tensor);
    firmware_print("\\n");
    return 1;
}

int main(void) {
    static struct mpm_interpreter m;
    struct mpm_arena arena;
    struct mpm_tensor t;
    uint32_t i;
    mpm_arena_init(&arena, memory, sizeof memory);
    if (mpm_init(&m, model_data, MODEL_BYTES, &arena, model_kernels, MODEL_KERNELS) != MPM_OK) return print_error(&m);
    for (i = 0; i < mpm_input_count(&m); i++) {
        if (mpm_input_info(&m, i, &t) != MPM_OK) return 1;
        memcpy(t.data, model_inputs[i], t.bytes);
    }
    if (mpm_run(&m) != MPM_OK) return print_error(&m);
    for (i = 0; i < mpm_output_count(&m); i++)
        if (mpm_output_info(&m, i, &t) == MPM_OK) print_output(i, &t);
    return 0;
}
"""

_MAKEFILE = """\
# make: builds {name}.elf.  make run: runs it in QEMU.  make test: compares with what this runtime gave on the host.
# Debian packages: {packages}
CC := {prefix}gcc
FLAGS := {flags}
CFLAGS := -std=c11 -O2 -ffunction-sections -fdata-sections -Wall -Wextra -Iruntime/include $(FLAGS)
LDFLAGS := $(FLAGS) -nostartfiles -T link.ld -Wl,--gc-sections
SOURCES := main.c model.c input.c kernels.c runtime/startup.c $(wildcard runtime/src/*.c runtime/src/kernels/*.c)
QEMU := {qemu} -nographic -monitor none -serial none -semihosting-config enable=on,target=native

{name}.elf: $(SOURCES:.c=.o) link.ld
	$(CC) $(LDFLAGS) $(SOURCES:.c=.o) -lm -o $@
	{prefix}size $@

$(SOURCES:.c=.o): model.h

run: {name}.elf
	@$(QEMU) -kernel $<

test: {name}.elf
	$(QEMU) -kernel $< > printed.txt 2>&1
	awk -f compare.awk expected.txt printed.txt

clean:
	rm -f {name}.elf printed.txt $(SOURCES:.c=.o)

.PHONY: run test clean
"""

_COMPARE_AWK = """\
# awk -f compare.awk expected.txt printed.txt: the same bytes; of float32 the same numbers to 1e-5 of the largest, since
# another C library rounds exp and its like otherwise in the last place.
function byte(hex) { return 16 * index(digits, substr(hex, 1, 1)) + index(digits, substr(hex, 2, 1)) - 17 }
function real(text, at,    part, low, high, exponent, value) {
    split(substr(text, at, 11), part, " ")
    low = byte(part[1]) + 256 * byte(part[2]) + 65536 * (byte(part[3]) % 128)
    high = byte(part[4])
    exponent = 2 * (high % 128) + (byte(part[3]) > 127)
    if (exponent == 255) return substr(text, at, 11)
    value = exponent ? (1 + low / 8388608) * 2 ^ (exponent - 127) : low / 8388608 * 2 ^ -126
    return high > 127 ? -value : value
}
function is_finite(value) { return value !~ / / }
function apart(known, found,    at, largest, left, right) {
    if (length(known) != length(found) || index(known, ":") != index(found, ":")) return 1
    at = index(known, ":") + 2
    if (substr(known, 1, at) !~ /float32:/ || substr(known, 1, at - 1) != substr(found, 1, at - 1)) return 1
    for (k = at; k < length(known); k += 12) {
        left = real(known, k)
        if (is_finite(left) && left > largest) largest = left
        if (is_finite(left) && -left > largest) largest = -left
    }
    for (k = at; k < length(known); k += 12) {
        left = real(known, k)
        right = real(found, k)
        if (left == right) continue
        if (!is_finite(left) || !is_finite(right)) return 1
        if (left - right > 1e-5 * largest || right - left > 1e-5 * largest) return 1
    }
    return 0
}
BEGIN { digits = "0123456789abcdef" }
NR == FNR { expected[FNR] = $0; lines = FNR; next }
{ seen = FNR }
$0 != expected[FNR] {
    if (apart(expected[FNR], $0)) { print "expected " expected[FNR] "\\nprinted  " $0; wrong = 1 } else near = 1
}
END {
    if (seen != lines) { print seen + 0 " lines were printed, and " lines " are expected"; wrong = 1 }
    if (!wrong) print near ? "the same numbers as on the host, to 1e-5" : "the same bytes as on the host"
    exit wrong
}
"""

_LINKER_SCRIPT = """\
/* Code and memory of the chip, as QEMU has it: change these two lines for a board. */
MEMORY {{
  CODE (rx) : ORIGIN = {code:#010x}, LENGTH = {code_size}
  RAM (rw) : ORIGIN = {ram:#010x}, LENGTH = {ram_size}
}}
ENTRY(reset_handler)
SECTIONS {{
  .text : {{ KEEP(*(.vectors)) *(.text .text.* .rodata .rodata.*) }} > CODE
  .ARM.exidx : {{ *(.ARM.exidx*) }} > CODE
  .data : ALIGN(8) {{ __data_start = .; *(.data .data.*{small}) . = ALIGN(8); __data_end = .; }} > RAM AT > CODE
  __data_load = LOADADDR(.data);
  .bss (NOLOAD) : ALIGN(16) {{
    __bss_start = .; *(.bss .bss.* .sbss .sbss.* COMMON) . = ALIGN(8); __bss_end = .;
  }} > RAM
  __stack_top = ORIGIN(RAM) + LENGTH(RAM);
}}
"""
