"""Runs what `collectives` and `pipelines` describe: sums of gradients, pipelines and Adasum, on devices and ranks."""
