"""Traces that are kept in files, so that a second plan of the same recipe traces nothing.

What a trace says depends on the recipe, on the shapes of its data, and on the code. So its name is a hash of the
recipe's text, of the arguments, of JAX's version, and of every source file of multipod and of those that are loaded and
not installed: path, size and time. Edit a file and all is traced anew. A recipe whose text holds addresses has no name,
and is traced each time.
"""

import hashlib
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache, wraps
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from multipod.plan.traced.fields import count_evaluated, example_to_plan
from multipod.recipe.recipe import Recipe

T = TypeVar("T")

_folder: list[Path] = []


def remember_traces(folder: Path | None) -> None:
    """Keeps traces in this folder from now on; None keeps none."""
    _folder[:] = [] if folder is None else [folder]


def remembered(kind: Any, recipe: Recipe, arguments: tuple[Any, ...], make: Callable[[], T]) -> T:
    """What `make` returns, a value of type `kind` in plain dataclasses; from a file if it was made before."""
    text = repr(recipe)
    if not _folder or " at 0x" in text or (code := _code()) is None:
        return make()
    key = "\n".join([text, repr(arguments), repr(kind), _shapes(recipe), metadata.version("jax"), code])
    file = _folder[0] / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    with suppress(OSError, msgspec.MsgspecError):
        known: T = msgspec.json.decode(file.read_bytes(), type=kind)
        return known
    made = make()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(made))
        part.replace(file)
    return made


def in_memory(maxsize: int) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """A decorator that keeps results in this process, but for arguments that nobody can hash: a user's own model."""

    def decorated(function: Callable[..., T]) -> Callable[..., T]:
        known = lru_cache(maxsize)(function)

        @wraps(function)
        def call(*arguments: Any) -> T:
            try:
                hash(arguments)
            except TypeError:
                return function(*arguments)
            return known(*arguments)

        return call

    return decorated


@in_memory(maxsize=16)
def _shapes(recipe: Recipe) -> str:
    """Shapes of an example, and how many are to be evaluated; reading takes longer than planning, so once a recipe."""
    shapes = {name: (array.shape[1:], str(array.dtype)) for name, array in example_to_plan(recipe).items()}
    return repr([shapes, count_evaluated(recipe)])


@cache
def _code() -> str | None:
    """The state of all loaded sources beside installed packages; multipod's own count wherever they are.

    None where some source cannot be found.
    """
    installed = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))
    loaded = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
    files = {Path(name) for name in loaded if name and not name.startswith(installed)}
    found = []
    for file in files | set(Path(__file__).parents[2].rglob("*.py")):
        try:
            state = file.stat()
        except OSError:
            return None
        found.append(f"{file} {state.st_size} {state.st_mtime_ns}")
    return "\n".join(sorted(found))
