"""The operators of a `.tflite` file, one record each, by family; `table.py` has them all."""
