"""`multipod launch --render`: what it prints fits the launchers' own schemas and parsers, and its shell lines run."""

import argparse
import json
import lzma
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from click.testing import CliRunner

from multipod.cli.launching.child_command import read_child
from multipod.cli.launching.manifests.render import RENDERERS
from multipod.cli.main import cli

RUN = ["train", "digits", "--mesh", "2x4", "--log", "csv"]


def rendered(launcher: str, *options: str, out: str = "/runs/digits-001", code: int = 0) -> str:
    words = ["launch", "--processes", "4", "--render", launcher, *options, "--", *RUN, *(["--out", out] if out else [])]
    done = CliRunner().invoke(cli, words)
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else str(done.exception)


def strict(schema: Any) -> Any:
    """A schema of a custom resource, which also refuses fields that it does not name, as `kubectl` does."""
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(one) for name, one in schema.items()}
    named = isinstance(made.get("properties"), dict) and made.get("type") == "object"
    if named and "additionalProperties" not in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made


def jobset_schema() -> Any:
    """The JobSet API v1alpha2, of kubernetes-sigs/jobset at 08dfbdf, without its descriptions (Apache-2.0)."""
    recorded = Path(__file__).parent / "recorded" / "jobset_v1alpha2.json.xz"
    schema = json.loads(lzma.decompress(recorded.read_bytes()))
    schema["properties"]["metadata"] = {"type": "object"}  # which the API server knows
    return strict(schema)


@pytest.mark.parametrize("launcher", ["jobset", "kueue"])
@pytest.mark.parametrize("device", [[], ["--each", "8,4", "--accelerator", "tpu-v5-lite-podslice"]])
def test_a_jobset_fits_its_schema(launcher: str, device: list[str]) -> None:
    manifest = yaml.safe_load(rendered(launcher, "--restarts", "3", *device))
    check = jsonschema.Draft7Validator(jobset_schema())
    check.validate(manifest)
    queue = manifest["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name")
    assert queue == ("multipod" if launcher == "kueue" else None)
    manifest["spec"]["failurePolicy"]["rules"][0]["action"] = "Fail"
    assert not check.is_valid(manifest)
    manifest["spec"]["failurePolicy"]["rules"] = []
    manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["completion"] = 4
    assert not check.is_valid(manifest)


def test_a_jobset_says_each_pod_its_place() -> None:
    manifest = yaml.safe_load(rendered("jobset", "--restarts", "3", "--image", "mine:1"))
    (job,) = manifest["spec"]["replicatedJobs"]
    job = job["template"]["spec"]
    assert (job["completions"], job["parallelism"], job["backoffLimit"]) == (4, 4, 0)
    (container,) = job["template"]["spec"]["containers"]
    values = {one["name"]: one.get("value") for one in container["env"]}
    assert values["JAX_COORDINATOR_ADDRESS"] == "digits-001-workers-0-0.digits-001:8476"
    assert values["MULTIPOD_PROCESSES"] == "4"
    assert container["image"] == "mine:1"
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 3


def test_a_jobsets_rules_read_the_job_controllers_messages() -> None:
    """The messages are those of Kubernetes' pkg/controller/job/pod_failure_policy.go."""
    rules = yaml.safe_load(rendered("jobset"))["spec"]["failurePolicy"]["rules"]
    messages = {
        "Container train for pod runs/d-1-x failed with exit code 2 matching FailJob rule at index 1": "refused",
        "Pod runs/d-1-x has condition DisruptionTarget matching FailJob rule at index 0": "preempted",
    }
    for message, name in messages.items():
        first = next(rule for rule in rules if any(re.search(p, message) for p in rule["onJobFailureMessagePatterns"]))
        assert first["name"] == name


def stub(folder: Path, name: str, *lines: str) -> None:
    path = folder / name
    path.write_text("\n".join(["#!/bin/sh", *lines]) + "\n")
    path.chmod(0o755)


def ran(script: str, folder: Path, code: int, shell: str, **environment: str) -> tuple[int, list[str]]:
    """What a script does where `multipod` exits with `code`: its exit code, and the calls of stubs."""
    bin_folder, calls = folder / "bin", folder / "calls"
    bin_folder.mkdir(exist_ok=True)
    calls.unlink(missing_ok=True)
    stub(bin_folder, "multipod", f'echo "multipod $*" >> {calls}', f"exit {code}")
    stub(bin_folder, "srun", 'while [ "$1" != multipod ]; do shift; done', '"$@"')
    stub(bin_folder, "scontrol", f'echo "scontrol $*" >> {calls}')
    path = f"{bin_folder}:{os.environ['PATH']}"
    done = subprocess.run([shell, "-c", script], env={"PATH": path, **environment}, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, calls.read_text().splitlines()


def test_a_slurm_script_begins_goes_on_and_is_requeued(tmp_path: Path) -> None:
    out = tmp_path / "a run"
    script = rendered("slurm", "--restarts", "2", out=str(out))
    assert subprocess.run(["bash", "-n", "-c", script], check=False).returncode == 0
    here = {"SLURM_JOB_ID": "7"}
    begin = f"multipod train digits --mesh 2x4 --log csv --out {out} --cpu-devices 2 --timeout 60"
    go_on = f"multipod train --resume {out} --log csv --cpu-devices 2 --timeout 60"
    assert ran(script, tmp_path, 0, "bash", **here) == (0, [begin])
    assert ran(script, tmp_path, 2, "bash", **here) == (2, [begin])
    assert ran(script, tmp_path, 75, "bash", **here) == (75, [begin, "scontrol requeue 7"])
    out.mkdir()  # of a start that saved nothing
    assert ran(script, tmp_path, 0, "bash", **here) == (0, [begin])
    assert len(list(tmp_path.glob("a run.without-checkpoint.*"))) == 1
    (out / "checkpoints" / "20").mkdir(parents=True)
    assert ran(script, tmp_path, 130, "bash", **here) == (130, [go_on, "scontrol requeue 7"])
    assert ran(script, tmp_path, 130, "bash", SLURM_RESTART_COUNT="2", **here) == (130, [go_on])


@pytest.mark.skipif(shutil.which("sbatch") is None, reason="Slurm is not installed")
def test_slurm_takes_its_script(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(rendered("slurm"))
    subprocess.run(["sbatch", "--test-only", "run.sh"], cwd=tmp_path, check=True)


def test_slurm_fills_its_nodes_and_gives_a_task_one_gpu() -> None:
    lines = rendered("slurm", "--per-node", "2", "--each", "8,1", "--queue", "gpus").splitlines()
    wanted = ("--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=8", "--partition=gpus")
    assert {f"#SBATCH {one}" for one in wanted} <= set(lines)
    assert "do not fill nodes of 3" in rendered("slurm", "--per-node", "3", code=1)
    assert "JAX gives a task one GPU" in rendered("slurm", "--each", "8,2", code=1)


def test_a_pod_moves_a_folder_aside_only_as_process_0(tmp_path: Path) -> None:
    out = tmp_path / "digits"
    manifest = yaml.safe_load(rendered("jobset", out=str(out)))
    pod = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
    (script,) = pod["containers"][0]["args"]
    out.mkdir()
    ran(script, tmp_path, 0, "sh", MULTIPOD_PROCESS_ID="1")
    assert out.exists()
    ran(script, tmp_path, 0, "sh", MULTIPOD_PROCESS_ID="0")
    assert not out.exists()


def words_given_to(program: str, script: str, folder: Path, **environment: str) -> list[str]:
    """The words that a script calls a program with."""
    stub(folder, program, f'{sys.executable} -c "import json, sys; print(json.dumps(sys.argv[1:]))" "$@"')
    path = {"PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(["sh", "-c", script], env=path | environment, capture_output=True, text=True, check=True)
    words: list[str] = json.loads(done.stdout)
    return words


def test_ray_takes_the_command_of_its_script(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray.dashboard.modules.job.cli")
    words = words_given_to("ray", rendered("ray", "--restarts", "3", "--each", "8,1"), tmp_path)
    assert words[:2] == ["job", "submit"]
    parsed = ray.submit.make_context("submit", words[2:]).params
    child = shlex.join(parsed["entrypoint"])
    assert child.startswith("multipod launch --ray auto --ray-each 8,1 --processes 4 --restarts 3")
    launch = cli.get_command(None, "launch")
    again = launch.make_context("launch", list(parsed["entrypoint"][2:])).params
    assert read_child(again["command"]).out == "/runs/digits-001"


def test_sky_takes_its_task() -> None:
    task = yaml.safe_load(rendered("sky", "--restarts", "2", "--each", "8,4", "--accelerator", "H100"))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (4, "H100:4")
    assert task["resources"]["job_recovery"] == {"max_restarts_on_errors": 2, "recover_on_exit_codes": [1, 75]}
    assert subprocess.run(["sh", "-n", "-c", task["run"]], check=False).returncode == 0
    schemas = pytest.importorskip("sky.utils.schemas")
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())


def test_xpk_takes_the_arguments_of_its_script(tmp_path: Path) -> None:
    script = rendered("xpk", "--restarts", "2", "--accelerator", "v5litepod-16")
    words = words_given_to("xpk", script, tmp_path, CLUSTER="mine")
    assert words[:4] == ["workload", "create", "--cluster", "mine"]
    command = words[words.index("--command") + 1]
    assert subprocess.run(["bash", "-n", "-c", command], check=False).returncode == 0
    parser = pytest.importorskip("xpk.parser.core", exc_type=ImportError)
    known = argparse.ArgumentParser()
    parser.set_parser(known)
    parsed = known.parse_args(words)
    assert (parsed.workload, parsed.device_type, parsed.max_restarts) == ("digits-001", "v5litepod-16", "2")
    assert (parsed.restart_on_exit_codes, parsed.command) == ("1,75", command)


def test_a_torchx_component_is_python_and_torchx_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "component.py"
    file.write_text(rendered("torchx", "--restarts", "2"))
    compile(file.read_text(), str(file), "exec")
    specs = pytest.importorskip("torchx.specs")
    linter = pytest.importorskip("torchx.specs.file_linter")
    assert linter.validate(str(file), "run") == []
    scope: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), scope)
    (role,) = scope["run"]().roles
    role = specs.macros.Values("", "app", "3", "RANK0").apply(role)
    assert role.env["MULTIPOD_PROCESS_ID"] == "3"
    assert role.args[1].startswith('export JAX_COORDINATOR_ADDRESS="${RANK0:=localhost}:8476"')
    assert "date +%s" in role.args[1]
    assert "$$" not in role.args[1]


def test_what_cannot_be_rendered_is_refused() -> None:
    assert "Say where it is on all of them: --out" in rendered("jobset", out="", code=1)
    assert "--survive say how this launcher starts processes" in rendered("jobset", "--survive", code=1)
    assert "--each many: say CPUs and GPUs" in rendered("ray", "--each", "many", code=1)
    assert "say the kind of GPU" in rendered("sky", "--each", "8,1", code=1)
    assert "say the kind of slice" in rendered("xpk", code=1)


@pytest.mark.parametrize("launcher", sorted(RENDERERS))
def test_what_is_no_training_is_started_as_it_is(launcher: str) -> None:
    words = ["launch", "--processes", "2", "--render", launcher, "--accelerator", "v5e", "--", "doctor", "--json"]
    done = subprocess.run([sys.executable, "-m", "multipod", *words], capture_output=True, text=True, check=True)
    assert "doctor --json --cpu-devices 4" in done.stdout
    assert "checkpoints" not in done.stdout
