"""What the processes of a world report of themselves when they come together."""

from dataclasses import dataclass
from typing import Any

from multipod.elastic.worker.update_buffer import read_updates
from multipod.train.events import Updated


@dataclass(frozen=True)
class PeerReports:
    """The reports, process by process."""

    reports: list[dict[str, Any]]

    @property
    def manifests(self) -> list[str]:
        """The manifests of their snapshots."""
        return [report["held"] for report in self.reports]

    @property
    def folder(self) -> str:
        """The run's folder, if a process knows it; else empty."""
        return next((report["folder"] for report in self.reports if report["folder"]), "")

    @property
    def idle_s(self) -> list[float]:
        """Seconds since each saw an update done; -1 for none yet."""
        return [report["idle_s"] for report in self.reports]

    @property
    def updates_done(self) -> int:
        """The most updates that had been done."""
        return max(report["made"] for report in self.reports)

    @property
    def recent(self) -> dict[int, Updated]:
        """The last updates that a process saw done, by number."""
        return read_updates(event for report in self.reports for event in report["recent"])
