"""What schedules send as programs of JAX devices, over what they are proven to send; devices that need not be here.

    python benchmarks/executed_bytes.py [--on 4x8 8x16 32x64 32x256] [--algorithms torus-2d ...] [--compile]

With `--compile` XLA compiles the programs for TPU v3 (extra `tpu`; two devices a chip along the last dimension), and
bytes are counted in what it made of them; else in the lowered program. The vector is ResNet-50's gradient in float32.
"""

import argparse
import time

import machine

from multipod import runtime

runtime.absent_tpus()  # before JAX is imported

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import NamedSharding, PartitionSpec  # noqa: E402

from multipod.collectives.build import ALGORITHMS, build  # noqa: E402
from multipod.collectives.schedule import Schedule  # noqa: E402
from multipod.errors import MultipodError  # noqa: E402
from multipod.execute.engines import jax as engine  # noqa: E402
from multipod.execute.engines.rounds import build_rounds  # noqa: E402
from multipod.layout.compiled import absent_mesh  # noqa: E402
from multipod.layout.hlo import Text, sum_link_bytes  # noqa: E402
from multipod.layout.layout import parse_shape  # noqa: E402
from multipod.topology.topology import Topology  # noqa: E402

ELEMENTS = 25_557_032


def compiled_text(schedule: Schedule) -> str:
    """The text of the program that XLA compiles for TPU v3."""
    rows, columns = schedule.topology.shape
    mesh = absent_mesh(f"v3:{columns // 2}x{rows}", {"y": rows, "x": columns})
    spec = PartitionSpec(("y", "x"))
    function = jax.shard_map(
        lambda v: engine.run(schedule, v[0], ("y", "x"))[None],
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
    )
    vectors = jax.ShapeDtypeStruct((rows * columns, ELEMENTS), jnp.float32, sharding=NamedSharding(mesh, spec))
    return jax.jit(function).lower(vectors).compile().as_text()


def count(name: str, topology: Topology, compile_it: bool) -> list[str]:
    """A row of the table."""
    options = {"nbytes": 4 * ELEMENTS} if "nbytes" in ALGORITHMS[name].options else {}
    schedule = build(name, topology, **options)
    begin = time.perf_counter()
    rounds = build_rounds(schedule, ELEMENTS)
    laid = time.perf_counter()
    text = Text(compiled_text(schedule) if compile_it else engine.lower(schedule, ELEMENTS).as_text("hlo"))
    made = time.perf_counter()
    sent = sum(sum_link_bytes(text.collectives, topology).values())
    places = schedule.elements(ELEMENTS)
    own = 4 * sum(int((places[step.stop] - places[step.first]).sum()) for step in schedule.steps)
    per_device = 4 * ELEMENTS * len(topology.chips)
    numbers = f"{own / per_device:.3f}", f"{sent / per_device:.3f}", f"{sent / own:.4f}"
    times = f"{laid - begin:.1f}", f"{made - laid:.1f}"
    return [name, *numbers, f"{len(schedule.steps):,}", f"{rounds.steps:,}", f"{rounds.written}", *times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--on", nargs="+", default=["4x8", "8x16", "32x64", "32x256"])
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    print(machine.headline(machine.facts()), flush=True)
    head = [
        "algorithm",
        "schedule / S",
        "executed / S",
        "ratio",
        "steps",
        "executed",
        "in the text",
        "tables s",
        "XLA s",
    ]
    for shape in options.on:
        rows = []
        for name in options.algorithms:
            try:
                rows.append(count(name, Topology(parse_shape(shape)), options.compile))
            except MultipodError as refusal:
                rows.append([name, "refused", *[""] * (len(head) - 2)])
                print(refusal, flush=True)
        print(f"\n**{shape}**\n\n{machine.table(head, rows)}", flush=True)


if __name__ == "__main__":
    main()
