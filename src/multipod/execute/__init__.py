"""Adds values across devices. Everything here runs inside `jax.shard_map`."""
