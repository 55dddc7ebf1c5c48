"""Predicts step time, time to train and memory of a recipe on a machine, and searches layouts. Never trains."""
