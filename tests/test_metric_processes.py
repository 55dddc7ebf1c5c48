"""Metrics over two real JAX processes, joined over loopback."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import clean_environment
from sklearn.metrics import roc_auc_score

pytestmark = [pytest.mark.processes, pytest.mark.jax_version]


def test_two_processes_agree_on_all_of_it():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(Path(__file__).with_name("metric_ranks.py")), port]
    started = [
        subprocess.Popen([*command, str(rank)], env=clean_environment(), stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=200)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    answers = [json.loads(text.splitlines()[-1]) for text in said]
    expected = pytest.approx(roc_auc_score(answers[0]["labels"], answers[0]["scores"]), abs=1e-15)
    for rank, answer in enumerate(answers):
        assert answer["rank"] == rank
        assert answer["parts"] == [[], [1, 1, 1]]
        assert answer["auc"] == expected
        assert answer["buffered"] == expected
        assert answer["refusal"].startswith("rank 1: auc: scores[1] is NaN, the first of 1 among 2. Find")
