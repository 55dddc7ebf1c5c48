"""The errors that a user can cause. `docs/errors.md` draws them as a tree.

Every message has three parts: where, what, and the next move. The command line prints the
message alone and exits with `exit_code`.
"""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches


class MultipodError(Exception):
    """Anything that multipod refuses, with a message written for the person who caused it."""

    exit_code = 2


class RecipeError(MultipodError, ValueError):
    """A recipe that cannot be found, read, changed or trained as asked."""


class DataError(MultipodError, ValueError):
    """Examples, files or ids that cannot be read or do not fit what they are looked up in."""


class TopologyError(MultipodError, ValueError):
    """A machine that cannot be, or that is cut in parts."""


class ScheduleError(MultipodError, ValueError):
    """A schedule that cannot be built, read or proven, or that does not fit the machine."""


class LayoutError(MultipodError, ValueError):
    """A mesh, a tile or a batch that does not fit the devices."""


class PlanError(MultipodError, ValueError):
    """A machine, a measurement or a layout that cannot be planned with, or a plan that cannot be read."""


class RunFolderError(MultipodError, OSError):
    """A run folder that is missing, incomplete, of another recipe, or cannot be written."""


class CheckpointError(RunFolderError):
    """A checkpoint that is missing, damaged, or of another model."""


class ChaosError(MultipodError, RuntimeError):
    """A plan of faults that cannot be read or carried out, or a run that did not live through one."""


class MetricError(MultipodError, ValueError):
    """Scores, labels, texts or detections that cannot be judged."""


class MlperfError(MultipodError, ValueError):
    """A run that is no MLPerf benchmark, or a log of one that cannot be read, checked or handed in."""


class WeightsError(MultipodError, ValueError):
    """Weights of another library that cannot be found or read, or that do not fit the model."""


class MicroError(MultipodError, ValueError):
    """A `.tflite` file that the embedded runtime refuses, or values that do not fit it."""


class ExportError(MultipodError, ValueError):
    """A function, a calibration set or options of which no `.tflite` file can be made."""


class PoisonedError(MultipodError, ArithmeticError):
    """Values that are not finite: tensors on some rank that would have spread to all, a router's logits, a loss."""


class NativeError(MultipodError, RuntimeError):
    """C or C++ that could not be compiled here."""


class MissingPackageError(MultipodError, ImportError):
    """An optional package that is needed and not installed; the message names the extra that brings it."""


class ClusterError(MultipodError, RuntimeError):
    """Processes that could not be started, found or joined."""


class PeerLostError(ClusterError):
    """Another process of the run died or stopped answering: this one is healthy and had to stop."""

    exit_code = 75  # EX_TEMPFAIL: the launcher knows by it who was the victim and who the cause


def nearest(name: str, known: Iterable[str]) -> str:
    """The known names most like `name`, or all of them when none is alike, as text for a message."""
    names: Sequence[str] = sorted({*known})
    alike = get_close_matches(name, names, n=4, cutoff=0.5)
    if alike:
        return "Nearest: " + ", ".join(alike) + "."
    return "Known: " + ", ".join(names) + "."


def first_line(error: BaseException) -> str:
    """What an error says, in one line without the last dot; its type if it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0][:300].rstrip(".") if text else type(error).__name__
