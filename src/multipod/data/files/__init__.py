"""Data sets in files, one module a format; each is a `multipod.data.source.Source` of undecoded fields."""
