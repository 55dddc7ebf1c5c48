"""Optax transformations and rate schedules, described as data."""
