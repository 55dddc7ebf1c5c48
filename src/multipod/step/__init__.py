"""The compiled programs of a run: one update, one evaluation step, and the state they pass on."""
