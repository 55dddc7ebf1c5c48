"""The table of formats, and the one function that opens any of them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from multipod.data.clicks.records import DESCRIPTION
from multipod.data.files.array_record import open_array_records
from multipod.data.files.arrays import open_arrays
from multipod.data.files.clicks import open_clicks
from multipod.data.files.folder import open_folder
from multipod.data.files.hub import PREFIX, is_saved, open_hub
from multipod.data.files.lines import open_lines
from multipod.data.files.match import match_files
from multipod.data.files.parquet import open_parquet
from multipod.data.files.records import Records
from multipod.data.files.tar import open_tar
from multipod.data.files.tfrecord import open_tfrecords
from multipod.errors import DataError, nearest


@dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
      about: what it is, in a few words.
      suffixes: of its files; empty: it is a folder.
      open: from the files, or for a folder from the folder, to its records.
    """

    about: str
    suffixes: tuple[str, ...]
    open: Callable[..., Records]


FORMATS = {
    "folder": Format("images in a folder for each class, or with labels.csv", (), open_folder),
    "arrays": Format("NumPy arrays of one folder, mapped into memory", (), open_arrays),
    "clicks": Format("click records of `multipod clicks prepare`", (), open_clicks),
    "tfrecord": Format("TFRecords of tf.train.Example", (".tfrecord", ".tfrecords"), open_tfrecords),
    "array-record": Format("ArrayRecords of tf.train.Example", (".array_record", ".arrayrecord"), open_array_records),
    "tar": Format("WebDataset archives", (".tar", ".tar.gz", ".tgz"), open_tar),
    "parquet": Format("Parquet tables", (".parquet",), open_parquet),
    "lines": Format("text, one example a line", (".txt", ".txt.gz"), open_lines),
    "hub": Format("a data set of Hugging Face: hub:NAME:SPLIT, or of save_to_disk", (), lambda at: open_hub(str(at))),
}
"""Every format by name. A new one is a subclass of `Records` and a line here."""


def open_records(where: str, kind: str = "", otherwise: str = "") -> Records:
    """The records behind a folder, a file, or a pattern of files (`train-*`, `train-{000..123}.tar`).

    Without `kind` a folder with `clicks.json` is `clicks`, one of `.npy` files `arrays`, one with files of another
    format stands for those files, any other is `folder`. Files are known by their suffix; those without one
    (`train-00000-of-01024`) are TFRecords, and those with an unknown one of the format `otherwise`.

    Raises:
      DataError: nothing is there, the format is not known, or it cannot be read.
    """
    if kind and kind not in FORMATS:
        raise DataError(f"no data format is called {kind!r}. {nearest(kind, FORMATS)}")
    if where.startswith(PREFIX):
        return open_hub(where)
    folder = Path(where).expanduser()
    if not folder.is_dir():
        files = match_files(where, f"{kind or 'data'} files")
        kind = kind or _kind_of(files, otherwise)
        if not FORMATS[kind].suffixes:
            raise DataError(f"{where} is a file, and the format {kind} is a folder. Name the folder.")
        return FORMATS[kind].open(files)
    kind, files = _in_folder(folder, kind)
    return FORMATS[kind].open(files) if FORMATS[kind].suffixes else FORMATS[kind].open(folder)


def _kind_of(files: tuple[Path, ...], otherwise: str) -> str:
    """The format of files, by the suffix of the first."""
    for kind, known in FORMATS.items():
        if known.suffixes and files[0].name.endswith(known.suffixes):
            return kind
    if files[0].suffix == "" or "-of-" in files[0].name:
        return "tfrecord"
    if otherwise:
        return otherwise
    raise DataError(f"{files[0]}: the format of {files[0].suffix} is not known. Say which it is: {', '.join(FORMATS)}.")


def _in_folder(folder: Path, kind: str) -> tuple[str, tuple[Path, ...]]:
    """The format of what lies in a folder, and the files if it is one of files."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if not kind:
        several = [(name, known.suffixes) for name, known in FORMATS.items() if known.suffixes and name != "lines"]
        kinds = [name for name, suffixes in several if any(file.endswith(suffixes) for file in names)]
        if (folder / DESCRIPTION).is_file():
            return "clicks", ()
        if is_saved(folder):
            return "hub", ()
        has_arrays = any(name.endswith(".npy") for name in names)
        kind = "arrays" if has_arrays else kinds[0] if kinds else "folder"
    chosen = FORMATS[kind].suffixes
    return kind, tuple(folder / name for name in sorted(names) if name.endswith(chosen)) if chosen else ()
