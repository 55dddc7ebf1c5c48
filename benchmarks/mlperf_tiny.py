"""MLPerf Tiny's four networks through the exporter in int8: bytes compared with TFLM and LiteRT, memory with TFLM.

    python benchmarks/mlperf_tiny.py [--models DIR]

The weights are by chance. With --models the files are kept, for `c/firmware/measure.py --models DIR`.
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import machine
import numpy as np
from flax import nnx

from multipod.micro import Interpreter, convert
from multipod.micro.exporter import Exported
from multipod.micro.graph import to_stored

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from tiny_networks import FULL, Network

INPUTS = 8


def said_on_stderr(speak: Callable[[], object]) -> str:
    """What C++ code prints there."""
    with tempfile.TemporaryFile() as file:
        kept = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            speak()
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        file.seek(0)
        return file.read().decode()


def outputs_of_tflm(model: bytes, inputs: list[np.ndarray]) -> tuple[list[np.ndarray], int]:
    """TFLM's outputs, and its arena in bytes."""
    from tflite_micro import runtime

    interpreter = runtime.Interpreter.from_bytes(model, arena_size=4 << 20)
    found = []
    for x in inputs:
        interpreter.set_input(x, 0)
        interpreter.invoke()
        found.append(np.array(interpreter.get_output(0)))
    total = re.search(r"Arena allocation total (\d+) bytes", said_on_stderr(interpreter.print_allocations))
    return found, int(total[1]) if total else 0


def outputs_of_litert(model: bytes, inputs: list[np.ndarray]) -> list[np.ndarray]:
    from ai_edge_litert.interpreter import Interpreter as LiteRT
    from ai_edge_litert.interpreter import OpResolverType

    interpreter = LiteRT(model_content=model, experimental_op_resolver_type=OpResolverType.BUILTIN_REF, num_threads=1)
    interpreter.allocate_tensors()
    (given,), (made,) = interpreter.get_input_details(), interpreter.get_output_details()
    found = []
    for x in inputs:
        interpreter.set_tensor(given["index"], x)
        interpreter.invoke()
        found.append(interpreter.get_tensor(made["index"]))
    return found


def differing(ours: list[np.ndarray], theirs: list[np.ndarray]) -> str:
    """How many numbers differ, and by how much at most."""
    steps = np.abs(np.stack(ours).astype(int) - np.stack(theirs))
    return f"{(steps > 0).sum():,} of {steps.size:,}" + (f", by {steps.max()}" if steps.any() else "")


def exported_from(network: Network) -> tuple[Exported, list[np.ndarray]]:
    module = network.make(nnx.Rngs(0))
    examples = network.examples(2 * INPUTS)
    exported = convert(lambda x: module(x), examples[0], calibration=examples[:INPUTS], report=False)
    return exported, [to_stored(x, exported.graph.inputs[0]) for x in examples[INPUTS:]]


def row(name: str, network: Network, folder: Path | None) -> list[str]:
    exported, inputs = exported_from(network)
    if folder:
        (folder / (re.sub(r"\W+", "_", name).strip("_") + ".tflite")).write_bytes(exported.model)
    interpreter = Interpreter(exported.model)
    ours = [interpreter.run(x)[0] for x in inputs]
    theirs, arena = outputs_of_tflm(exported.model, inputs)
    return [
        name, f"{len(exported.model):,}", f"{len(exported.graph.ops)}", f"{interpreter.arena_bytes:,}", f"{arena:,}",
        f"{interpreter.arena_bytes / max(1, arena):.2f}", differing(ours, theirs),
        differing(ours, outputs_of_litert(exported.model, inputs)),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="a folder for the .tflite files")
    folder = parser.parse_args().models
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
    print(machine.headline(machine.facts()))
    head = ["network", "file, bytes", "operators", "our arena", "TFLM's arena", "ratio", "not as TFLM", "not as LiteRT"]
    print("| " + " | ".join(head) + " |\n| --- | " + "---: | " * (len(head) - 1))
    for name, network in FULL.items():
        print("| " + " | ".join(row(name, network, folder)) + " |", flush=True)


if __name__ == "__main__":
    main()
