"""Finds a recipe by its name in the table, or as `file.py:function`."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path

from multipod.errors import RecipeError, nearest
from multipod.recipe.recipe import Recipe

RECIPES = {
    "bert-large": "multipod.recipes.bert_large:bert_large",
    "bert-large-phase1": "multipod.recipes.bert_large:bert_large_phase1",
    "digits": "multipod.recipes.digits:digits",
    "dlrm-kaggle": "multipod.recipes.dlrm_criteo:dlrm_kaggle",
    "dlrm-mlperf": "multipod.recipes.dlrm_criteo:dlrm_mlperf",
    "dlrm-small": "multipod.recipes.dlrm_small:dlrm_small",
    "dlrm-v2": "multipod.recipes.dlrm_criteo:dlrm_v2",
    "dlrm-v2-small": "multipod.recipes.dlrm_small:dlrm_v2_small",
    **{f"efficientnet-b{n}": f"multipod.recipes.imagenet:efficientnet_b{n}" for n in range(8)},
    "gnmt": "multipod.recipes.gnmt:gnmt",
    "gnmt-small": "multipod.recipes.gnmt:gnmt_small",
    "mask-rcnn": "multipod.recipes.detection:mask_rcnn",
    "mask-rcnn-shapes": "multipod.recipes.detection:mask_rcnn_shapes",
    "mlp-small": "multipod.recipes.mlp_small:mlp_small",
    "resnet50": "multipod.recipes.imagenet:resnet50",
    "ssd": "multipod.recipes.detection:ssd",
    "ssd-shapes": "multipod.recipes.detection:ssd_shapes",
    "st-moe-32b": "multipod.recipes.st_moe:st_moe_32b",
    "st-moe-l": "multipod.recipes.st_moe:st_moe_l",
    "st-moe-small": "multipod.recipes.st_moe:st_moe_small",
    "stdlib-docs": "multipod.recipes.stdlib_docs:stdlib_docs",
    "stdlib-lm": "multipod.recipes.stdlib_lm:stdlib_lm",
    "transformer-big": "multipod.recipes.transformer_big:transformer_big",
}
"""Every ready-made recipe: its name, and the function that returns it."""


def find(name: str) -> Callable[[], Recipe]:
    """Returns the function behind a name of `RECIPES` or behind `file.py:function`.

    Raises:
      RecipeError: no such name, file or function, or a file that fails when it is read.
    """
    if name in RECIPES:
        module, function = RECIPES[name].split(":")
        return getattr(importlib.import_module(module), function)
    path, colon, function = name.rpartition(":")
    if not colon or not path.endswith(".py"):
        raise RecipeError(f"no recipe {name!r}. {nearest(name, RECIPES)} Or write my_recipe.py:function.")
    return _from_file(Path(path), function)


def load(name: str) -> Recipe:
    """Returns the recipe of this name.

    Raises:
      RecipeError: see `find`; or the function does not return a recipe.
    """
    recipe = find(name)()
    if not isinstance(recipe, Recipe):
        raise RecipeError(f"{name} returned {type(recipe).__name__}, not a multipod.recipe.recipe.Recipe.")
    return recipe


def _from_file(path: Path, function: str) -> Callable[[], Recipe]:
    if not path.is_file():
        raise RecipeError(f"there is no file {path}. Give the path of a Python file, then a colon and the function.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(spec.name, module)  # dataclasses look it up; a file called json.py replaces nothing
    if str(path.parent.absolute()) not in sys.path:
        # A recipe may import the files beside it. Last, so that a recipe called json.py stands before no library's
        # module, here or in the reading processes, which inherit the path.
        sys.path.append(str(path.parent.absolute()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise RecipeError(f"{path} cannot be read as a recipe: {type(error).__name__}: {error}") from error
    maker = getattr(module, function, None)
    if not callable(maker):
        known = [n for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
        raise RecipeError(f"{path} has no function {function!r}. {nearest(function, known)}")
    return maker
