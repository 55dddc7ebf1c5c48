"""Layers for images: convolutions with their norms, on channels last."""
