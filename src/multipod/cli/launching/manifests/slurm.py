"""A batch script for Slurm: `sbatch digits.sh`. Source: Slurm's manual of sbatch and srun."""

from multipod.cli.launching.manifests.rendered_run import REFUSED, RenderedRun
from multipod.errors import ClusterError


def render_slurm(run: RenderedRun) -> str:
    """A script that starts one task for each process, and requeues the job when its time is up and the run has saved.

    Raises:
      ClusterError: a process with several GPUs: JAX gives a task of Slurm's one.
    """
    if run.gpus > 1:
        raise ClusterError(
            f"launch --render slurm: --each {run.cpus:g},{run.gpus:g}: under Slurm JAX gives a task one GPU, that of "
            "its local number. Give --each 8,1, as many --processes as there are GPUs, and --per-node."
        )
    nodes = -(-run.processes // run.per_node)
    if nodes * run.per_node != run.processes:
        raise ClusterError(
            f"launch --render slurm: {run.processes} processes do not fill nodes of {run.per_node}. "
            f"Give a multiple of {run.per_node}, or another --per-node."
        )
    gpus = [f"#SBATCH --gpus-per-node={run.whole_gpus * run.per_node}"] if run.gpus else []
    steps = run.command_lines(rank="", run="srun --kill-on-bad-exit=1 multipod")
    lines = [
        "#!/bin/bash",
        f"#SBATCH --job-name={run.name}",
        f"#SBATCH --nodes={nodes}",
        f"#SBATCH --ntasks-per-node={run.per_node}",
        f"#SBATCH --cpus-per-task={run.whole_cpus}",
        *gpus,
        *([f"#SBATCH --partition={run.queue}"] if run.queue else []),
        "#SBATCH --time=04:00:00",
        f"#SBATCH --signal=TERM@{run.grace_s}   # before the time is up: save after the update, exit 130",
        "#SBATCH --requeue --open-mode=append   # a node that fails starts the job again",
        "",
        "# source /shared/venv/bin/activate     # where multipod is, on all nodes",
        *steps,
        "code=$?",
        f'if [ "$code" -ne 0 ] && [ "$code" -ne {REFUSED} ] && [ "${{SLURM_RESTART_COUNT:-0}}" -lt {run.restarts} ]',
        "then",
        '  scontrol requeue "$SLURM_JOB_ID"     # it stopped and saved, or a process was lost',
        "fi",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"
