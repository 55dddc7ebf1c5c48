"""Layers for sequences of tokens: attention, positions, embeddings, beam search."""
