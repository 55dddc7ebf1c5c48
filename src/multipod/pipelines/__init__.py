"""Pipelines as data: which stage treats which micro-batch when, checked, timed and drawn without devices."""
