"""Checkpoints: what is written of a run's state, when, and how it is read again."""
