"""State dicts in files and folders, and on the Hugging Face hub: PyTorch's pickles and safetensors, in parts or not."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from multipod.errors import WeightsError
from multipod.extras import import_optional
from multipod.interop.weights.places import Tensors

HUB = "hf:"
"""Begins the name of a model of the Hugging Face hub: `hf:org/name`, or `hf:org/name@revision`."""
INDEX, CONFIG = ".index.json", "config.json"
SAFETENSORS, PICKLES = (".safetensors",), (".pt", ".pth", ".bin", ".ckpt")
WRAPPERS = ("state_dict", "model_state_dict", "model", "module")
"""Entries under which training scripts put the state dict into a file."""


@dataclass(frozen=True)
class Weights:
    """Another library's weights.

    Attributes:
      where: as the user named them.
      tensors: by name.
      config: what stands in `config.json` beside them; empty without one.
    """

    where: str
    tensors: Tensors
    config: Mapping[str, Any] = field(default_factory=dict)


def read_weights(source: str | Path) -> Weights:
    """The weights in a file, in a folder, or on the hub.

    A folder has one file of weights, or an index (`*.index.json`) and its parts. Of several kinds safetensors come
    first. Pickles are read with `weights_only`: nothing in them is run.

    Raises:
      WeightsError: there is nothing to read, or it is damaged.
      MissingPackageError: a library that reads it is not installed.
    """
    path = _from_hub(str(source)) if str(source).startswith(HUB) else Path(source)
    if path.is_dir():
        tensors: dict[str, np.ndarray] = {}
        for file in _files_of(path):
            tensors |= _read(file)
        return Weights(str(source), tensors, _config_of(path))
    if not path.is_file():
        raise WeightsError(
            f"{source}: no such file or folder. Name a .safetensors, .pt or .pth file, a folder with one, or "
            "hf:ORG/NAME."
        )
    return Weights(str(source), _read(path), _config_of(path.parent))


def write_weights(path: Path, tensors: Tensors, config: Mapping[str, Any]) -> list[Path]:
    """Writes safetensors; into a folder (a path without a suffix) also `config.json`. Returns what was written.

    Raises:
      WeightsError: `path` names a file that is no safetensors.
      MissingPackageError: safetensors is not installed.
    """
    if path.suffix and path.suffix not in SAFETENSORS:
        raise WeightsError(f"{path}: weights are written as .safetensors. Name such a file, or a folder.")
    file = path if path.suffix else path / "model.safetensors"
    file.parent.mkdir(parents=True, exist_ok=True)
    import_optional(str(path), "safetensors.numpy").save_file(dict(tensors), file, metadata={"format": "pt"})
    if path.suffix or not config:
        return [file]
    (path / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return [file, path / CONFIG]


def _from_hub(source: str) -> Path:
    """The folder with a model of the hub: the user's cache, if it is there, or what is fetched into it."""
    hub, (name, _, revision) = import_optional(source, "huggingface_hub"), source.removeprefix(HUB).partition("@")
    wanted = {"repo_id": name, "revision": revision or None}
    try:
        files = hub.HfApi().list_repo_files(**wanted)
    except Exception as error:
        return _from_cache(hub, source, wanted, error)
    suffix = SAFETENSORS if any(file.endswith(SAFETENSORS) for file in files) else PICKLES
    patterns = [f"*{ending}" for ending in suffix] + [f"*{INDEX}", CONFIG]
    try:
        return Path(hub.snapshot_download(**wanted, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except Exception as error:
        return _from_cache(hub, source, wanted, error)


def _from_cache(hub: Any, source: str, wanted: Mapping[str, Any], problem: Exception) -> Path:
    try:
        return Path(hub.snapshot_download(**wanted, local_files_only=True))
    except Exception as error:
        first = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
        raise WeightsError(
            f"{source} cannot be fetched and is not in the cache of the hub: {first} Check the name and the network, "
            "or name a local folder."
        ) from error


def _files_of(folder: Path) -> list[Path]:
    """The files of weights in a folder."""
    for suffixes in (SAFETENSORS, PICKLES):
        files = sorted(file for file in folder.iterdir() if file.name.endswith(suffixes))
        indices = [file for file in sorted(folder.glob(f"*{INDEX}")) if file.name.endswith(_indices(suffixes))]
        if indices:
            return _parts_of(indices[0])
        if len(files) == 1:
            return files
        if files:
            names = ", ".join(file.name for file in files[:8])
            raise WeightsError(f"{folder} has several files of weights and no index: {names}. Name one of them.")
    raise WeightsError(f"{folder} has no weights: no .safetensors, .pt, .pth or .bin file. Name another folder.")


def _indices(suffixes: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{suffix}{INDEX}" for suffix in suffixes)


def _parts_of(index: Path) -> list[Path]:
    try:
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    except (ValueError, KeyError, AttributeError) as error:
        raise WeightsError(f"{index} is no index of weights: {error}. Put the file back.") from error
    parts = [index.parent / name for name in sorted({*names})]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise WeightsError(f"{index} names parts that are not there: {', '.join(missing)}. Put them beside it.")
    return parts


def _config_of(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise WeightsError(f"{path} is damaged: {error}. Put the file back, or take it away.") from error


def _read(path: Path) -> dict[str, np.ndarray]:
    readers: dict[tuple[str, ...], Callable[[Path], dict[str, np.ndarray]]]
    readers = {SAFETENSORS: _read_safetensors, PICKLES: _read_pickle}
    for suffixes, reader in readers.items():
        if path.name.endswith(suffixes):
            return reader(path)
    known = ", ".join((*SAFETENSORS, *PICKLES))
    raise WeightsError(f"{path}: files of weights end in {known}. Convert it, or name another.")


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    library = import_optional(str(path), "safetensors")
    try:
        with library.safe_open(path, framework="numpy") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except (library.SafetensorError, OSError) as error:
        raise WeightsError(f"{path} is damaged: {error}. Copy it again.") from error


def _read_pickle(path: Path) -> dict[str, np.ndarray]:
    torch = import_optional(str(path), "torch")
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise WeightsError(
            f"{path} holds more than tensors, or is damaged: {first} Save its state dict alone: "
            "torch.save(model.state_dict(), PATH)."
        ) from error
    state = next((loaded[name] for name in WRAPPERS if isinstance(loaded, dict) and name in loaded), loaded)
    if not isinstance(state, dict):
        raise WeightsError(f"{path} holds a {type(state).__name__}, no state dict. Save model.state_dict().")
    tensors = {str(name): _host(torch, value) for name, value in state.items() if isinstance(value, torch.Tensor)}
    wrapped = bool(tensors) and all(name.startswith("module.") for name in tensors)  # as DataParallel saves it
    return {name.removeprefix("module.") if wrapped else name: tensor for name, tensor in tensors.items()}


def _host(torch: Any, tensor: Any) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.detach().numpy()
