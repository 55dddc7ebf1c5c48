"""Large runs from small ones: what families of measured runs, the same job at several sizes, say of larger sizes."""
