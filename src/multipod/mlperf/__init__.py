"""MLPerf: which benchmark a run is, what its log must say, whether that was kept to, and what is handed in."""
