"""Runs that begin with other libraries' weights, give them theirs, or lie on the Hugging Face hub."""
