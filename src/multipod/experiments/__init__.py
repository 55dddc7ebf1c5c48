"""Published claims, tried here: `multipod reproduce NAME` runs one and writes what came out."""
