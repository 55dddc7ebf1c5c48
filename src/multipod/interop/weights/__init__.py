"""Weights of other libraries' models, in and out: one table a family, read in both directions (docs/weights.md)."""
