"""Host input: data sources, and the order in which a run reads them."""
