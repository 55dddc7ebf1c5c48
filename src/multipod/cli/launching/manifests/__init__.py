"""Manifests by which other launchers start a run: one function for each, from one `RenderedRun`."""
