"""Collectives as data: build a schedule, prove it, read and write it. Nothing here needs JAX."""

from multipod.collectives.build import build
from multipod.collectives.repair import repair
from multipod.collectives.schedule import Schedule
from multipod.collectives.strength import strength
from multipod.collectives.verify import verify

__all__ = ["Schedule", "build", "repair", "strength", "verify"]
