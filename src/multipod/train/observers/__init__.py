"""Observers: each is called with every event of a run, and closed at its end."""
