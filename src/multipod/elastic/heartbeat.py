"""The worker's side of the launcher's watch: says where the loop is, and ends when the launcher is gone.

The launcher (`multipod.elastic.launcher.processes`) gives each process one end of a socket pair. `Heartbeat`
writes a JSON line to it every `beat_s`; the fields are those of `Beat`. JAX's own heartbeat comes
from a thread of C++, and goes on when Python hangs; this one is sent by Python and carries the phase.
A launcher of a run that survives (`multipod.elastic.launcher.membership`) answers with JSON lines of its own.
"""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from multipod.errors import PeerLostError

CONTROL_FD = "MULTIPOD_CONTROL_FD"
"""The environment variable with the number of the inherited descriptor."""


@dataclass(frozen=True)
class Beat:
    """A sign of life.

    Attributes:
      phase: see `multipod.train.hooks.PhaseHook`.
      update: updates done in the whole run, those before a resume included.
      begun: updates that this process has begun, the one it is in included.
      age_s: since the phase was entered.
      folder: the run's folder; empty while not known.
      saved: updates in the last checkpoint that this process completed; None before the first.
      done: the loop is over, and no further beat will come.
      identity: what this process would train, versions included; empty while not known. Peers must have the same.
      generation: of the world that this process is in (`multipod.elastic.world`); -1 while in none.
      joined: it has all its peers in that world.
      broken: why it left that world, where no peer's death was the reason that it knew; empty while in it.
      left: the last generation that it has left for good; nothing of it is kept here.
      speed_s: how long a small fixed computation takes on this process's device; 0 while not known.
    """

    phase: str
    update: int
    begun: int
    age_s: float
    folder: str = ""
    saved: int | None = None
    done: bool = False
    identity: str = ""
    generation: int = -1
    joined: bool = False
    broken: str = ""
    left: int = -1
    speed_s: float = 0.0


def end_group() -> None:
    """Ends this process at once, and the processes it started if the launcher made it a group's leader."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(PeerLostError.exit_code)


class Heartbeat:
    """A `PhaseHook` that two daemon threads carry to the launcher.

    Nothing here raises in the training thread, whatever happens to the launcher.

    Args:
      descriptor: one end of a stream socket; it is not passed on to children of this process.
      beat_s: seconds between two beats, `Timeouts.beat_s`.
      lost: called when the launcher has closed its end, which only its death does.
    """

    def __init__(self, descriptor: int, beat_s: float, lost: Callable[[], None] = end_group) -> None:
        self.on_line: Callable[[str], None] = lambda line: None
        """Given each line that the launcher sends, in a thread of its own; set it before reporting `identity`."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._beat_s = beat_s
        self._lost = lost
        self._position = ("starting", 0, time.monotonic())
        self._begun = 0
        self._noted: dict[str, Any] = {}
        self._closed = False
        self._wake = threading.Event()
        self._sender = threading.Thread(target=self._send, name="heartbeat", daemon=True)
        self._sender.start()
        threading.Thread(target=self._listen, name="launcher-watch", daemon=True).start()

    def __call__(self, phase: str, update: int) -> None:
        """Notes that the loop enters `phase`. Within phase updating it costs less than a microsecond.

        The launcher is told a new phase at once, and of a new update with the next beat.
        """
        before, self._position = self._position[0], (phase, update, time.monotonic())
        if phase == "updating":
            self._begun += 1
        if phase != before:
            self._wake.set()

    def restart(self) -> None:
        """Notes that the loop is about to start once more, in another world, and is in no update yet."""
        self("starting", self._position[1])

    def note(self, **fields: Any) -> None:
        """Tells the launcher at once: fields of `Beat` as `folder`, where the run is written, or `saved`."""
        if "folder" in fields:
            fields["folder"] = os.fspath(fields["folder"])
        self._noted = {**self._noted, **fields}  # a new value each time: the sending thread reads it as it is
        self._wake.set()

    def close(self) -> None:
        """Sends the last beat, `done`. The watch over the launcher goes on until this process ends."""
        self._closed = True
        self._wake.set()
        self._sender.join(timeout=1.0)  # a suspended launcher does not read, and may not hold us up

    def _beat(self) -> Beat:
        phase, update, since_s = self._position
        age_s = time.monotonic() - since_s
        return Beat(phase, update, self._begun, age_s, done=self._closed, **self._noted)

    def _send(self) -> None:
        done = False
        while not done:
            self._wake.clear()  # before the beat is made: what is noted after that wakes us again
            beat = self._beat()
            try:
                self._socket.sendall(json.dumps(asdict(beat)).encode() + b"\n")
            except OSError:
                return  # the launcher is gone; `_listen` sees it too and decides
            done = beat.done
            if not done:
                self._wake.wait(self._beat_s)

    def _listen(self) -> None:
        rest = b""
        with self._socket, contextlib.suppress(OSError):  # a reset connection is an end as well
            while data := self._socket.recv(1 << 16):
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.on_line(line.decode(errors="replace"))
        self._lost()
