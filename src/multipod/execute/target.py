"""The platform that a program is traced for: choices depend on it, never on the machine that traces."""

import jax


def target_platform() -> str:
    """Returns the platform of the devices that the code being traced will run on: "cpu", "gpu" or "tpu".

    It is that of the mesh around it (`jax.shard_map`), so that a program for a TPU that is not here gets the TPU's
    choices. Outside of a mesh, and in one that has no devices, it is the default of this process.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform


def target_device_kind() -> str:
    """Returns the kind of those devices, as "NVIDIA H100 80GB HBM3" or "TPU v4"; "" where no mesh says it."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return "" if device is None else device.device_kind
