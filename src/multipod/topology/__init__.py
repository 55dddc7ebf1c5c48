"""Machines as plain data: chips, links, failures, routes. Nothing here needs JAX."""

from multipod.topology.topology import Topology

__all__ = ["Topology"]
