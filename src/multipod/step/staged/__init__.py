"""The programs of a run whose model is cut into pipeline stages."""
