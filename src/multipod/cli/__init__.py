"""The `multipod` command. Environment variables and flags are read here and nowhere else."""
