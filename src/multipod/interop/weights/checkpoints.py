"""Orbax checkpoints of any program as weights: found in a folder, read as host arrays, named by our model's paths.

What another program saved is a tree: the state of a Flax NNX module, Linen's collections, a train state. Its leaves are
named by their paths, and those are the names of our parameters, so nothing but the wrapping is to be taken off. Arrays
are read whole into the host's memory, whatever devices they were on: what the checkpoint says of shardings and devices
is not looked at.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from multipod.errors import WeightsError, first_line
from multipod.interop.weights.files import Weights
from multipod.interop.weights.places import Family, Place

METADATA, FORMER = "_METADATA", "checkpoint"
"""The file that describes a tree, and the one that did before Orbax 0.4."""
ITEMS = ("default", "state", "train_state", "pytree", "model", "params")
"""Names that programs give to the tree with the weights, where they save several things; the first one is taken."""
PARAMS = "params"
"""What Linen calls the collection of parameters, and train states their field."""
VALUES = ("value", "raw_value")
"""What NNX calls the array of a variable."""
RANDOM = "rngs"
"""What NNX calls the random streams of a module, which are no weights."""

KeyNames = tuple[str, ...]


def is_checkpoint(source: str | Path) -> bool:
    """Whether this is a folder with a tree that Orbax saved, or with steps or items of such trees."""
    path = Path(source)
    return path.is_dir() and (_is_tree(path) or bool(_items(path) or _steps(path)))


def read_checkpoint(source: str | Path, params: Collection[str], statistics: Collection[str]) -> Weights:
    """Returns the weights in a checkpoint by our names; of other names, those that the model has no place for.

    Args:
      source: a tree's folder; a step's; or a `CheckpointManager`'s, of which the newest step is taken.
      params: the names of the model's parameters.
      statistics: likewise.

    Raises:
      WeightsError: there is none, there are several trees, or it cannot be read.
    """
    folder = _tree_folder(Path(source))
    former = not (folder / METADATA).is_file()
    try:
        handler = ocp.PyTreeCheckpointHandler()
        tree = handler.restore(folder) if former else handler.metadata(folder).tree
        chosen = _name_leaves(_leaves(tree), params, statistics)
        found = _leaves(tree if former else _restore(handler, folder, tree, {*chosen.values()}))
        return Weights(str(source), {name: np.asarray(found[path]) for name, path in chosen.items()})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(f"{folder} cannot be read by Orbax {ocp.__version__}: {first_line(error)}") from error


def by_own_names(params: Iterable[str], statistics: Iterable[str]) -> Family:
    """Returns the family of tensors that have our names and lie as ours do."""
    places = {name: Place((name,)) for name in (*params, *statistics)}
    return Family("Orbax", (), lambda model: places)


def _name_leaves(
    leaves: Mapping[KeyNames, Any], params: Collection[str], statistics: Collection[str]
) -> dict[str, KeyNames]:
    """The path of each leaf that is taken, by its name.

    All leaves below the node with the parameters are, whether the model has a place for them or not; of what lies
    beside it (an optimizer's state, a step, Linen's other collections) only statistics of the model.
    """
    paths = {_without_value(path): path for path, leaf in leaves.items() if leaf is not None and RANDOM not in path}
    node = _node_of(paths, params)
    depth, above = len(node), node[:-1]
    named = {"/".join(path[depth:]): source for path, source in paths.items() if path[:depth] == node}
    for path, source in paths.items():
        if path[:depth] != node and path[: len(above)] == above:
            rest = path[len(above) :]
            for name in {"/".join(rest), "/".join(rest[1:])} & {*statistics}:
                named.setdefault(name, source)
    return named


def _node_of(paths: Iterable[KeyNames], params: Collection[str]) -> KeyNames:
    """The node below which most leaves have names of ours; of several the highest, and of those `params`.

    An optimizer's moments have our names too, and lie deeper.
    """
    counts = Counter(path[:depth] for path in paths for depth in range(len(path)) if "/".join(path[depth:]) in params)
    if not counts:
        return (PARAMS,) if any(path[:1] == (PARAMS,) and len(path) > 1 for path in paths) else ()
    return max(counts, key=lambda node: (counts[node], -len(node), node.count(PARAMS)))


def _without_value(path: KeyNames) -> KeyNames:
    return path[:-1] if len(path) > 1 and path[-1] in VALUES else path


def _leaves(tree: Any) -> dict[KeyNames, Any]:
    paths = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)
    return {_key_names(path): leaf for path, leaf in paths}


def _key_names(path: Iterable[Any]) -> KeyNames:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)


def _restore(handler: ocp.PyTreeCheckpointHandler, folder: Path, tree: Any, wanted: Collection[KeyNames]) -> Any:
    """Reads these leaves alone, as NumPy arrays; the others are Orbax's placeholder."""
    asked = jax.tree_util.tree_map_with_path(lambda p, leaf: leaf if _key_names(p) in wanted else ocp.PLACEHOLDER, tree)
    how = jax.tree.map(lambda leaf: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return handler.restore(folder, args=ocp.args.PyTreeRestore(item=asked, restore_args=how))


def _is_tree(folder: Path) -> bool:
    return (folder / METADATA).is_file() or (folder / FORMER).is_file()


def _items(folder: Path) -> dict[str, Path]:
    """The trees in a folder that holds several, by their names."""
    return {item.name: item for item in sorted(folder.iterdir()) if item.is_dir() and _is_tree(item)}


def _steps(folder: Path) -> dict[int, Path]:
    """The saved steps in a folder, by their numbers, which stand at the end of their names."""
    found = {}
    for step in folder.iterdir():
        number = re.fullmatch(r"(?:.*[_-])?(\d+)", step.name)
        if number and step.is_dir() and (_is_tree(step) or _items(step)):
            found[int(number[1])] = step
    return found


def _tree_folder(path: Path) -> Path:
    """The folder of the tree with the weights.

    Raises:
      WeightsError: it has several, none of which has a usual name.
    """
    if _is_tree(path):
        return path
    steps = _steps(path)
    if steps:
        return _tree_folder(steps[max(steps)])
    items = _items(path)
    if len(items) == 1:
        return next(iter(items.values()))
    usual = [name for name in ITEMS if name in items]
    if not usual:
        raise WeightsError(
            f"{path} holds several trees: {', '.join(items)}. Name the one with the weights: {path}/NAME."
        )
    return items[usual[0]]
