"""The platform that a program is traced for: choices depend on it, never on the machine that traces."""

import jax


def target_platform() -> str:
    """Returns the platform of the devices that the code being traced will run on: "cpu", "gpu" or "tpu".

    It is that of the mesh around it (`jax.shard_map`), so that a program for a TPU that is not here gets the TPU's
    choices. Outside of a mesh, and in one that has no devices, it is the default of this process.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
