"""Click logs in Criteo's format: text to compact records, records to batches, and a generator whose truth is known."""
