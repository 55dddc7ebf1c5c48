"""How a tensor lies in another library: each `Form` takes it to ours and back, number for number."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

Shape = tuple[int, ...]


class Form(Protocol):
    """The form of a tensor elsewhere. `theirs` of `ours` is the identity, bit for bit."""

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """The tensor as we have it, of this shape."""
        ...

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The tensor as they have it."""
        ...


@dataclass(frozen=True)
class Same:
    """A tensor that lies alike on both sides."""

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """The tensor itself."""
        return theirs

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The tensor itself."""
        return ours


@dataclass(frozen=True)
class Flat:
    """A tensor whose dims are one dim there: the biases of heads, [heads, kv] here and [heads * kv] there."""

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """The tensor with our dims."""
        return theirs.reshape(shape)

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The tensor with one dim."""
        return ours.reshape(-1)


@dataclass(frozen=True)
class OneRow:
    """A vector that is a matrix of one row there."""

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """The vector."""
        return theirs[0]

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The matrix."""
        return ours[None]


@dataclass(frozen=True)
class Transposed:
    """A tensor whose dims stand in another order there: dim k here is dim `dims[k]` there."""

    dims: Shape

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """The tensor in our order."""
        return theirs.transpose(self.dims)

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The tensor in their order."""
        return ours.transpose(np.argsort(self.dims))


@dataclass(frozen=True)
class Matrix:
    """A kernel [*inputs, *outputs] that is a matrix [outputs, inputs] there, as PyTorch's linear layers have it.

    Attributes:
      inputs: how many of our dims are inputs.
    """

    inputs: int = 1

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """The kernel."""
        return theirs.T.reshape(shape)

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The matrix."""
        rows = int(np.prod(ours.shape[: self.inputs]))
        return ours.reshape(rows, -1).T


@dataclass(frozen=True)
class Pointwise:
    """A kernel [in, out] that is a 1x1 convolution there, [out, in, 1, 1]."""

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """The kernel."""
        return theirs[:, :, 0, 0].T

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The convolution."""
        return ours.T[:, :, None, None]


@dataclass(frozen=True)
class FlatImage:
    """A kernel [size * size * features, out] over an image's features last; there features come first, [out, ...].

    Attributes:
      features: of a pixel.
      size: rows and columns of the image.
    """

    features: int
    size: int

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """The kernel."""
        apart = theirs.reshape(-1, self.features, self.size, self.size)
        return apart.transpose(2, 3, 1, 0).reshape(shape)

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The matrix."""
        apart = ours.reshape(self.size, self.size, self.features, -1)
        return apart.transpose(3, 2, 0, 1).reshape(ours.shape[1], -1)


@dataclass(frozen=True)
class SomeRows:
    """A kernel [in, out] with rows that only ever meet zeros; there they are left out of the matrix [out, fewer].

    Attributes:
      rows: those that are there, increasing.
    """

    rows: Shape

    def ours(self, theirs: np.ndarray, shape: Shape) -> np.ndarray:
        """The kernel, zero in the other rows."""
        kernel = np.zeros(shape, theirs.dtype)
        kernel[np.asarray(self.rows)] = theirs.T
        return kernel

    def theirs(self, ours: np.ndarray) -> np.ndarray:
        """The matrix."""
        return ours[np.asarray(self.rows)].T


SAME, FLAT = Same(), Flat()
CONVOLUTION = Transposed((2, 3, 1, 0))
"""[height, width, in, out] here, [out, in, height, width] there; a depthwise one too."""
