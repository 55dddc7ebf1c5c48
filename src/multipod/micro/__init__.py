"""Models on microcontrollers: `.tflite` files, and the runtime in C that interprets them."""

from multipod.micro.interpreter import Interpreter

__all__ = ["Interpreter"]
