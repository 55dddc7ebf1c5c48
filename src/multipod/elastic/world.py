"""A `World`: the processes that train together for a while, as plain data. See docs/design/availability.md."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class World:
    """The processes of a run between two changes among them. The launcher makes them, and every process follows.

    Attributes:
      generation: counts the worlds of a run, from 0.
      slots: the taken slots of the mesh, increasing: process k of this world, to JAX, has the devices of `slots[k]`.
      ranks: the launcher's number of each process, in the same order.
      total: how many slots there are; those not taken are holes in the mesh.
      address: of this world's own coordination service.
      planned: all processes of the world before are well: they leave it together after an update.
      folder: of the run; empty while none is known.
      lost: ranks that are no more, with why: since the last world in which an update was done.
      newcomers: ranks that were not in the world before.
      mirror_every: updates between two copies of the state in memory.
      mirror_copies: how many failure domains besides its own are to hold what one holds.
      places: of each process, in the order of `ranks`: its host, or `RACK/HOST`; empty if all are on this one.
    """

    generation: int
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    total: int
    address: str
    planned: bool = False
    folder: str = ""
    lost: dict[str, str] = field(default_factory=dict)
    newcomers: tuple[int, ...] = ()
    mirror_every: int = 1
    mirror_copies: int = 1
    places: tuple[str, ...] = ()

    def process_of(self, rank: int) -> int:
        """The number that JAX gives to this rank."""
        return self.ranks.index(rank)

    def to_line(self) -> str:
        """The line that the launcher sends."""
        return json.dumps({"world": asdict(self)})


def go_message(generation: int) -> str:
    """The line by which all processes of this world, which have left the one before, are to join now."""
    return json.dumps({"go": generation})


def read_go(line: str) -> int:
    """The generation of the world that is to be joined now; -1 if the line says something else."""
    try:
        return int(json.loads(line)["go"])
    except (ValueError, KeyError, TypeError):
        return -1


def read_world(line: str) -> World | None:
    """The world in a line from the launcher; None if it says something else."""
    try:
        fields: dict[str, Any] = json.loads(line)["world"]
    except (ValueError, KeyError, TypeError):
        return None
    lists = {name: tuple(fields[name]) for name in ("slots", "ranks", "newcomers", "places")}
    return World(**{**fields, **lists})
