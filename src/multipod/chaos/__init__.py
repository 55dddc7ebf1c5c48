"""Faults on purpose: which, where, in what order, and making them happen inside a process."""
