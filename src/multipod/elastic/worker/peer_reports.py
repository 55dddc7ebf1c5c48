"""What the processes of a world said of themselves when they met."""

from dataclasses import dataclass
from typing import Any

from multipod.elastic.worker.update_buffer import read_updates
from multipod.train.events import Updated


@dataclass(frozen=True)
class PeerReports:
    """What was said, process by process."""

    reports: list[dict[str, Any]]

    @property
    def manifests(self) -> list[str]:
        """Their manifests."""
        return [one["held"] for one in self.reports]

    @property
    def folder(self) -> str:
        """Of the run, if somebody knows it."""
        return next((one["folder"] for one in self.reports if one["folder"]), "")

    @property
    def idle_s(self) -> list[float]:
        """Seconds since each saw an update done; -1 for none yet."""
        return [one["idle_s"] for one in self.reports]

    @property
    def updates_done(self) -> int:
        """The most updates that had been done."""
        return max(one["made"] for one in self.reports)

    @property
    def recent(self) -> dict[int, Updated]:
        """The last updates that somebody saw done, by number."""
        return read_updates(event for one in self.reports for event in one["recent"])
