"""Train machine-learning models at the limits of concurrency.

This root holds no names on purpose: import the module that owns what you need, for example
`from multipod.recipe.recipe import Recipe`. `docs/TOUR.md` names the six files to read first.
"""

__version__ = "0.1.0"
