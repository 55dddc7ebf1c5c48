"""From a JAX function to a graph of TFLite operators, primitive by primitive."""
