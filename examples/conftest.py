"""Eight virtual CPU devices for the examples, settled before anything imports JAX."""

from multipod import runtime

runtime.prepare(cpu_devices=8, cache=None)
