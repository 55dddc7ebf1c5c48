"""What commands print that need JAX or what is built on it: imported by a command once its options are settled."""
