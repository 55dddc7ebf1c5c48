"""Adasum: the operator and its rules, the combination between ranks and between JAX devices, its arithmetic in C."""
