"""The launcher's side: starts processes, watches them, and decides who trains with whom."""
