"""A profile of a few updates of a run: what XProf and Perfetto open, and the planned step beside the measured ones."""

import gzip
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax

from multipod.errors import RecipeError
from multipod.runs.options import ProfiledUpdates
from multipod.step.state import State
from multipod.train.events import Updated
from multipod.train.hooks import PhaseHook
from multipod.train.run_folder import RunFolder

FOLDER = "profile"
"""Of a run folder."""

STEPS = "steps.json"
"""The file in it with planned and measured steps."""

PLANNED, MEASURED, DEVICES = 1, 2, 100
"""Processes of the trace; they count from 1, because viewers take 0 for the idle processor. Devices come behind."""

PARTS = ("input", "compute", "idle", "collectives", "update", "evaluation", "copies")
"""The parts of a planned step, in the order of their track. They are sums: the plan's own trace has each operator."""

Trace = dict[str, Any]
OnUpdate = Callable[[State, Updated, bool], float]


NOTHING = ProfiledUpdates(0, 0)
"""No update: the first has number 1."""


class ProfileHooks:
    """What the loop calls: begins the profile before its first update is given to the devices, ends it after its last.

    Args:
      folder: where the profile goes.
      updates: which to profile.
      planned: the planned step, as `Prediction.data` has it (`multipod.plan.predict`); empty where nothing was planned.
    """

    def __init__(self, folder: Path, updates: ProfiledUpdates, planned: Mapping[str, Any]) -> None:
        self.folder, self.updates, self.planned = folder, updates, planned
        self.began_s: float | None = None
        self.measured: list[Updated] = []
        self.phases: list[tuple[str, float]] = []
        self.done = False

    def follow(self, pulse: PhaseHook) -> PhaseHook:
        """Returns a pulse that passes everything on to `pulse`, and begins the profile, or ends one cut short."""

        def both(phase: str, update: int) -> None:
            pulse(phase, update)
            if phase == "updating" and update + 1 == self.updates.first and not self.done:
                self.begin()
            if self.began_s is not None:
                self.phases.append((f"{phase} {update + 1}" if phase == "updating" else phase, time.monotonic()))
                if phase in ("ending", "starting"):
                    self.close()

        return both

    def after(self, on_update: OnUpdate) -> OnUpdate:
        """Returns what notes each profiled update, and writes the profile after the last, beside `on_update`."""

        def both(state: State, event: Updated, leaving: bool) -> float:
            if self.began_s is not None and event.update >= self.updates.first:
                self.measured.append(event)
                if event.update >= self.updates.last:
                    self.close()
            return on_update(state, event, leaving)

        return both

    def begin(self) -> None:
        """Begins the profile."""
        if self.began_s is None:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # each call of Python would be an event
            writes = jax.process_index() == 0
            jax.profiler.start_trace(self.folder, create_perfetto_trace=writes, profiler_options=options)
            self.began_s = time.monotonic()

    def close(self) -> None:
        """Ends and writes the profile, if one has begun; process 0 also writes `STEPS`."""
        if self.began_s is None:
            return
        began_s, self.began_s, self.done = self.began_s, None, True
        jax.profiler.stop_trace()
        if jax.process_index() == 0:
            phases = [(name, at - began_s) for name, at in self.phases]
            events = list(steps_trace(self.measured, self.planned, phases, device_events(self.folder)))
            (self.folder / STEPS).write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, indent=0))


def refuse_unfit_libtpu(platforms: str | None) -> None:
    """Refuses to profile where JAX's profiler would start that of a `libtpu` which it was not built with.

    Such a process dies of a segmentation fault, though it may use no TPU (jaxlib 0.10.2 with libtpu 0.0.52).
    `platforms` are those that JAX may use, as in JAX_PLATFORMS; none named are all.

    Raises:
      RecipeError: says which version fits.
    """
    if platforms and "tpu" not in platforms:
        return
    wanted = next((line for line in metadata.requires("jax") or () if line.startswith("libtpu")), "")
    version = re.search(r"==([\d.]+?)\.\*", wanted)
    installed = next((one.version for one in metadata.distributions(name="libtpu")), "")
    if version and installed and not f"{installed}.".startswith(f"{version[1]}."):
        raise RecipeError(
            f"--profile: libtpu {installed} is installed, jax {jax.__version__} was built with {version[1]}, and a "
            "profile of both ends in a crash. Say pip install 'jax[tpu]', or, without a TPU, set JAX_PLATFORMS=cpu "
            "or JAX_PLATFORMS=cuda."
        )


def steps_trace(
    measured: list[Updated],
    planned: Mapping[str, Any],
    phases: Sequence[tuple[str, float]] = (),
    devices: Sequence[Trace] = (),
) -> Iterator[Trace]:
    """The events of planned and measured steps as tracks in the Trace Event Format, in microseconds.

    A planned step stands above each measured one and begins when it does, so that the ends can be compared. Behind them
    are the phases of the loop on the host and, where XLA tells of them, the kernels of the devices; their clock begins
    with the profile, which is before the first step by what was still under way.

    Source: "Trace Event Format", Duca and Sinclair, 2016.
    """
    if planned:
        name = f"planned: {planned.get('layout', '')} on {planned.get('machine', '')}"
        yield from _named(PLANNED, name, ["step", "parts"])
    yield from _named(MEASURED, "measured", ["update", "waits for data", "host"])
    now_s = 0.0
    for event in measured:
        values = {name: value for name, value in event.values.items() if value == value}  # JSON has no NaN
        yield _event(f"update {event.update}", MEASURED, 1, now_s, event.step_s, values)
        if event.data_s:
            yield _event("waits for data", MEASURED, 2, now_s, event.data_s)
        if planned:
            yield _event(f"planned {event.update}", PLANNED, 1, now_s, planned["step_s"])
            at_s = now_s
            for part in PARTS:
                seconds = planned.get(f"{part}_s", 0.0)
                if seconds > 0:
                    yield _event(part, PLANNED, 2, at_s, seconds)
                    at_s += seconds
        now_s += event.step_s
    for (name, at_s), (_, next_s) in pairwise(phases):
        yield _event(name, MEASURED, 3, at_s, next_s - at_s)
    yield from devices


def device_events(folder: Path) -> list[Trace]:
    """What devices did, from the newest Perfetto trace of JAX's profiler in `folder`; nothing of CPUs."""
    files = sorted(folder.glob("plugins/profile/*/perfetto_trace.json.gz"))
    if not files:
        return []
    with gzip.open(files[-1], "rt") as file:
        events: list[Trace] = [event for event in json.load(file)["traceEvents"] if event]
    named = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event.get("ph") == "M" and event.get("name") == "process_name"
    }
    devices = {pid for pid, name in named.items() if name.startswith("/device:")}
    return [{**event, "pid": event["pid"] + DEVICES} for event in events if event.get("pid") in devices]


@contextmanager
def open_profile(
    updates: ProfiledUpdates | None, folder: RunFolder, planned: Mapping[str, Any]
) -> Iterator[ProfileHooks]:
    """The hooks of a profile, which is ended whatever happens; hooks that do nothing if no updates are given."""
    hooks = ProfileHooks(folder.path / FOLDER, updates or NOTHING, planned)
    try:
        yield hooks
    finally:
        hooks.close()


def _named(pid: int, name: str, threads: list[str]) -> Iterator[Trace]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}}
    for tid, thread in enumerate(threads, 1):
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": thread}}


def _event(name: str, pid: int, tid: int, at_s: float, seconds: float, about: Mapping[str, Any] | None = None) -> Trace:
    times = {"ts": 1e6 * at_s, "dur": 1e6 * seconds}
    return {"name": name, "ph": "X", "pid": pid, "tid": tid, **times, "args": about or {}}
