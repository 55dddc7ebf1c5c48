"""From a JAX function to a microcontroller: export to `.tflite`, and an embedded runtime that interprets it.

    from multipod.micro import Interpreter, export

Nothing is imported before it is asked for: the exporter needs JAX, the interpreter a C compiler.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multipod.micro.exporter import convert, export
    from multipod.micro.interpreter import Arena, Interpreter

__all__ = ["Arena", "Interpreter", "convert", "export"]
_HOMES = {"Arena": "interpreter", "Interpreter": "interpreter", "convert": "exporter", "export": "exporter"}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(f"multipod.micro.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'multipod.micro' has no attribute {name!r}")
