"""Recipes as workloads: their steps traced, and what XLA's programs say of their splits."""
