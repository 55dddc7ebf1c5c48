"""How, where and with what a run began: what `run.json` says beside the recipe."""

import datetime
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from multipod.data.source import identity_of
from multipod.layout.mesh import topology_of
from multipod.layout.text import spelled
from multipod.recipe.recipe import Recipe
from multipod.step.program import Program
from multipod.step.state import device_bytes, parameter_count

PACKAGES = ("multipod", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def facts(program: Program, recipe: str, changes: list[str], command: str, cache: str) -> dict[str, Any]:
    """The facts of a run of `program`, made of `recipe` (a name or `file.py:function`) and `changes`."""
    mesh = program.mesh
    chips = topology_of(program.recipe.layout, mesh)
    grid = mesh.devices.reshape(mesh.devices.shape[0], -1)  # a row of tiles is a row of devices
    devices = [[{"id": d.id, "process": d.process_index, "kind": d.device_kind} for d in row] for row in grid.tolist()]
    return {
        "recipe": recipe,
        "overrides": changes,
        "command": command,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "mesh": dict(mesh.shape),
        "chips": chips.shape,
        "tile": program.recipe.layout.replica_devices,
        "layout": spelled(program.recipe.layout),
        "failed": [chips.coordinates(chip) for chip in sorted(chips.failed_chips)],
        "devices": devices,
        "processes": jax.process_count(),
        "platform": mesh.devices.flat[0].platform,
        "host": platform.node(),
        "cores": os.cpu_count(),
        "machine": machine_facts(),
        "cache": cache,
        "versions": versions(),
        "parameters": parameter_count(program.recipe),
        "bytes_per_device": state_bytes(program),
        "gradient_sum": program.recipe.layout.sync.gradient_sum,
        "shard_update": program.recipe.layout.sync.zero1,
        "data": data_identities(program.recipe),
    }


def machine_facts() -> dict[str, Any]:
    """What the host's own files say of it: its processor, the cores in it, its memory in bytes, its system."""
    cpu = _colon_table(Path("/proc/cpuinfo"))
    memory = _colon_table(Path("/proc/meminfo")).get("MemTotal", "")
    known = {
        "processor": cpu.get("model name"),
        "cores": int(cpu["cpu cores"]) if cpu.get("cpu cores", "").isdigit() else None,
        "memory_bytes": int(memory.split()[0]) * 1024 if memory.endswith("kB") else None,
        "system": platform.platform(),
    }
    return {name: value for name, value in known.items() if value is not None}


def _colon_table(path: Path) -> dict[str, str]:
    """The first value of each name in a file of lines `name : value`; nothing where there is no such file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = [[part.strip() for part in line.split(":", 1)] for line in lines if ":" in line]
    return dict(reversed(pairs))  # a list of pairs, so that the first of a name wins


def data_identities(recipe: Recipe) -> dict[str, str]:
    """What tells the recipe's examples from others, those to learn from and those to be judged by."""
    return {"train": identity_of(recipe.data.train()), "test": identity_of(recipe.data.test())}


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that a result depends on."""
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in PACKAGES}


def state_bytes(program: Program) -> dict[str, int]:
    """Bytes of each part of the state on one device."""
    return {name: device_bytes(part) for name, part in program.state_parts.items()}
