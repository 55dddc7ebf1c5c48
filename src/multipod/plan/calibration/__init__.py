"""A machine's constants: fitted, to steps of this host or to steps in a file."""
