"""A training run as a value: the recipe, its text, and typed changes to it."""
