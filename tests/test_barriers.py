"""Barriers that end when one process has failed: between threads over a store, and in a run of two processes."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import jax
import pytest
from jax._src import distributed
from processes import clean_environment
from test_cli import TINY

from multipod.train.barriers import Barriers

FAILING = TINY.replace("tiny_recipe", "failing_recipe")


class Store:
    """What JAX's coordination service keeps for all."""

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.lock = threading.Lock()

    def key_value_increment(self, key: str, by: int) -> int:
        with self.lock:
            self.held[key] = str(int(self.held.get(key, 0)) + by)
            return int(self.held[key])

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        with self.lock:
            assert allow_overwrite or key not in self.held
            self.held[key] = value

    def key_value_try_get(self, key: str) -> str:
        with self.lock:
            if key not in self.held:
                raise jax.errors.JaxRuntimeError(f"NOT_FOUND: {key}")
            return self.held[key]


@pytest.fixture
def two(monkeypatch) -> list[Barriers]:
    """The barriers in two processes."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    monkeypatch.setattr(distributed.global_state, "client", Store())
    return [Barriers(Path("run/checkpoints"), 1) for _ in range(2)]


def outcomes(*calls) -> list[BaseException | None]:
    """What each call raised, in threads of their own."""
    raised: list[BaseException | None] = [None] * len(calls)

    def attempt(number: int) -> None:
        try:
            calls[number]()
        except Exception as error:
            raised[number] = error

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()
    return raised


def test_all_come_and_go_on_as_often_as_they_meet(two):
    passed: list[tuple[int, int]] = []

    def meets(number: int):
        for time in range(3):
            two[number](key="saved", timeout_ms=10_000)
            passed.append((time, number))

    assert outcomes(lambda: meets(0), lambda: meets(1)) == [None, None]
    assert [time for time, _ in passed] in ([0, 0, 1, 1, 2, 2],)


def test_nobody_waits_for_one_that_failed(two):
    def fails():
        try:
            raise OSError(28, "no space")
        finally:
            two[1](key="another", timeout_ms=10_000)  # as Orbax says that it is done

    waited, failed = outcomes(lambda: two[0](key="saved", timeout_ms=60_000), fails)
    assert str(waited) == "another process could not write its part"
    assert str(failed) == "[Errno 28] no space"
    with pytest.raises(OSError, match="another process"):
        two[0](key="the next", timeout_ms=60_000)


def test_one_that_never_comes_is_waited_for_so_long(two):
    with pytest.raises(TimeoutError, match=r"1 of 2 processes came to saved in 0\.05 s"):
        two[0](key="saved", timeout_ms=50)
    two[0].leave()
    with pytest.raises(OSError, match="another process"):
        two[0](key="the next", timeout_ms=60_000)


def test_one_process_alone_waits_for_nobody():
    Barriers(Path("run/checkpoints"), 1)(key="saved", timeout_ms=0)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.jax_version
def test_a_run_goes_on_when_one_process_could_not_write_behind_the_next_updates(tmp_path):
    launch = [sys.executable, "-m", "multipod", "launch", "--processes", "2", "--timeout", "30", "--"]
    done = subprocess.run(
        [*launch, "train", FAILING, "--mesh", "1x2", "--out", "run", "--set", "evaluate_every=0", "--quiet"],
        cwd=tmp_path, env=clean_environment(), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (failed,) = (event for event in events if event["event"] == "savefailed")
    assert "no room for rank 1" in failed["reason"] or "another process" in failed["reason"]
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert str(events[-1]["update"]) in kept
    assert not [name for name in kept if "tmp" in name]
