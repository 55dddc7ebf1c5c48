"""How a model lies on a mesh: named axes, shardings, what is split in the weight update."""
