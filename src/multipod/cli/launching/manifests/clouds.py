"""Manifests for Ray, SkyPilot, XPK and TorchX."""

import shlex

from multipod.cli.launching.manifests.kubernetes import to_yaml
from multipod.cli.launching.manifests.rendered_run import PORT, RESTARTED, RenderedRun
from multipod.errors import ClusterError


def render_ray(run: RenderedRun) -> str:
    """A shell script that hands the run to a Ray cluster, whose launcher starts it again."""
    launched = [
        *("multipod", "launch", "--ray", "auto", "--ray-each", f"{run.cpus:g},{run.gpus:g}"),
        *("--processes", str(run.processes), "--restarts", str(run.restarts), "--timeout", f"{run.timeout_s:g}"),
        *("--", *run.words),
    ]
    address = "--address ${RAY_ADDRESS:-http://127.0.0.1:8265}"
    submit = f"ray job submit {address} --submission-id {run.name}-$(date +%s)"
    return f"#!/bin/sh\nset -e\n{submit} -- \\\n  {shlex.join(launched)}\n"


def render_sky(run: RenderedRun) -> str:
    """A task of SkyPilot's, for `sky jobs launch digits.yaml`, which goes on after pre-emption (SkyPilot 0.14).

    Raises:
      ClusterError: GPUs of no kind.
    """
    _need_accelerator(run, "sky", "--accelerator H100")
    resources: dict[str, object] = {"cpus": f"{run.whole_cpus}+"}
    if run.gpus:
        resources["accelerators"] = f"{run.accelerator}:{run.whole_gpus}"
    resources |= {"image_id": f"docker:{run.image}"}
    resources["job_recovery"] = {"max_restarts_on_errors": run.restarts, "recover_on_exit_codes": list(RESTARTED)}
    lines = [
        f"export MULTIPOD_PROCESSES={run.processes} MULTIPOD_PROCESS_ID=$SKYPILOT_NODE_RANK",
        f'export JAX_COORDINATOR_ADDRESS=$(echo "$SKYPILOT_NODE_IPS" | head -n1):{PORT}',
        *run.command_lines(),
    ]
    task = {"name": run.name, "num_nodes": run.processes, "resources": resources, "run": "\n".join(lines) + "\n"}
    return to_yaml(task)


def render_xpk(run: RenderedRun) -> str:
    """A shell script that creates a workload of XPK's on one slice of TPUs: its hosts are the processes (XPK 1.16).

    Raises:
      ClusterError: no kind of device.
    """
    if not run.accelerator:
        raise ClusterError("launch --render xpk: say the kind of slice: --accelerator v5litepod-16.")
    command = "; ".join(run.command_lines(rank="${TPU_WORKER_ID:-0}")).replace("then;", "then").replace("else;", "else")
    words = [
        f"--workload {run.name}",
        f"--device-type {shlex.quote(run.accelerator)}",
        "--num-slices 1",
        f"--docker-image {shlex.quote(run.image)}",
        f"--max-restarts {run.restarts}",
        f"--restart-on-exit-codes {','.join(map(str, RESTARTED))}",
        f"--termination-grace-period-seconds {run.grace_s}",
        f"--command {shlex.quote(command)}",
    ]
    head = "#!/bin/sh\nset -e\nxpk workload create --cluster ${CLUSTER:?the name of the cluster}"
    return " \\\n  ".join([head, *words]) + "\n"


def render_torchx(run: RenderedRun) -> str:
    """A component of TorchX's, for `torchx run -s SCHEDULER digits.py:run` (TorchX 0.7)."""
    script = "\n".join(
        [
            f'export JAX_COORDINATOR_ADDRESS="$${{{{{{macros.rank0_env}}:=localhost}}}}:{PORT}"',
            *(line.replace("$", "$$").replace("{", "{{").replace("}", "}}") for line in run.command_lines()),
        ]
    )
    return f'''"""{run.name}: {run.processes} processes of multipod."""

from torchx import specs
from torchx.specs import macros

SCRIPT = f"""\\
{script}
"""


def run(image: str = {run.image!r}) -> specs.AppDef:
    """Starts the run, or goes on with it.

    Args:
        image: the container image
    """
    role = specs.Role(
        name="train",
        image=image,
        entrypoint="sh",
        args=["-c", SCRIPT],
        env={{"MULTIPOD_PROCESSES": "{run.processes}", "MULTIPOD_PROCESS_ID": macros.replica_id}},
        num_replicas={run.processes},
        max_retries={run.restarts},
        retry_policy=specs.RetryPolicy.APPLICATION,  # all processes again, not the one that failed
        port_map={{"coordinator": {PORT}}},
        resource=specs.Resource(cpu={run.whole_cpus}, gpu={run.whole_gpus}, memMB={4096 * run.whole_cpus}),
    )
    return specs.AppDef(name={run.name!r}, roles=[role])
'''


def _need_accelerator(run: RenderedRun, launcher: str, example: str) -> None:
    if run.gpus and not run.accelerator:
        raise ClusterError(f"launch --render {launcher}: say the kind of GPU: {example}.")
