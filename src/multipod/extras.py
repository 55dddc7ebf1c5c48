"""Optional packages, and the extra that brings each: `pip install 'multipod[report]'`."""

import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from multipod.errors import MissingPackageError

EXTRA_OF = {
    "PIL": "data",
    "array_record": "data",
    "comet_ml": "comet",
    "datasets": "hub",
    "faster_coco_eval": "detection",
    "flatbuffers": "export",
    "google_crc32c": "data",
    "grain": "grain",
    "huggingface_hub": "weights",
    "jinja2": "report",
    "matplotlib": "report",
    "mlflow": "mlflow",
    "mlperf_logging": "mlperf",
    "pyarrow": "data",
    "pycocotools": "detection",
    "ray": "ray",
    "sacrebleu": "bleu",
    "safetensors": "weights",
    "scipy": "calibrate",
    "sentencepiece": "text",
    "simplejpeg": "data",
    "sklearn": "tasks",
    "tensorboardX": "tensorboard",
    "tokenizers": "text",
    "torch": "bench",
    "trackio": "trackio",
    "wandb": "wandb",
    "yaml": "launch",
}
"""The extra of each package, by the name that it is imported by."""


def is_installed(package: str) -> bool:
    """Whether a package can be found. It is not imported: some take seconds."""
    return sys.modules[package] is not None if package in sys.modules else find_spec(package) is not None


def packages_of(extra: str) -> list[str]:
    """The packages that an extra brings; none where there is no such extra."""
    return [package for package, brought_by in EXTRA_OF.items() if brought_by == extra]


def has_extra(extra: str) -> bool:
    """Whether all packages of an extra are installed."""
    return all(map(is_installed, packages_of(extra)))


def pip_install(extras: Iterable[str]) -> str:
    """The command that installs extras."""
    return f"pip install 'multipod[{','.join(sorted({*extras}))}]'"


def require(what: str, *packages: str) -> None:
    """Refuses `what` where one of the optional `packages` that it needs is not installed.

    Raises:
      MissingPackageError: says which extra brings it.
    """
    missing = [package for package in packages if not is_installed(package)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        command = pip_install(EXTRA_OF[package] for package in missing)
        raise MissingPackageError(f"{what}: {', '.join(missing)} {verb} not installed. {command}")


def import_optional(what: str, module: str) -> Any:
    """Imports a module of an optional package, which `what` needs.

    Raises:
      MissingPackageError: the package is not installed; says which extra brings it.
    """
    require(what, module.partition(".")[0])
    return import_module(module)
