"""Which tensors an optimizer adapts, decays, or treats as a stack of layers, told from their names and dims."""

import re
from dataclasses import dataclass
from typing import Any

import jax

VECTORS = frozenset({"bias", "scale", "beta", "gamma"})
"""Last parts of names that are biases or scales, whatever their dims: an attention bias is [heads, features]."""

_NORM = re.compile(r"norm(ali[sz]ation)?[_\d]*$|^(bn|ln)(_?[a-z]?\d*)$")


@dataclass(frozen=True)
class TensorRules:
    """The skip rules of the large-batch optimizers, as a function of a tensor's name and dims.

    A tensor's name is its path in the tree, `blocks/0/norm1/scale`. It is *adapted*, which means that it
    gets a layer-wise rate and weight decay, when it has two or more dims, is no bias or scale by name
    (`VECTORS`), lies in no normalisation, and has none of the words of `skip` in its name. These are the
    rules that the published runs share: TensorFlow's by name ("batch_normalization", "bias", "beta",
    "gamma"), JAX's by name ("bias", "scale").

    Attributes:
      skip: more words; a tensor with one of them in its name is neither adapted nor decayed in the loss.
      stacked: words; a tensor with one of them in its name holds a layer in each slice of its first dim, as
        `jax.lax.scan` over layers wants it. Each slice is then a tensor of its own.
    """

    skip: tuple[str, ...] = ()
    stacked: tuple[str, ...] = ()

    def is_stacked(self, name: str) -> bool:
        """Whether the first dim of this tensor counts layers."""
        return _has(name, self.stacked)

    def is_adapted(self, name: str, dims: int) -> bool:
        """Whether a tensor of that many dims gets a layer-wise rate and weight decay."""
        layer_dims = dims - self.is_stacked(name)
        return layer_dims > 1 and _parts(name)[-1] not in VECTORS and not is_norm(name) and not _has(name, self.skip)

    def is_decayed_in_loss(self, name: str) -> bool:
        """Whether L2 in the loss counts this tensor: biases are in it, batch norm is not (as published)."""
        return not is_norm(name) and not _has(name, self.skip)

    def adapted(self, tree: Any) -> Any:
        """`is_adapted` of each tensor of a tree: a mask for Optax."""
        return jax.tree.map_with_path(lambda path, leaf: self.is_adapted(name_of(path), leaf.ndim), tree)

    def decayed_in_loss(self, tree: Any) -> Any:
        """`is_decayed_in_loss` of each tensor of a tree: a mask for Optax."""
        return jax.tree.map_with_path(lambda path, _: self.is_decayed_in_loss(name_of(path)), tree)


def name_of(path: Any) -> str:
    """Returns a tensor's name from its path in a tree: the keys, joined by `/`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def is_norm(name: str) -> bool:
    """Whether a tensor lies in a normalisation: a part of its name is like `norm1`, `BatchNorm_0`, `bn2`, `ln_f`."""
    return any(_NORM.search(part) for part in _parts(name))


def _parts(name: str) -> list[str]:
    parts = [part for part in name.lower().split("/") if part not in ("value", "raw_value")]
    return parts or [""]


def _has(name: str, words: tuple[str, ...]) -> bool:
    return any(word.lower() in name.lower() for word in words)
