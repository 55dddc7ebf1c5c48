"""A run on disk and in a process: its folder, facts, lock, log of examples; what a new run takes over from another."""
