"""Processes that come and go: the launcher that decides who trains with whom, and the worker that obeys."""
