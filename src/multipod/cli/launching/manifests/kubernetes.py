"""A JobSet for Kubernetes, alone or in a queue of Kueue's: `kubectl apply -f digits.yaml`.

Source: the JobSet API v1alpha2 (https://github.com/kubernetes-sigs/jobset), and pod failure policies of batch/v1 Jobs.
"""

from typing import Any

from multipod.cli.launching.manifests.rendered_run import PORT, REFUSED, RenderedRun
from multipod.extras import require

CONTAINER, JOB = "train", "workers"
"""Names inside the JobSet; the pods are NAME-workers-0-0, -1, ..."""


def to_yaml(value: Any) -> str:
    """The value as YAML, in the order of its fields; texts of several lines are blocks.

    Raises:
      MissingPackageError: PyYAML is not installed.
    """
    require("--render", "yaml")
    import yaml

    class Readable(yaml.SafeDumper):
        """Writes texts of several lines as blocks."""

    def represent(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Readable.add_representer(str, represent)
    return str(yaml.dump(value, Dumper=Readable, sort_keys=False, width=1000))


def render_jobset(run: RenderedRun) -> str:
    """A JobSet of one indexed Job, a pod for each process.

    What was refused (exit 2) fails at once; a pod that was pre-empted starts all again and is not counted; all else
    starts all again as often as the run may.
    """
    return to_yaml(_jobset(run, {}))


def render_kueue(run: RenderedRun) -> str:
    """A JobSet with the label of a queue of Kueue's, which starts it when all of its pods have room."""
    return to_yaml(_jobset(run, {"kueue.x-k8s.io/queue-name": run.queue or "multipod"}))


def _jobset(run: RenderedRun, labels: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": run.name} | ({"labels": labels} if labels else {}),
        "spec": {
            "failurePolicy": {"maxRestarts": run.restarts, "rules": _failure_rules()},
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": _job(run)}}],
        },
    }


def _failure_rules() -> list[dict[str, Any]]:
    """Tells the two rules of `_job` apart by the message that the Job controller writes; the first that fits counts."""
    return [
        {
            "name": "refused",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f"exit code {REFUSED} "],
        },
        {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": ["condition DisruptionTarget"],
        },
    ]


def _job(run: RenderedRun) -> dict[str, Any]:
    return {
        "completionMode": "Indexed",
        "completions": run.processes,
        "parallelism": run.processes,
        "backoffLimit": 0,  # a pod that comes back alone could not join the others
        "podFailurePolicy": {
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": [REFUSED]},
                },
            ]
        },
        "template": {"spec": _pod(run)},
    }


def _pod(run: RenderedRun) -> dict[str, Any]:
    resources = {"cpu": str(run.whole_cpus)}
    if run.gpus:
        resources["google.com/tpu" if run.accelerator.startswith("tpu") else "nvidia.com/gpu"] = str(run.whole_gpus)
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    container = {
        "name": CONTAINER,
        "image": run.image,
        "command": ["sh", "-c"],
        "args": ["\n".join(run.command_lines()) + "\n"],
        "env": [
            {"name": "MULTIPOD_PROCESSES", "value": str(run.processes)},
            {"name": "MULTIPOD_PROCESS_ID", "valueFrom": {"fieldRef": {"fieldPath": index}}},
            {"name": "JAX_COORDINATOR_ADDRESS", "value": f"{run.name}-{JOB}-0-0.{run.name}:{PORT}"},
        ],
        "ports": [{"containerPort": PORT}],
        "resources": {"requests": resources, "limits": resources.copy()},
    }
    pod = {"restartPolicy": "Never", "terminationGracePeriodSeconds": run.grace_s, "containers": [container]}
    if run.accelerator:
        key = "gke-tpu-accelerator" if run.accelerator.startswith("tpu") else "gke-accelerator"
        pod["nodeSelector"] = {f"cloud.google.com/{key}": run.accelerator}
    if run.out.startswith("/"):
        folder = "/" + run.out.split("/")[1]
        container["volumeMounts"] = [{"name": "runs", "mountPath": folder}]
        pod["volumes"] = [{"name": "runs", "persistentVolumeClaim": {"claimName": "runs"}}]  # ReadWriteMany
    return pod
