"""Whether a file computes what the function did that it was made of: it is run, before anyone gets it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from multipod.errors import ExportError, MicroError, NativeError
from multipod.micro.evaluate import outputs_of
from multipod.micro.graph import Graph, to_real, to_stored
from multipod.micro.interpreter import Interpreter

EXAMPLES = 4
"""Of the calibration set, that a file is run on."""

POOR_DB = 20.0
"""An output with less is a tenth of its signal off."""


@dataclass(frozen=True)
class OutputNoise:
    """How well an output of a file agrees with the function: signal over the noise of the difference, in decibels."""

    name: str
    sqnr_db: float

    @property
    def is_poor(self) -> bool:
        """Whether it is below `POOR_DB`."""
        return self.sqnr_db < POOR_DB


def agreement(model: bytes, written: Graph, function: Graph, examples: Sequence[np.ndarray]) -> tuple[OutputNoise, ...]:
    """The agreement of each output of a file with a function, on the first `EXAMPLES` examples.

    Args:
      model: the file.
      written: its graph.
      function: the float graph that it was made of.
      examples: one array for each input, examples first.

    Returns:
      () where the runtime cannot be compiled.

    Raises:
      ExportError: the runtime refuses the file.
    """
    exactly = jax.jit(partial(outputs_of, function))
    try:
        interpreter = Interpreter(model)
        signal, noise = np.zeros(len(written.outputs)), np.zeros(len(written.outputs))
        for example in zip(*(array[:EXAMPLES] for array in examples), strict=True):
            interpreter.reset()
            stored = [to_stored(value, tensor) for value, tensor in zip(example, written.inputs, strict=True)]
            made = interpreter.run(*stored)
            for number, (ours, true) in enumerate(zip(made, exactly(*example), strict=True)):
                real = np.asarray(to_real(ours, written.outputs[number]), np.float64)
                signal[number] += np.square(np.asarray(true, np.float64)).sum()
                noise[number] += np.square(real - true).sum()
    except NativeError:
        return ()
    except MicroError as error:
        raise ExportError(
            f"export: the runtime refuses the file that was made: {error}\nKeep that operator in float32 "
            "(`keep_float`), or write it otherwise."
        ) from error
    decibels = [10 * np.log10(s / n) if n > 0 and s > 0 else np.inf for s, n in zip(signal, noise, strict=True)]
    return tuple(OutputNoise(tensor.name, float(db)) for tensor, db in zip(written.outputs, decibels, strict=True))
