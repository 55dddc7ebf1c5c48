"""Experiment trackers of others, each a `Tracker` behind one observer that never stops the run."""
