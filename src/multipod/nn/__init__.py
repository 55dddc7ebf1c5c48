"""Layers that know about meshes, and the one form in which every model meets the trainer."""
