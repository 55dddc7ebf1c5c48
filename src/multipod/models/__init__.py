"""Models: Flax NNX modules, each with the frozen dataclass that describes it in a recipe."""
