"""Whether a split run learns what one device would: layouts drawn at random, each held against float64 updates."""
