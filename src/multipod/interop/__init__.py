"""multipod's schedules in programs of other frameworks."""
