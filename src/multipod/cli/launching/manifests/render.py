"""The launchers for which `multipod launch --render` writes a manifest. Another one is a function and a line here."""

from collections.abc import Callable
from importlib.metadata import version

from multipod.cli.launching.child_command import ChildCommand
from multipod.cli.launching.manifests.clouds import render_ray, render_sky, render_torchx, render_xpk
from multipod.cli.launching.manifests.kubernetes import render_jobset, render_kueue
from multipod.cli.launching.manifests.rendered_run import RenderedRun
from multipod.cli.launching.manifests.slurm import render_slurm
from multipod.errors import ClusterError
from multipod.runtime import Timeouts

RENDERERS: dict[str, Callable[[RenderedRun], str]] = {
    "slurm": render_slurm,
    "jobset": render_jobset,
    "kueue": render_kueue,
    "ray": render_ray,
    "sky": render_sky,
    "xpk": render_xpk,
    "torchx": render_torchx,
}
"""Each makes the text of a manifest; docs/launchers.md tells what to do with it."""


def default_image() -> str:
    """The image that is written where none is named: one to build and to put into a registry of one's own."""
    return f"registry.example/multipod:{version('multipod')}"


def rendered_run(
    child: ChildCommand,
    timeouts: Timeouts,
    *,
    processes: int,
    each: tuple[float, float],
    per_node: int = 1,
    restarts: int = 0,
    image: str = "",
    accelerator: str = "",
    queue: str = "",
) -> RenderedRun:
    """The run of a command, as a manifest is made of it.

    Args:
      child: the command.
      timeouts: of its processes.
      processes: how many there are.
      each: CPUs and GPUs of a process.
      per_node, restarts, image, accelerator, queue: as in `RenderedRun`.

    Raises:
      ClusterError: no command, `launch` itself, or a run without a folder that all processes know.
    """
    words = child.worker_arguments(processes, timeouts)
    out = child.out or child.resume or ""
    resuming: list[str] = []
    if child.name == "train":
        if not out:
            raise ClusterError(
                "launch --render: the processes are on several hosts, and a run that is started again must find its "
                "folder. Say where it is on all of them: --out /shared/runs/digits-001."
            )
        resuming = child.resuming(out, processes).worker_arguments(processes, timeouts)
    cpus, gpus = each
    return RenderedRun(
        tuple(words), tuple(resuming), out if resuming else "", processes, per_node, cpus, gpus, restarts,
        image or default_image(), accelerator, queue, timeouts.limit_s,
    )  # fmt: skip
