"""Commands about schedules and the machines that they run on; none of them needs devices or JAX."""
