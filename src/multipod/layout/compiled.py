"""What the compiler knows of a program, for machines that are here and for TPUs that are not.

With the extra `tpu` (the `libtpu` wheel) XLA compiles on any CPU machine for TPU topologies by name, up to `v3:128x32`,
the multipod: 8,192 cores. Nothing is run or allocated. Used by the planner and by `multipod show --compile-for`:

    mesh = absent_mesh("v3:4x4", {"y": 4, "x": 8})
    facts = compile_for("v3:4x4", function, shapes, shardings)     # any function, PartitionSpecs or NamedShardings
    facts = facts_of(program.lowered.compile())                    # or of anything that is lowered already
"""

import hashlib
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from multipod.errors import LayoutError
from multipod.layout.hlo import Collective, Product, Text
from multipod.layout.layout import Layout


@dataclass(frozen=True)
class Memory:
    """Bytes on one device, as XLA has laid them out. Outputs in the place of donated arguments are `aliased`."""

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int

    @property
    def peak(self) -> int:
        """What one call needs at once, beside the program's code: arguments, outputs of their own, temporaries."""
        return self.arguments + self.outputs - self.aliased + self.temporaries


@dataclass(frozen=True)
class CompiledFacts:
    """What is known of a compiled program, on one device of it.

    Attributes:
      devices: that it is compiled for.
      flops: with loops run through; 0 if the compiler does not say.
      bytes: read and written in the device's memory, loops counted once (as XLA does).
      seconds: the compiler's own estimate, which takes collectives for traffic in memory; None if it has none.
      memory: see `Memory`.
      collectives: see `Collective`; devices are numbered as in the mesh, row-major.
      unknown_loops: loops whose trips could not be read; what is in them counts once.
      products: of arrays and images, by their sizes on a device.
    """

    devices: int
    flops: float
    bytes: float
    seconds: float | None
    memory: Memory
    collectives: tuple[Collective, ...]
    unknown_loops: int = 0
    products: tuple[Product, ...] = ()


def facts_of(compiled: Any) -> CompiledFacts:
    """The facts of a `jax.stages.Compiled`."""
    text = Text(compiled.as_text())
    costs = compiled.cost_analysis() or {}
    costs = costs[0] if isinstance(costs, list) else costs
    stats = compiled.memory_analysis()
    whole, once = text.matmul_flops
    seconds = float(costs.get("optimal_seconds", -1.0))
    return CompiledFacts(
        devices=text.devices,
        flops=float(costs.get("flops", 0.0)) + whole - once,
        bytes=float(costs.get("bytes accessed", 0.0)),
        seconds=seconds if seconds > 0 else None,
        memory=Memory(
            stats.argument_size_in_bytes,
            stats.output_size_in_bytes,
            stats.alias_size_in_bytes,
            stats.temp_size_in_bytes,
            stats.generated_code_size_in_bytes,
        ),
        collectives=text.collectives,
        unknown_loops=text.unknown_loops,
        products=text.products,
    )


def compile_for(
    topology_name: str,
    function: Callable[..., Any],
    args_shapes: Sequence[Any],
    shardings: Any,
    *,
    donate: Sequence[int] = (),
    cache: Path | None = None,
) -> CompiledFacts:
    """Compiles `function` for a TPU that is not here, and says what came of it.

    Args:
      topology_name: as `absent_devices` takes it.
      function: of arrays; it may use `jax.shard_map` over the mesh of the shardings.
      args_shapes: for each argument a tree of `jax.ShapeDtypeStruct`, or of arrays.
      shardings: for each argument a tree (or one for all of its leaves) of `NamedSharding`s on an `absent_mesh`.
      donate: numbers of the arguments that are given up.
      cache: a folder of facts from before; nothing is compiled where the same program, topology and versions are known.

    Seconds for a small program, 20 to 45 s for a ResNet-50 step on two cores.

    Raises:
      LayoutError: no `libtpu`, no such topology, or XLA refuses the program for it.
    """

    absent_devices(topology_name)
    arguments = [
        jax.tree.map(lambda leaf, one=sharding: _shape(leaf, one), shapes)
        if isinstance(sharding, jax.sharding.Sharding)
        else jax.tree.map(_shape, shapes, sharding)
        for shapes, sharding in zip(args_shapes, shardings, strict=True)
    ]
    lowered = jax.jit(function, donate_argnums=tuple(donate)).lower(*arguments)
    return facts_of_lowered(lowered, topology_name, cache)


def facts_of_lowered(lowered: Any, topology_name: str, cache: Path | None = None) -> CompiledFacts:
    """Compiles what is lowered for the mesh of `topology_name`, or reads its facts from `cache`.

    Raises:
      LayoutError: XLA refuses the program, most often because it needs more memory than a device has.
    """

    file = None if cache is None else cache / f"{_key(lowered, topology_name)}.json"
    if file is not None and (known := _read(file)) is not None:
        return known
    try:
        with _no_jax_cache():
            facts = facts_of(lowered.compile())
    except jax.errors.JaxRuntimeError as error:
        first = next((line for line in str(error).splitlines() if line.strip()), "no reason given")
        raise LayoutError(
            f"XLA does not compile this program for {topology_name}: {first[:300]}\n"
            "Where it is out of memory, take more devices, a smaller batch, or shard_update."
        ) from error
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_text(json.dumps(asdict(facts)))
        part.replace(file)
    return facts


MOST_CPU_DEVICES = 2048
"""Virtual CPU devices of one process. XLA takes those beyond for another process's, and compiles nothing for them."""


def provide_cpu_devices(layout: Layout) -> None:
    """Lets JAX have as many virtual CPU devices as the mesh of `layout` takes; to be called before it has looked.

    Where JAX finds an accelerator it changes nothing that is used.

    Raises:
      LayoutError: a mesh of more than `MOST_CPU_DEVICES`.
    """
    needed = math.prod(layout.mesh) * layout.replica_devices if layout.mesh else 0
    if needed > MOST_CPU_DEVICES:
        raise LayoutError(
            f"--compile: the mesh has {needed:,} devices, and XLA compiles for {MOST_CPU_DEVICES:,} virtual CPU "
            "devices at the most. Take a smaller mesh, or name a TPU of that size, as --compile-for v3:64x32 "
            "(4,096 devices)."
        )
    if needed > jax.config.jax_num_cpu_devices:  # type: ignore[attr-defined]
        jax.config.update("jax_num_cpu_devices", needed)


def absent_devices(topology_name: str) -> list[Any]:
    """The devices of a TPU by libtpu's name for it, as `v3:32x32`: generation, then chips along x, y(, z).

    The process's environment must have been settled by `multipod.runtime.absent_tpus`. A v2 or v3 chip has two devices.

    Raises:
      LayoutError: no `libtpu`, or it knows no such topology.
    """

    if not has_libtpu():
        raise LayoutError(
            f"{topology_name}: compiling for TPUs needs libtpu, which is not installed. Say pip install "
            "'multipod[tpu]'; without it the planner reckons from the model's operators alone."
        )
    try:
        options = _one_host(topology_name)
        return list(topologies.get_topology_desc(topology_name=topology_name, platform="tpu", **options).devices)
    except Exception as error:  # libtpu raises classes of its own, for unknown names too
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise LayoutError(
            f"libtpu knows no topology {topology_name!r}: {first}. Write a generation and its chips, as v3:4x4, "
            "v4:4x4x4 or v5e:4x8."
        ) from error


def _one_host(topology_name: str) -> dict[str, Any]:
    """What libtpu must be told of a slice of up to four chips: all are on one host. It takes 2 x 2 for granted."""
    _, _, sizes = topology_name.partition(":")
    chips = [int(size) for size in sizes.split("x") if size.isdecimal()]
    return {"chips_per_host_bounds": (*chips, 1, 1)[:3]} if chips and 0 < math.prod(chips) <= 4 else {}


def absent_mesh(topology_name: str, sizes: Mapping[str, int]) -> Any:
    """A mesh of these axes (name to size, row-major) over the devices of a TPU that is not here.

    Devices are taken in the order of their chips: rows (libtpu's y) first, then columns (its x), then the chip's cores.
    So a mesh of y = chips along y and x = 2 * chips along x lies on the machine as it is wired.

    Raises:
      LayoutError: the sizes do not multiply to the number of devices.
    """

    devices = sorted(absent_devices(topology_name), key=lambda d: (*reversed(d.coords), d.core_on_chip))
    needed = int(np.prod(list(sizes.values())))
    if needed != len(devices):
        axes = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise LayoutError(
            f"{topology_name} has {len(devices)} devices, and {axes} is a mesh of {needed}. "
            "Give axes that multiply to the number of devices (two on every v2 and v3 chip)."
        )
    grid = np.array(devices).reshape(tuple(sizes.values()))
    return Mesh(grid, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def has_libtpu() -> bool:
    """Whether `libtpu` is installed."""
    try:
        metadata.version("libtpu")
    except metadata.PackageNotFoundError:
        return False
    return True


@contextmanager
def _no_jax_cache() -> Iterator[None]:
    """JAX's own cache of programs can write those of absent devices and not read them again: it is left out."""

    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 1e9)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
            yield
    finally:
        jax.config.update(name, before)


def _shape(leaf: Any, sharding: Any) -> Any:

    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _key(lowered: Any, topology_name: str) -> str:
    versions = [metadata.version("jax"), metadata.version("libtpu") if has_libtpu() else "none", FORMAT]
    return hashlib.sha256("\n".join([topology_name, *versions, lowered.as_text()]).encode()).hexdigest()[:32]


FORMAT = "2"
"""Of the cached facts; another number makes old ones unknown."""


def _read(file: Path) -> CompiledFacts | None:
    """Facts from a file; None if there are none that can be used, which is then written anew."""
    try:
        data = json.loads(file.read_text())
        collectives = tuple(
            Collective(one["kind"], one["nbytes"], tuple(one["dtypes"]), tuple(map(tuple, one["groups"])), one["times"])
            for one in data.pop("collectives")
        )
        products = tuple(Product(**one) for one in data.pop("products"))
        memory = Memory(**data.pop("memory"))
        return CompiledFacts(**data, memory=memory, collectives=collectives, products=products)
    except (OSError, ValueError, KeyError, TypeError):
        return None
