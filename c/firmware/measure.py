"""Builds the runtime for emulated chips, runs models there, compares with this machine, counts instructions and bytes.

    python c/firmware/measure.py [--models DIR] [--targets cortex-m4,...] [--out FILE.json]

Without --models it uses small ones of its own. It installs nothing, and says which Debian packages it lacks.
Instructions are counted by a plugin of QEMU between two marks round `mpm_run`; a second build counts `mpm_init`. They
are no cycles. Code is what the linker kept of the runtime, without model, libc, libgcc and main.
"""

import argparse
import collections
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

FIRMWARE = Path(__file__).parent
RUNTIME = FIRMWARE.parent
ARM_PACKAGES = "gcc-arm-none-eabi libnewlib-arm-none-eabi qemu-system-arm"
RISCV_PACKAGES = "gcc-riscv64-unknown-elf picolibc-riscv64-unknown-elf qemu-system-misc"
ROOM = 4096  # bytes of RAM that the stack and the interpreter get on the smallest chip


@dataclass(frozen=True)
class Target:
    """A chip that QEMU emulates. `ram`: bytes for the arena, with some left for the stack."""

    compiler: str
    flags: tuple[str, ...]
    script: str
    emulator: str
    machine: str
    ram: int
    flash: int
    packages: str


def cortex(cpu: str, machine: str, script: str, ram: int, flash: int, *flags: str) -> Target:
    chosen = (f"-mcpu={cpu}", "-mthumb", *(flags or ("-mfloat-abi=soft",)))
    return Target("arm-none-eabi-gcc", chosen, script, "qemu-system-arm", machine, ram, flash, ARM_PACKAGES)


TARGETS = {
    "cortex-m0": cortex("cortex-m0", "microbit", "microbit.ld", (16 << 10) - ROOM, 256 << 10),
    "cortex-m3": cortex("cortex-m3", "mps2-an385", "mps2.ld", 3 << 20, 4 << 20),
    "cortex-m4": cortex("cortex-m4", "mps2-an386", "mps2.ld", 3 << 20, 4 << 20),
    "cortex-m55": cortex("cortex-m55", "mps3-an547", "an547.ld", 400 << 10, 512 << 10, "-mfloat-abi=hard"),
    "rv32imac": Target(
        "riscv64-unknown-elf-gcc",
        ("-march=rv32imac", "-mabi=ilp32", "-mcmodel=medany", "--specs=picolibc.specs"),
        "rv32.ld", "qemu-system-riscv32", "virt", 4 << 20, 8 << 20, RISCV_PACKAGES,
    ),
}  # fmt: skip


def missing(targets: list[str]) -> list[str]:
    """What must be installed, in words."""
    lacks = []
    for name in targets:
        target = TARGETS[name]
        if not shutil.which(target.compiler) or not shutil.which(target.emulator):
            lacks.append(f"{name} needs {target.compiler} and {target.emulator}: apt-get install {target.packages}")
    return lacks


def run(*command: object, where: Path | None = None, timeout: float = 300) -> str:
    done = subprocess.run([*map(str, command)], cwd=where, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def compile_runtime(target: Target, folder: Path, extra: tuple[str, ...] = ()) -> list[Path]:
    """Object files: the core for size, kernels and arithmetic for speed, as TFLM's own Makefile does."""
    folder.mkdir(parents=True, exist_ok=True)
    common = (*target.flags, "-std=c11", "-Wall", "-Wextra", "-Werror", "-DMPM_NO_TEXT", "-ffunction-sections")
    common += ("-fdata-sections", f"-I{RUNTIME / 'include'}", *extra)
    made = []
    for source in sorted(RUNTIME.glob("src/**/*.c")):
        if source.stem == "all_kernels":
            continue
        fast = source.parent.name == "kernels" or source.stem in ("fixed", "sigmoid", "flat")
        out = folder / f"{'kernel' if source.parent.name == 'kernels' else 'core'}_{source.stem}.o"
        run(target.compiler, *common, "-O2" if fast else "-Os", "-c", source, "-o", out)
        made.append(out)
    return made


def kernels_of(model: bytes) -> list[str]:
    """The kernels that a model needs, as for a bundle."""
    from multipod.micro.bundle import kernels_of as needed

    return sorted(name.removeprefix("mpm_") for name in needed(model))


def write_model(model: bytes, arena: int, folder: Path) -> None:
    names = kernels_of(model)
    (folder / "model.h").write_text(
        f"#include <mpm.h>\n#define MODEL_ARENA_BYTES {arena}\nextern const uint8_t model_data[];\n"
        "extern const uint32_t model_bytes, model_kernels_count;\n"
        "extern const struct mpm_kernel *const model_kernels[];\n",
        encoding="utf-8",
    )
    (folder / "model.c").write_text(
        '#include "model.h"\n'
        + "".join(f"extern const struct mpm_kernel mpm_{name};\n" for name in names)
        + "__attribute__((aligned(16))) const uint8_t model_data[] = {"
        + ",".join(map(str, model))
        + f"}};\nconst uint32_t model_bytes = {len(model)}, model_kernels_count = {len(names)};\n"
        + "const struct mpm_kernel *const model_kernels[] = {"
        + ", ".join(f"&mpm_{name}" for name in names)
        + "};\n",
        encoding="utf-8",
    )


def build(target: Target, objects: list[Path], folder: Path, *defines: str) -> Path:
    image = folder / "image.elf"
    common = (
        *target.flags,
        "-std=c11",
        "-O2",
        "-ffunction-sections",
        f"-I{RUNTIME / 'include'}",
        f"-I{folder}",
        *defines,
    )
    own = []
    for source in (folder / "model.c", FIRMWARE / "main.c", FIRMWARE / "startup.c"):
        own.append(folder / f"{source.stem}.o")
        run(target.compiler, *common, "-c", source, "-o", own[-1])
    specs = () if "riscv" in target.compiler else ("--specs=nosys.specs",)
    run(target.compiler, *target.flags, "-nostartfiles", *specs, f"-L{FIRMWARE}", "-T", FIRMWARE / target.script,
        "-Wl,--gc-sections", "-Wl,--no-warn-rwx-segments", f"-Wl,-Map={folder / 'map.txt'}", *own, *objects, "-lm",
        "-o", image)  # fmt: skip
    return image


def code_bytes(folder: Path) -> dict[str, int]:
    """Bytes of the runtime that the linker kept, by object file."""
    text = (folder / "map.txt").read_text(encoding="utf-8")
    text = text[text.index("Linker script and memory map") :]
    found: collections.Counter[str] = collections.Counter()
    pattern = r"^ \.(?:text|rodata|srodata|data)\S*\s+(?:\n\s+)?0x[0-9a-f]+\s+0x([0-9a-f]+)\s+(\S+)$"
    for size, name in re.findall(pattern, text, re.M):
        stem = Path(name).stem
        if stem.startswith(("core_", "kernel_")):
            found[stem] += int(size, 16)
    return dict(found)


def emulate(target: Target, image: Path, folder: Path, plugin: Path) -> dict[str, object]:
    """What the firmware prints, with the instructions between its marks, in all and by function."""
    nm = target.compiler.replace("gcc", "nm")
    lines = run(nm, "-S", "-n", image).splitlines()
    places = {line.split()[-1]: int(line.split()[0], 16) & ~1 for line in lines if len(line.split()) >= 3}
    symbols = [line.split() for line in lines if len(line.split()) == 4 and line.split()[2] in "tT"]
    table = "".join(
        f"{int(at, 16) & ~1:x} {(int(at, 16) & ~1) + int(size, 16):x} {name}\n" for at, size, _, name in symbols
    )
    (folder / "symbols").write_text(table, encoding="utf-8")
    extra = ("-bios", "none") if "riscv" in target.emulator else ()
    said = run(
        target.emulator, "-M", target.machine, *extra, "-nographic", "-monitor", "none", "-serial", "none",
        "-semihosting-config", "enable=on,target=native", "-icount", "shift=6", "-kernel", image,
        "-plugin", f"{plugin},begin={places['bench_begin']:#x},end={places['bench_end']:#x},syms={folder / 'symbols'}",
    )  # fmt: skip
    result: dict[str, object] = {}
    functions: dict[str, int] = {}
    for line in said.splitlines():
        if match := re.fullmatch(r" +(\d+) (\S+)", line):
            functions[match[2]] = functions.get(match[2], 0) + int(match[1])
        elif match := re.fullmatch(r"(\w+) ([0-9a-f]+)", line):
            result[match[1]] = match[2] if match[1] == "hash" else int(match[2])
    return result | {"functions": functions}


def expected_hash(model: bytes) -> str:
    """FNV-1a of the outputs on this machine, for the same input as in main.c."""
    from multipod.micro import Interpreter

    interpreter = Interpreter(model)
    state, arrays = 12345, []
    for own in interpreter.inputs:
        words = np.empty(own.size if own.dtype == np.float32 else own.nbytes, np.uint32)
        for k in range(len(words)):
            state = (state * 1664525 + 1013904223) & 0xFFFFFFFF
            words[k] = state
        if own.dtype == np.float32:
            arrays.append((words.astype(np.int32) / np.float32(2**31)).astype(np.float32).reshape(own.shape))
        else:
            arrays.append((words >> 24).astype(np.uint8).view(own.dtype).reshape(own.shape))
    value = 2166136261
    for output in interpreter.run(*arrays):
        for byte in output.tobytes():
            value = (value ^ byte) * 16777619 & 0xFFFFFFFF
    return f"{value:x}"


def own_models() -> dict[str, bytes]:
    """A dense layer and a small convolutional network, made with the writer of the tests."""
    sys.path.insert(0, str(RUNTIME.parent / "tests"))
    import tflite_networks

    return tflite_networks.networks()


def measure(
    name: str, target: Target, objects: list[Path], model: bytes, folder: Path, plugin: Path
) -> dict[str, object]:
    folder.mkdir(parents=True, exist_ok=True)
    write_model(model, target.ram, folder)
    started = emulate(target, build(target, objects, folder, "-DBENCH_INIT"), folder, plugin)
    result = emulate(target, build(target, objects, folder), folder, plugin)
    if "hash" not in result:
        raise SystemExit(f"{name}: the firmware did not come to an end: {result}")
    return result | {
        "init_instructions": started.get("instructions"),
        "init_functions": started["functions"],
        "code": code_bytes(folder),
    }


def summary(found: dict) -> str:
    started, code = found["init_instructions"] or 0, sum(found["code"].values())
    figures = f"run {found['instructions']:>11,}  init {started:>9,}  arena {found['needed']:>7,}  code {code:>6,}"
    return f"{found['hash']:>8}  {figures}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="a folder of .tflite files; default: small ones of its own")
    parser.add_argument("--targets", default=",".join(TARGETS), help="comma-separated; default: all")
    parser.add_argument("--define", action="append", default=[], help="for the compiler, as MPM_PORTABLE")
    parser.add_argument("--out", type=Path, help="write all figures as JSON")
    chosen = parser.parse_args()
    names = chosen.targets.split(",")
    if lacks := missing(names):
        print("\n".join(lacks), file=sys.stderr)
        return 2
    models = (
        {path.stem: path.read_bytes() for path in sorted(chosen.models.glob("*.tflite"))}
        if chosen.models
        else own_models()
    )
    figures: dict[str, dict[str, object]] = {}
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        plugin = Path(scratch) / "libicount.so"
        run("cc", "-O2", "-shared", "-fPIC", "-o", plugin, FIRMWARE / "icount.c")
        for name in names:
            target = TARGETS[name]
            objects = compile_runtime(target, Path(scratch) / name, tuple(f"-D{one}" for one in chosen.define))
            for label, model in models.items():
                from multipod.micro import Interpreter

                if Interpreter(model).arena_bytes > target.ram or len(model) + (64 << 10) > target.flash:
                    print(f"{name:11} {label:26} does not fit")
                    continue
                found = measure(f"{name} {label}", target, objects, model, Path(scratch) / name / label, plugin)
                same = found["hash"] == expected_hash(model)
                wrong += not same
                figures[f"{name} {label}"] = found
                print(f"{name:11} {label:26} {'same' if same else 'DIFFERENT'} {summary(found)}", flush=True)
    if chosen.out:
        chosen.out.write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
