"""Sparse layers: a router sends every token to a few of many experts. Begin with `layer.py`, then `routing.py`."""
