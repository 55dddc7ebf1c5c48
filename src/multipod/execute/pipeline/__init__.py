"""Pipelines over a `stage` axis of the mesh, for training and evaluation, and a simulation of their delays."""
