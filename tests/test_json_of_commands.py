"""`--json` on every command that prints a table: JSON alone on standard output, and the table's own values in it."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from multipod import micro
from multipod.cli.main import cli
from multipod.collectives.build import ALGORITHMS
from multipod.collectives.schedule import COLLECTIVES
from multipod.data.files.formats import FORMATS
from multipod.mlperf.benchmarks import BENCHMARKS
from multipod.pipelines.build import PIPELINES
from multipod.topology.chips import CHIPS
from multipod.topology.machines import MACHINES

NO_TABLE = {
    "train": "its numbers are in metrics.jsonl, or go to a logger",
    "finetune": "as train",
    "launch": "what its processes print",
    "agent": "speaks to a launcher",
    "rank-proxy": "speaks to a launcher",
    "import": "one line",
    "hub save": "one line",
    "hub load": "one line",
    "hub push": "one line",
    "average": "one line",
    "report": "one line; the report is a page",
    "data convert": "one line",
    "data shapes": "one line for each part",
    "clicks prepare": "one line for each file",
    "clicks generate": "one line",
    "clicks take": "one line",
    "micro bundle": "one line for each file",
}
"""Commands that print no table, and what they print."""


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", command


def printed(*words: Any, code: int = 0) -> Any:
    """What a command says with --json: standard output must be JSON and nothing else."""
    done = CliRunner().invoke(cli, [*map(str, words), "--json"], catch_exceptions=False)
    assert done.exit_code == code, done.output
    return json.loads(done.stdout, parse_constant=pytest.fail)


def test_every_command_prints_no_table_or_has_json() -> None:
    offers = {name: any("--json" in param.opts for param in command.params) for name, command in commands(cli)}
    assert {name for name, offered in offers.items() if not offered} == set(NO_TABLE)


def test_catalogues_are_whole() -> None:
    assert set(printed("schedule", "list")) == set(ALGORITHMS)
    assert set(printed("pipeline", "list")) == set(PIPELINES)
    assert set(printed("data", "formats")) == set(FORMATS)
    assert [one["name"] for one in printed("mlperf", "list")["benchmarks"]] == list(BENCHMARKS)
    assert printed("mlperf", "list")["benchmarks"][0]["targets"]
    listed = printed("topology", "list")
    assert (set(listed["machines"]), set(listed["chips"])) == (set(MACHINES), set(CHIPS))
    assert "layouts" in printed("reproduce")["experiments"]


def test_a_machine_and_its_strength() -> None:
    shown = printed("topology", "show", "mesh:4x4", "--fail", "1,1")
    assert (shown["chips"], shown["failed_chips"], shown["parts"], shown["diameter"]) == (15, [5], [15], 6)
    strength = printed("topology", "strength", "--on", "mesh:2x2")
    assert strength["seconds"] == pytest.approx(strength["bytes"] / strength["bytes_per_s"])
    assert sorted(chip for part in strength["parts"] for chip in part) == [0, 1, 2, 3]


def test_schedules_are_proven_and_timed(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    words = ("schedule", COLLECTIVES[0], "--on", "mesh:4x4", "--algorithm", "ring", "--bytes", "16M")
    made = printed(*words, "--out", file)
    (priced,) = printed("simulate", COLLECTIVES[0], "--on", "mesh:4x4", "--algorithm", "ring", "--bytes", "16M")[
        "algorithms"
    ]
    assert (made["seconds"], made["of_bound"]) == (pytest.approx(priced["seconds"]), pytest.approx(priced["of_bound"]))
    assert printed("schedule", "check", file)["proof"] == made["proof"]
    assert made["proof"]["chips"] == 16


def test_a_pipeline() -> None:
    shown = printed("pipeline", "show", "gpipe", "--stages", "4", "--micro-batches", "8")
    assert [one["activations"] for one in shown["stages"]] == [8, 8, 8, 8]
    assert shown["in_use"] == pytest.approx(8 / (8 + 3))  # GPipe's bubble: M / (M + S - 1)


def test_what_slow_hosts_cost() -> None:
    (one,) = printed("data", "stragglers", "--hosts", "4")["clusters"]
    assert one["hosts"] == 4
    assert one["step_s"] > 0


def test_two_plans_side_by_side(tmp_path: Path) -> None:
    for name, batch in (("a.json", 512), ("b.json", 1024)):
        words = [
            "plan",
            "bert",
            "--on",
            "tpu-v3-pod:4x4",
            "--batch",
            str(batch),
            "--top",
            "1",
            "--save",
            str(tmp_path / name),
        ]
        assert CliRunner().invoke(cli, words, catch_exceptions=False).exit_code == 0
    found = printed("plan", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert [plan["machine"] for plan in found["plans"]] == ["tpu-v3-pod:4x4"] * 2
    a, b = found["figures"]["step_s"]["values"]
    assert found["figures"]["step_s"]["ratio"] == pytest.approx(b / a)


def test_a_machine_fitted_to_measured_steps(tmp_path: Path) -> None:
    refused = CliRunner().invoke(cli, ["plan", "calibrate", str(tmp_path / "none.json"), "--json"])
    assert (refused.exit_code, refused.stdout) == (2, "")


def test_a_recipe_on_its_mesh() -> None:
    shown = printed("show", "mlp-small", "--mesh", "2x4")
    assert shown["mesh"] == {"y": 2, "x": 4}
    assert shown["recipe"]["layout.mesh"] == [2, 4]
    sizes = [one["count"] * math.prod(one["shape"]) for one in shown["tensors"]]
    assert sum(sizes) == shown["parameters"]
    assert sum(one["device_bytes"] for one in shown["tensors"]) == 4 * shown["parameters"]  # whole on each device
    assert 4 * shown["parameters"] in shown["bytes_on_a_device"].values()
    staged = printed("show", "mlp-small", "--layout", "data=1x2,stage=4,micro=8")
    assert [one["stage"] for one in staged["stages"]] == [0, 1, 2, 3]
    assert sum(one["parameters"] for one in staged["stages"]) == staged["parameters"] == shown["parameters"]


def test_the_data_of_a_recipe(tmp_path: Path) -> None:
    found = printed("data", "inspect", "digits", "--rows", "8", "--batches", "2", "--out", tmp_path / "sheet.png")
    assert found["arrays"]["label"]["shape"] == [8]
    assert sum(found["labels"].values()) == 16
    assert found["examples_per_s"] > 0


@pytest.mark.slow
def test_the_doctor() -> None:
    found = printed("doctor")
    assert not any(found["self_tests"].values())
    assert any(name.startswith("ring") for name in found["self_tests"])
    assert found["found"]["jax"]


def test_settings_of_a_platform() -> None:
    assert printed("doctor", "--flags-for", "gpu")["settings"][0]["name"]


@pytest.mark.slow
def test_layouts_are_verified() -> None:
    verdict = printed("verify", "mlp-small", "--layouts", "1", "--updates", "1")
    assert verdict["holds"] is True
    assert len(verdict["results"]) == 1


def test_a_model_for_a_microcontroller(tmp_path: Path) -> None:
    import jax.numpy as jnp

    file = tmp_path / "m.tflite"
    file.write_bytes(micro.export(lambda x: jnp.tanh(x) * 2, jnp.zeros((1, 8), jnp.float32)))
    size = printed("micro", "size", file)
    assert size["flash"] == file.stat().st_size
    assert printed("micro", "plan", file)["bytes"] == size["planned"]
    names = [one["name"] for one in printed("micro", "inspect", file)["subgraphs"][0]["operators"]]
    assert [one["name"] for one in printed("micro", "profile", file, "--repeats", "1")["operators"]] == names
    (output,) = printed("micro", "run", file)["outputs"]
    assert (output["dtype"], output["shape"]) == ("float32", [1, 8])
    assert all(abs(value) <= 2 for value in output["values"][0])
