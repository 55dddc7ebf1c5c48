"""Ranks on other hosts, here on loopback: an agent and a proxy, and a rank that is another agent, as it is small."""

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from multipod.cli.launch import LaunchOptions, find_agents, refuse_survival_contradictions
from multipod.cli.launching.child_command import read_child
from multipod.cli.launching.workers import make_workers
from multipod.elastic.launcher.links import SignedLink, agree_as_agent, agree_as_launcher
from multipod.elastic.launcher.remote import (
    FORWARDED_SIGNALS,
    LaunchRequest,
    RankProxy,
    end_as,
    read_secret,
    serve,
    split_address,
)
from multipod.errors import ClusterError
from multipod.runtime import Timeouts

SECRET = b"known to launcher and agent"
PATIENCE_S = 60


class Agent:
    """An agent in a thread, and what it reports."""

    def __init__(self, delay_s: float = 0.0) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.said: list[str] = []
        threading.Thread(target=self._serve, args=(delay_s,), daemon=True).start()

    def _serve(self, delay_s: float) -> None:
        time.sleep(delay_s)
        listener = socket.create_server(("127.0.0.1", self.port))
        serve(listener, SECRET, dict(os.environ), self.said.append)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def wait(self, word: str) -> str:
        until_s = time.monotonic() + PATIENCE_S
        while not (found := [line for line in self.said if word in line]):
            assert time.monotonic() < until_s, self.said
            time.sleep(0.02)
        return found[0]


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts the handlers of signals back."""
    before = {number: signal.getsignal(number) for number in FORWARDED_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_bytes(SECRET)
    return path


def order(secret: Path, silent_s: float = 60.0) -> LaunchRequest:
    """To run a rank that says a line and stays."""
    return LaunchRequest(
        ["agent", "--listen", "127.0.0.1:0", "--secret", str(secret)], {}, str(secret.parent), silent_s, 0.1
    )


def run_proxy(address: str, known: bytes, wanted: LaunchRequest, show=lambda line: None) -> tuple[int, list[dict]]:
    """What it returns, and the beats that the launcher hears of it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        code = RankProxy(address, known, wanted, theirs, show, lost=lambda: None)()
        ours.setblocking(False)
        try:
            heard = ours.recv(1 << 16)
        except BlockingIOError:
            heard = b""
    return code, [json.loads(line) for line in heard.splitlines()]


def connected(agent: Agent) -> SignedLink:
    """Another side of an agent's, which knows the secret."""
    agent_is_there(agent)
    sock = socket.create_connection(("127.0.0.1", agent.port))
    return agree_as_launcher(sock, SECRET, time.monotonic() + PATIENCE_S)


def agent_is_there(agent: Agent) -> None:
    """Waits for it, as a stranger who talks nonsense."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        try:
            with socket.create_connection(("127.0.0.1", agent.port)) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(999))
            agent.wait("turned away")
            return
        except ConnectionRefusedError:
            time.sleep(0.02)


@pytest.mark.processes
def test_a_proxy_waits_for_its_host_and_carries_words_and_signals(secret, handlers):
    agent = Agent(delay_s=0.5)
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if line.startswith("agent at"):
            os.kill(os.getpid(), signal.SIGINT)  # as a launcher asks a rank to stop

    code, beats = run_proxy(agent.address, SECRET, order(secret), show)
    assert code == 130
    assert shown[0].startswith(f"waiting for the agent at {agent.address}: ")
    assert shown[-1] == "interrupted"
    assert beats[0]["phase"] == f"waiting for its host {agent.address}"
    assert not beats[0]["identity"]  # so that no world is made with it
    assert "ended with 130" in agent.wait("ended with")
    nowhere = LaunchRequest(["list"], {}, str(secret.parent / "nowhere"), 60.0, 0.1)
    with pytest.raises(ClusterError, match=r"cannot start this rank: No such file or directory: .*nowhere"):
        run_proxy(agent.address, SECRET, nowhere)
    with pytest.raises(
        ClusterError, match=r"it has another secret. Give launcher and agents the same version of multipod and"
    ):
        run_proxy(agent.address, b"known to somebody else", order(secret))


@pytest.mark.processes
@pytest.mark.parametrize("leaves", [False, True])
def test_a_rank_whose_launcher_is_silent_or_gone_is_ended(secret, leaves):
    agent = Agent()
    line = connected(agent)
    line.send(request=vars(order(secret, silent_s=60.0 if leaves else 3.0)))
    pid = int(agent.wait("started process").split("started process ")[1].split(":")[0])
    if leaves:
        line.close()
        assert "its launcher is gone" in agent.wait("ended with -9")
    else:
        assert "its launcher was silent for " in agent.wait("ended with -9")  # before the launcher gives it up
        line.close()
    assert not psutil.pid_exists(pid)


def test_a_proxy_gives_up_a_host_that_is_silent(secret, handlers):
    shown: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def agree() -> None:
            held.append(agree_as_agent(listener.accept()[0], SECRET, time.monotonic() + PATIENCE_S))

        held: list[SignedLink] = []
        threading.Thread(target=agree, daemon=True).start()
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        assert run_proxy(address, SECRET, order(secret, silent_s=0.3), shown.append)[0] == 75
        held[0].close()
    assert shown[-1].startswith("its host gave no sign of life for 0.")
    with pytest.raises(SystemExit) as ended:
        end_as(75)
    assert ended.value.code == 75


def test_secrets_and_addresses_that_are_none(secret, tmp_path):
    assert read_secret(secret) == SECRET
    with pytest.raises(ClusterError, match=r"cannot be read: No such file(.|\n)*openssl rand -hex 32"):
        read_secret(tmp_path / "none")
    secret.chmod(0o644)
    with pytest.raises(ClusterError, match=r"can be read by others. Change that: chmod 600"):
        read_secret(secret)
    secret.chmod(0o600)
    secret.write_text("short")
    with pytest.raises(ClusterError, match=r"has 5 bytes. Take 16 or more."):
        read_secret(secret)
    for text in ("host", "host:", ":41", "host:x", "host:70000"):
        with pytest.raises(ClusterError, match=r"is no address of an agent. Write HOST:PORT"):
            split_address(text)


def test_the_launcher_s_options_and_who_goes_where(secret):
    wanted = find_agents(LaunchOptions(4, survive=True, hosts="127.0.0.1:41,127.0.0.2:42", secret=secret), Timeouts(30))
    assert wanted.coordinator.address == "127.0.0.1"
    placed = wanted.place(make_workers(["train", "digits"], 4, {}, 6), 4)
    at = [worker.command[worker.command.index("30") + 1] for worker in placed]
    assert [address[-2:] for address in at] == ["41", "41", "42", "42", "41", "42"]  # neighbours; then two spares
    assert placed[0].command[-2:] == ["train", "digits"]
    assert [worker.place[-1] for worker in placed] == ["1", "1", "2", "2", "1", "2"]
    racked = LaunchOptions(2, survive=True, hosts="127.0.0.1:41@r,127.0.0.2:42", secret=secret)
    assert find_agents(racked, Timeouts(30)).racks == ("r", "")
    with pytest.raises(ClusterError, match="after an @ comes the name of a rack, without a slash"):
        find_agents(LaunchOptions(2, survive=True, hosts="127.0.0.1:41@a/b,127.0.0.2:42@", secret=secret), Timeouts(30))
    child = read_child(["train", "digits"])
    with pytest.raises(ClusterError, match=r"--mirror-copies 2 needs 3 hosts, and there are 2\. Lower it"):
        refuse_survival_contradictions(
            LaunchOptions(4, survive=True, mirror_copies=2, hosts="127.0.0.1:41,127.0.0.2:42", secret=secret), child
        )
    with pytest.raises(ClusterError, match="--mirror-copies 4 needs 5 processes, and there are 4"):
        refuse_survival_contradictions(LaunchOptions(4, survive=True, mirror_copies=4), child)
    refuse_survival_contradictions(LaunchOptions(4, survive=True, mirror_copies=3), child)
    with pytest.raises(ClusterError, match=r"go together(.|\n)*Add --survive(.|\n)*names 2 hosts for 1 processes"):
        find_agents(LaunchOptions(1, hosts="a:1,b:2"), Timeouts())
