"""The benchmark of one accelerator, at small sizes: that it works the day there is one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import clean_environment

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_benchmark_of_an_accelerator_runs_where_there_is_none(tmp_path):
    words = ["--small", "--only", "bert-large", "--updates", "1", "--rounds", "1", "--out", str(tmp_path)]
    command = [sys.executable, str(ROOT / "benchmarks" / "accelerator.py"), *words]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "accelerator.json").read_text())
    (row,) = record["rates"]
    assert row["per_s"]["multipod"] > 0
    assert row["per_s"]["plain JAX"] > 0
    assert row["flops"] > 0
    assert "plain (cpu has no fused kernel)" in next(iter(row["attention"]))
    assert "| bert-large: multipod" in (tmp_path / "accelerator.md").read_text()
