"""Ctrl-C: once asks, twice ends at once."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as Ray's workers hand it on
from multipod.train.stop import stop_on_signals

before = signal.getsignal(signal.SIGINT)
with stop_on_signals("stopping") as stop:
    for number in map(int, sys.argv[1:]):
        os.kill(os.getpid(), number)
    print(stop.asked, flush=True)
assert signal.getsignal(signal.SIGINT) is before
"""


@pytest.mark.parametrize(
    ("signals", "code", "out", "err"),
    [
        ([], 0, "False\n", ""),
        (["2"], 0, "True\n", "\nstopping\n"),
        (["2", "2"], 130, "", "\nstopping\n"),
        (["15"], 0, "True\n", ""),  # a notice of pre-emption: save, and say nothing
        (["15", "15"], 0, "True\n", ""),
        (["10"], 0, "True\n", ""),  # SIGUSR1 and SIGUSR2: what Slurm is asked to send
        (["12"], 0, "True\n", ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_signals_are_heard(signals, code, out, err):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *signals], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, err)
