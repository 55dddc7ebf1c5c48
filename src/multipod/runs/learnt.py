"""What a run has learnt, for a notebook: its loss as a curve, and the values of its last evaluation."""

from contextlib import suppress

from multipod import notebook
from multipod.errors import RunFolderError
from multipod.train.events import Evaluated, Updated
from multipod.train.observers import jsonl
from multipod.train.run_folder import RunFolder


def learnt(folder: RunFolder, update: int) -> tuple[list[notebook.Row], str]:
    """Returns a row of the last evaluation until after `update` updates, and the loss drawn.

    Both are empty where the run's events cannot be read.
    """
    with suppress(RunFolderError):
        events = [jsonl.decode(record) for record in jsonl.read(folder.metrics)]
        losses = [e.values.get("loss", float("nan")) for e in events if isinstance(e, Updated) and e.update <= update]
        judged = [event for event in events if isinstance(event, Evaluated) and event.update <= update]
        told: list[notebook.Row] = [
            (f"test, after {event.update:,}", ", ".join(f"{name} {value:.6g}" for name, value in event.values.items()))
            for event in judged[-1:]
        ]
        return told, notebook.curve(losses, "training loss")
    return [], ""
