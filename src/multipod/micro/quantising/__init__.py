"""From a float32 graph to one in int8 or int16: ranges from examples, grids, tables, and what it costs in accuracy."""
