"""A run of two processes, of which one is killed and comes back: the result of one that was left in peace."""

import contextlib
import json
import socket
import subprocess
import sys
import time

import psutil
import pytest
from processes import clean_environment, interrupt, started
from test_cli import TINY, losses

from multipod.chaos.hosts import LINK, make_hosts
from multipod.elastic.launcher.services import CoordinationServices, CoordinatorHost
from multipod.errors import ClusterError
from multipod.runs.example_log import used

pytestmark = [pytest.mark.processes, pytest.mark.jax_version]
CHANGES = ["--set", "updates=200000", "--set", "evaluate_every=0", "--set", "checkpoint_every=100"]
SPLIT = ["--set", "layout.shard_update=true", "--log-examples", "--mesh", "2x2"]
PATIENCE_S = 150
SLOW = TINY.replace("tiny_recipe", "slow_recipe")


def events(run, kind: str) -> list[dict]:
    if not (run / "metrics.jsonl").is_file():
        return []
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [record for line in lines if line.endswith("\n") if (record := json.loads(line))["event"] == kind]


def wait_for(what, launcher) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not what():
        assert launcher.poll() is None, launcher.stderr.read()
        assert time.monotonic() < until_s
        time.sleep(0.1)


def talk_nonsense_to(processes: list[psutil.Process]) -> None:
    """Connects to every port that they listen on, all on loopback, and sends what nobody there expects."""
    ports = [c.laddr for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert len(ports) >= 3  # the coordination service, and gloo's in each rank
    for address in ports:
        assert address.ip in ("127.0.0.1", "::ffff:127.0.0.1")
        for words in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 8):
            with socket.create_connection(("127.0.0.1", address.port)) as stranger, contextlib.suppress(OSError):
                stranger.sendall(words)


JOINS = """
import sys
from multipod import runtime
runtime.prepare(cpu_devices=2, survives=True)
import jax
from multipod.elastic.worker.jax_world import join, leave
from multipod.elastic.world import World
rank, *addresses = int(sys.argv[1]), *sys.argv[2:]
for generation, address in enumerate(addresses):
    connection = join(World(generation, (0, 1), (0, 1), 2, address), rank, 10.0)
    counts = len(jax.devices()), len(jax.local_devices())
    print(generation, jax.process_index(), jax.process_count(), *counts, flush=True)
    connection.publish("met", "")
    connection.collect("met", lambda: None)
    leave(connection)
    if rank == 1:
        jax.devices()  # as a thread does that was abandoned in this world
"""


@pytest.mark.slow
def test_devices_that_were_made_between_two_worlds_are_of_neither():
    with CoordinationServices(clean_environment(), CoordinatorHost()) as services:
        addresses = [services.open(2, 10.0) for _ in range(2)]
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", JOINS, str(rank), *addresses], env=clean_environment(),
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(2)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=90) for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    found = [[line for line in out.splitlines() if "Gloo" not in line] for out, _ in said]
    assert found == [[f"{generation} {rank} 2 4 2" for generation in range(2)] for rank in range(2)], said


@pytest.mark.slow
def test_a_killed_leader_is_done_without_and_comes_back_and_the_run_is_the_same(multipod, tmp_path):
    run = tmp_path / "two"
    command = [sys.executable, "-m", "multipod", "launch", "--processes", "2", "--survive", "--", "train", TINY]
    with started([*command, *CHANGES, *SPLIT, "--out", "two"], tmp_path) as launcher:
        wait_for(lambda: events(run, "saved"), launcher)
        ranks = {p.environ().get("MULTIPOD_PROCESS_ID"): p for p in psutil.Process(launcher.pid).children()}
        talk_nonsense_to(psutil.Process(launcher.pid).children())
        more = len(events(run, "updated")) + 20
        wait_for(lambda: len(events(run, "updated")) > more, launcher)
        assert not events(run, "regrouped")
        time.sleep(0.7)  # it writes each second: of these updates the others tell
        ranks["0"].kill()  # it writes the metrics, and has half of the optimizer's state to itself
        wait_for(lambda: len(events(run, "regrouped")) == 2, launcher)
        saved = len(events(run, "saved"))
        wait_for(lambda: len(events(run, "saved")) > saved + 1, launcher)  # by both processes of the third world
        said = interrupt(launcher, PATIENCE_S)
    assert launcher.returncode == 130, said
    assert "launch: rank 0 (pid" in said
    assert "was killed by SIGKILL" in said
    without, whole = events(run, "regrouped")
    assert (without["processes"], without["source"], without["planned"]) == (1, "mirror", False)
    assert list(without["lost"]) == ["0"]
    assert (whole["processes"], whole["source"], whole["planned"]) == (2, "peers", True)
    assert (whole["came"], whole["repeated"]) == ([0], 0)
    assert not events(run, "savefailed")

    last = max(losses(run))
    alone = multipod(
        "train", TINY, *CHANGES, *SPLIT, "--out", "one", "--quiet", "--stop-after", str(last), "--cpu-devices", "4"
    )
    assert alone.returncode == 130, alone.stderr
    one, two = losses(tmp_path / "one"), losses(run)
    assert two.keys() == one.keys()
    assert max(abs(one[update] - two[update]) for update in one) < 1e-4
    assert used(run) == used(tmp_path / "one")


@pytest.mark.slow
def test_a_slow_rank_is_let_go_and_what_died_with_its_mirror_comes_from_a_checkpoint(tmp_path):
    run = tmp_path / "three"
    (tmp_path / "slow").touch()
    command = [sys.executable, "-m", "multipod", "launch", "--processes", "3", "--survive", "--evict", "2"]
    changes = ["--set", "batch=120", "--set", "model.width=48", "--set", "layout.shard_update=true", *CHANGES]
    where = ["--mesh", "1x3", "--out", "three"]
    with started([*command, "--", "train", SLOW, *changes, *where], tmp_path) as launcher:
        wait_for(lambda: events(run, "regrouped"), launcher)
        (tmp_path / "slow").unlink()  # the one that comes instead is as fast as the others
        wait_for(lambda: len(events(run, "regrouped")) == 2, launcher)
        without, whole = events(run, "regrouped")
        assert "times as slow as the median rank" in without["lost"]["1"]
        assert "it was let go" in without["lost"]["1"]
        assert (without["processes"], without["source"], whole["came"]) == (2, "mirror", [1])
        saved = len(events(run, "saved"))
        wait_for(lambda: len(events(run, "saved")) > saved + 1, launcher)
        ranks = {p.environ().get("MULTIPOD_PROCESS_ID"): p for p in psutil.Process(launcher.pid).children()}
        for number in ("0", "1"):  # a share of the optimizer's state, and the only copy of it
            ranks[number].kill()
        wait_for(lambda: len(events(run, "regrouped")) > 2, launcher)
    third = events(run, "regrouped")[2]
    assert (third["processes"], third["source"], third["planned"]) == (1, "checkpoint", False)
    assert third["update"] % 100 == 0


@pytest.mark.slow
def test_a_host_with_two_processes_is_lost_and_costs_no_update(tmp_path):
    """Shares of two processes, and the run has no checkpoint to go back to. Agents on two addresses of loopback."""
    run, secret = tmp_path / "two", tmp_path / "secret"
    secret.touch(0o600)
    secret.write_bytes(b"known to launcher and agents")
    addresses = [f"127.0.0.{host}:{free_port(host)}" for host in (1, 2)]
    multipod = [sys.executable, "-m", "multipod"]
    with contextlib.ExitStack() as stack:
        _, lost = (
            stack.enter_context(started([*multipod, "agent", "--listen", address, "--secret", str(secret)], tmp_path))
            for address in addresses
        )
        words = [*multipod, "launch", "--processes", "4", "--survive", "--no-replace", "--hosts", ",".join(addresses)]
        changes = [*CHANGES[:-1], "checkpoint_every=1000000", "--set", "layout.shard_update=true"]
        command = [*words, "--secret", str(secret), "--", "train", TINY, *changes, "--mesh", "2x2", "--out", "two"]
        with started(command, tmp_path) as launcher:
            wait_for(lambda: len(events(run, "updated")) > 100, launcher)
            ranks = psutil.Process(lost.pid).children()
            assert len(ranks) == 2
            for process in [psutil.Process(lost.pid), *ranks]:
                process.kill()
            wait_for(lambda: any(event["processes"] == 2 for event in events(run, "regrouped")), launcher)
            more = len(events(run, "updated")) + 20
            wait_for(lambda: len(events(run, "updated")) > more, launcher)
            said = interrupt(launcher, PATIENCE_S)
    assert launcher.returncode == 130, said
    found = events(run, "regrouped")
    assert sorted(number for event in found for number in event["lost"]) == ["2", "3"]
    assert {event["source"] for event in found} <= {"mirror", "peers", "memory"}
    assert found[0]["source"] == "mirror"
    assert sum(event["repeated"] for event in found) <= 1  # one process may have finished it, and the others not
    done = sorted(losses(run))
    assert done == list(range(1, len(done) + 1))


def free_port(host: int) -> int:
    with socket.create_server((f"127.0.0.{host}", 0)) as probe:
        return probe.getsockname()[1]


@pytest.mark.slow
def test_hosts_go_on_without_one_whose_link_is_down_and_take_it_in_again(tmp_path):
    run = tmp_path / "two"
    with contextlib.ExitStack() as stack:
        try:
            three = stack.enter_context(make_hosts(3))
        except ClusterError as error:
            pytest.skip(str(error))  # making them needs root
        agents = stack.enter_context(three.agents(36, clean_environment()))
        words = [*agents.command_prefix, sys.executable, "-m", "multipod", "launch", "--processes", "2", "--survive"]
        where = ["--hosts", ",".join(agents.addresses), "--secret", str(agents.secret), "--timeout", "36"]
        command = [*words, *where, "--", "train", TINY, *CHANGES, "--mesh", "2x1", "--out", "two"]
        with started(command, tmp_path) as launcher:
            wait_for(lambda: len(events(run, "updated")) > 20, launcher)
            subprocess.run(["ip", "-n", three.names[1], "link", "set", LINK, "down"], check=True)
            wait_for(lambda: events(run, "regrouped"), launcher)
            more = len(events(run, "updated")) + 20
            wait_for(lambda: len(events(run, "updated")) > more, launcher)
            assert len(events(run, "regrouped")) == 1
            subprocess.run(["ip", "-n", three.names[1], "link", "set", LINK, "up"], check=True)
            wait_for(lambda: len(events(run, "regrouped")) == 2, launcher)
            more = len(events(run, "updated")) + 20
            wait_for(lambda: len(events(run, "updated")) > more, launcher)
            said = interrupt(launcher, PATIENCE_S)
    assert launcher.returncode == 130, said
    without, whole = events(run, "regrouped")
    assert (without["processes"], list(without["lost"]), without["source"]) == (1, ["1"], "memory")
    assert (whole["processes"], whole["came"], whole["source"], whole["repeated"]) == (2, [1], "peers", 0)
    done = sorted(losses(run))
    assert done == list(range(1, len(done) + 1))
    trained = [p for p in psutil.process_iter(["cmdline"]) if TINY in (p.info["cmdline"] or [])]
    assert not [p for p in trained if p.cwd() == str(tmp_path)]
