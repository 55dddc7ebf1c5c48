"""The loop around the compiled step, and everything that watches it."""
