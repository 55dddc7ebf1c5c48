"""Tables of vectors for PyTorch programs; `multipod.interop.torch` has their names."""
