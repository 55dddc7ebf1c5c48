"""Ready-made runs: one short file a model, and the table that names them."""
