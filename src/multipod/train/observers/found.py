"""What a run folder keeps of a detector's last evaluation, for the report: `detections/`."""

import base64
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from multipod.errors import RunFolderError

FILE = "detections.json"


class _Picture(msgspec.Struct):
    group: str
    file: str
    caption: str


class _Page(msgspec.Struct):
    update: int
    images: int
    curves: dict[str, dict[str, list[float]]]
    pictures: list[_Picture]


@dataclass(frozen=True)
class FoundPage:
    """What the report shows of detections; nothing for other runs.

    Attributes:
      what: which images were looked at, and when.
      curves: for each kind and IoU, the precisions at recalls from 0 to 1.
      groups: heading, and for each picture its data as a URI and its caption.
    """

    what: str = ""
    curves: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    groups: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = ()


def read_found(folder: Path) -> FoundPage:
    """Reads `detections/` of a run folder; an empty page where there is none.

    Raises:
      RunFolderError: it is there and cannot be read.
    """
    path = folder / "detections" / FILE
    if not path.exists():
        return FoundPage()
    try:
        page = msgspec.json.decode(path.read_bytes(), type=_Page)
        groups = {one.group: [] for one in page.pictures}  # type: dict[str, list[tuple[str, str]]]
        for one in page.pictures:
            code = base64.b64encode((path.parent / one.file).read_bytes()).decode()
            groups[one.group].append((f"data:image/png;base64,{code}", one.caption))
    except (OSError, msgspec.DecodeError) as error:
        raise RunFolderError(
            f"{path}: cannot be read ({error}). Delete the folder `detections`: the report does without."
        ) from error
    what = f"the first {page.images:,} test images, after {page.update:,} updates"
    return FoundPage(what, page.curves, tuple((name, tuple(ones)) for name, ones in groups.items()))
