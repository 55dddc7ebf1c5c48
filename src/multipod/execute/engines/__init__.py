"""Runs schedules: in NumPy, between JAX devices, over PyTorch's process groups and MPI, and through shared memory."""
