"""Settles the environment that JAX reads when it is imported. This module itself never imports JAX.

JAX and XLA take the number of CPU devices, the size of their thread pool, the time-outs of their
collectives and the compilation cache from the environment, once. So these are decided here, in
one place, before anything else runs. `prepare` writes them; `docs/design/runtime.md` says why each
is needed.
"""

import ctypes
import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from pathlib import Path

CPU_DEVICES = 8


@dataclass(frozen=True)
class Timeouts:
    """Every time-out of a run, derived from one: the longest that anything may wait for a peer.

    The order matters. The launcher must see a silent process (`silence_s`) before XLA's own
    limits, which end all processes at once and name none, are reached (`collective_s`).
    """

    limit_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.limit_s >= 3:
            raise ValueError(f"a time-out of {self.limit_s} s is too short to tell slow from dead. Use 3 s or more.")

    @property
    def beat_s(self) -> float:
        """Seconds between two signs of life of a process."""
        return min(1.0, self.limit_s / 30)

    @property
    def silence_s(self) -> float:
        """A process without a sign of life for this long is stuck."""
        return self.limit_s / 3

    @property
    def no_progress_s(self) -> float:
        """A process that is alive and in the same update for this long, while others wait, is stuck."""
        return self.limit_s

    @property
    def warn_s(self) -> int:
        """XLA begins to log that a device is late for a collective."""
        return max(1, round(self.limit_s / 2))

    @property
    def collective_s(self) -> int:
        """XLA gives up a collective; also JAX's own heartbeat and the waits at start and end of a run."""
        return max(2, round(1.5 * self.limit_s))

    @property
    def compile_s(self) -> float:
        """How long those that have compiled wait for the others, which may have found nothing in the cache.

        Long, because the dead are noticed otherwise: by the launcher, or by JAX's heartbeat after `collective_s`.
        """
        return 10.0 * self.collective_s

    @property
    def service_s(self) -> float:
        """In a run that survives: JAX's coordination service takes a process for lost, which ends waits for it.

        The launcher knows sooner; this frees what hangs in a barrier of a checkpoint.
        """
        return max(10.0, self.silence_s)

    @property
    def grace_s(self) -> float:
        """From asking a process to end (SIGTERM) to ending it (SIGKILL)."""
        return min(5.0, self.limit_s / 10)


def default_cache() -> Path:
    """Where compiled programs are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "multipod" / "xla"


def native_cache() -> Path:
    """Where C and C++ that ship with multipod are kept once compiled."""
    return default_cache().with_name("native")


def index_cache() -> Path:
    """Where it is kept at which byte of a large file each record begins."""
    return default_cache().with_name("index")


def compiler(variable: str) -> str:
    """The command of the C compiler (`CC`) or the C++ compiler (`CXX`): what the user says there, or the system's."""
    return os.environ.get(variable) or {"CC": "cc", "CXX": "c++"}[variable]


def settings(
    cpu_devices: int, timeouts: Timeouts, cache: Path | None, processes: int = 1, survives: bool = False
) -> dict[str, str]:
    """The environment variables of a run, as values.

    Args:
      cpu_devices: virtual CPU devices of this process; without effect where an accelerator is found.
      timeouts: see `Timeouts`.
      cache: the folder of compiled programs; None turns the cache off.
      processes: of the run on this host. All get the thread pool that one process would have, because
        XLA cuts its work by the pool's size, and other cuts round differently.
      survives: a collective between processes that waits for a dead one is given up sooner (`Timeouts.service_s`): it
        costs no more than the update it is in. Where the launcher hears of a death it is cut off at once.
    """
    flags = {
        "xla_cpu_collective_call_warn_stuck_timeout_seconds": timeouts.warn_s,
        "xla_cpu_collective_call_terminate_timeout_seconds": timeouts.collective_s,
        "xla_cpu_collective_timeout_seconds": round(timeouts.service_s) if survives else timeouts.collective_s,
    }
    values = {
        "JAX_NUM_CPU_DEVICES": str(cpu_devices),
        # JAX 0.10.2 sizes XLA's CPU pool by the core count and deadlocks when fewer threads than
        # devices wait in a collective. Twice the devices is enough; four times cost 20 % step time.
        "NPROC": str(max(2 * cpu_devices * processes, os.cpu_count() or 1)),
        "XLA_FLAGS": " ".join(f"--{name}={value}" for name, value in flags.items()),
        "KERAS_BACKEND": "jax",  # models of Keras train here through JAX (`multipod.interop.keras_model`)
    }
    if cache is not None:
        values |= {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
    return values


def prepare(
    cpu_devices: int = CPU_DEVICES,
    timeouts: Timeouts | None = None,
    cache: Path | None = None,
    processes: int = 1,
    survives: bool = False,
    environment: MutableMapping[str, str] = os.environ,
) -> None:
    """Writes `settings` into the environment. What the user has set there stays as it is.

    Raises:
      RuntimeError: JAX is imported already and was not prepared in the same way.
    """
    wanted = settings(cpu_devices, timeouts or Timeouts(), cache, processes, survives)
    if "jax" in sys.modules and environment is os.environ:
        if environment.get("JAX_NUM_CPU_DEVICES") != wanted["JAX_NUM_CPU_DEVICES"]:
            raise RuntimeError(
                f"JAX is imported already, without {cpu_devices} CPU devices. Call multipod.runtime.prepare() first."
            )
        return
    flags = environment.get("XLA_FLAGS", "")
    ours = [flag for flag in wanted.pop("XLA_FLAGS").split() if flag.split("=")[0] not in flags]
    environment["XLA_FLAGS"] = " ".join([*ours, flags]).strip()
    for name, value in wanted.items():
        environment.setdefault(name, value)
    if not has_tpu():
        absent_tpus(environment)  # where libtpu is installed without a TPU, JAX would let it complain on every start


def has_tpu() -> bool:
    """Whether this host has a TPU: its driver's files are there."""
    return any(Path("/dev").glob("accel[0-9]*")) or any(Path("/dev/vfio").glob("[0-9]*"))


def absent_tpus(environment: MutableMapping[str, str] = os.environ) -> None:
    """Lets `libtpu` describe TPUs that are not here: it must not ask the cloud what machine this is.

    Before `libtpu` is loaded, thus before anything is compiled for a TPU. What the user has set stays.
    """
    for name, value in {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v3-8",  # of a host that does not matter; without it libtpu complains
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        environment.setdefault(name, value)


def release_memory() -> None:
    """Gives freed memory back to the system, where the C library can: 0.7 GB once a Transformer of 46 M is compiled.

    The compiler leaves that much behind in the heap, and a run would keep it to its end.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # the GNU C library's
    if trim is not None:
        trim(0)


def available_bytes() -> int | None:
    """Memory that this host can give without swapping; None where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if kib is None else 1024 * int(kib)


def keep_stdout_for_python() -> None:
    """Sends what C++ code prints on standard output to nowhere: gloo greets every peer of every communicator there.

    Python's own output goes on as before; warnings and errors of C++ code go to standard error.
    """
    try:
        ours = os.dup(sys.stdout.fileno())
    except (OSError, ValueError):  # no real file: somebody captures the output already
        return
    sys.stdout.flush()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = os.fdopen(ours, "w", buffering=1, encoding=sys.stdout.encoding)
