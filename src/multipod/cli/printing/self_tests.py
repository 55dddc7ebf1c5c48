"""What is installed and found here, and tests of whether the devices can sum."""

import os
from collections.abc import Callable
from dataclasses import replace

import jax
import numpy as np
from jax.sharding import PartitionSpec

from multipod.execute.sums import SUMS, VectorSum
from multipod.layout.layout import Layout
from multipod.layout.mesh import batch_sharding, batch_spec, data_devices, make_mesh
from multipod.layout.sync import Sync
from multipod.runs.facts import machine_facts, versions
from multipod.runs.options import RuntimeOptions
from multipod.runs.recipes import without_chips
from multipod.step.specs import over_data
from multipod.step.sync.reduction import vector_sum

SCHEDULES = ("ring", "tree-packing")
"""Schedules that run on any mesh: what is tested of them is that the devices can send to one another."""
VARIABLES = ("XLA_FLAGS", "NPROC", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES")


def describe_machine(where: RuntimeOptions) -> list[tuple[str, str]]:
    """Versions and surroundings, as rows of a table."""

    cache = where.cache
    kept = sum(file.stat().st_size for file in cache.glob("*") if file.is_file()) if cache and cache.is_dir() else 0
    rows = [(name, version) for name, version in versions().items()]
    machine = machine_facts()
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if "memory_bytes" in machine else ""
    rows += [("system", f"{machine['system']}, {os.cpu_count()} cores{memory}")]
    rows += [("processor", machine["processor"])] if "processor" in machine else []
    rows += [("cluster", f"{where.cluster.name}, process {where.cluster.process} of {where.cluster.processes}")]
    rows += [("compilation cache", f"{cache} ({kept / 1e6:.1f} MB)" if cache else "off")]
    rows += [("time-out", f"{where.timeouts.limit_s:g} s")]
    return rows + [(name, os.environ[name]) for name in VARIABLES if name in os.environ]


def describe_devices() -> list[tuple[str, str]]:
    """The devices that JAX found, as rows of a table."""

    devices = jax.devices()
    return [
        (
            "devices",
            f"{len(devices)} x {devices[0].device_kind} ({devices[0].platform}), {jax.local_device_count()} local",
        )
    ]


def device_platform() -> str:
    """The platform of the devices that JAX found: cpu, gpu or tpu."""
    platform = jax.devices()[0].platform
    return platform if platform in ("cpu", "tpu") else "gpu"


def make_self_tests(where: RuntimeOptions) -> dict[str, Callable[[], str]]:
    """Each way of summing on this mesh, against NumPy: a name, and a function that returns what is wrong."""

    layout = Layout(mesh=where.mesh or ())
    layout = without_chips(layout, where.fail) if where.fail else layout
    mesh = make_mesh(layout)
    count = data_devices(mesh)
    values = np.arange(count * count * 16, dtype=np.float32).reshape(count, -1) % 251  # sums are exact in float32
    placed = jax.make_array_from_callback(values.shape, batch_sharding(mesh), lambda index: values[index])
    expected = values.sum(0)

    def check(function: Callable[[jax.Array], jax.Array]) -> Callable[[], str]:
        def test() -> str:
            summed = jax.jit(over_data(lambda x: function(x[0]), mesh, (batch_spec(mesh),), PartitionSpec()))(placed)
            wrong = int((np.asarray(jax.device_get(summed)) != expected).sum())
            return f"{wrong} of {expected.size} sums are wrong" if wrong else ""

        return test

    tests: dict[str, Callable[[], str]] = {}
    for name in (*SUMS, *SCHEDULES):
        total = vector_sum(replace(layout, sync=Sync(name)), mesh)
        tests[f"{name}: all-reduce"] = check(total.all_reduce)
        tests[f"{name}: reduce-scatter, all-gather"] = check(there_and_back(total))
    return tests


def there_and_back(total: VectorSum) -> Callable[[jax.Array], jax.Array]:
    """An all-reduce made of the two halves of `total`."""
    return lambda vector: total.all_gather(total.reduce_scatter(vector))


def run_test(test: Callable[[], str]) -> str:
    """What is wrong, in one line; empty if nothing."""
    try:
        return test()
    except Exception as error:  # whatever fails here is the finding
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
