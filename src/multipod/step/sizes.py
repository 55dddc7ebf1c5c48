"""One update compiled for batches of several sizes."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from multipod.errors import DataError

Shapes = tuple[tuple[str, tuple[int, ...]], ...]


class BySize:
    """Calls the program that was compiled for the shapes of the batch. All processes have batches of one size.

    Args:
      compiled: programs of (state, batch, flags), the one of the largest batches last.
    """

    def __init__(self, compiled: Sequence[jax.stages.Compiled]) -> None:
        self._largest = compiled[-1]
        self._by_shapes = {_shapes(one.args_info[0][1]): one for one in compiled}

    def __call__(self, state: Any, batch: Mapping[str, jax.Array], asked: Any) -> Any:
        """What the program for this batch returns.

        Raises:
          DataError: there is none.
        """
        program = self._by_shapes.get(_shapes(batch))
        if program is None:
            raise DataError(
                f"no update was compiled for a batch of {dict(_shapes(batch))}: the data's `sizes` are "
                "others than `sized_for` chooses. Name them all."
            )
        return program(state, batch, asked)

    @property
    def input_formats(self) -> Any:
        """The formats of the largest batch's inputs."""
        return self._largest.input_formats

    def memory_analysis(self) -> Any:
        """The memory that the largest batch's program takes."""
        return self._largest.memory_analysis()


def _shapes(batch: Mapping[str, Any]) -> Shapes:
    return tuple(sorted((name, tuple(array.shape)) for name, array in batch.items()))
