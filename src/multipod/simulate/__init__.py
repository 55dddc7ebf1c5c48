"""Running schedules on the links of a machine, without devices: time, loads, pictures. Nothing here needs JAX."""

from multipod.simulate.best import best, compare
from multipod.simulate.bounds import Bounds, bounds
from multipod.simulate.simulate import Simulation, simulate

__all__ = ["Bounds", "Simulation", "best", "bounds", "compare", "simulate"]
