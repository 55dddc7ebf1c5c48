"""What a run is judged by: values of single examples, summed over the mesh with the padding masked."""
