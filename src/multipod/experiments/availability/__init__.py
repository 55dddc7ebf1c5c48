"""Availability: random faults in real runs, goodput with failures, and what a hole in the mesh costs."""
