"""Signed messages, and what strangers can do to the ports that are listened on: nothing."""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest

from multipod.elastic.launcher import links, remote
from multipod.elastic.launcher.links import SignedLink, StrangerError, agree_as_agent, agree_as_launcher
from multipod.execute.engines import host_peers

SECRET = b"known to launcher and agent"
PATIENCE_S = 60.0
Pair = tuple[SignedLink, SignedLink, socket.socket, socket.socket]


def soon() -> float:
    return time.monotonic() + PATIENCE_S


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A launcher's link, an agent's, and their raw sockets. What one sends is read from the other."""
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(1) as pool:
        agent = pool.submit(agree_as_agent, theirs, SECRET, soon(), PATIENCE_S)
        launcher = agree_as_launcher(ours, SECRET, soon(), PATIENCE_S)
    yield launcher, agent.result(), ours, theirs
    ours.close()
    theirs.close()


def taken(sock: socket.socket) -> bytes:
    """The whole frame that lies in the socket."""
    frame = sock.recv(4, socket.MSG_WAITALL)
    return frame + sock.recv(int.from_bytes(frame, "big") + links.PROOF_BYTES, socket.MSG_WAITALL)


def test_messages_arrive_whole_in_both_directions_from_several_threads(pair):
    launcher, agent, *_ = pair
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda k: launcher.send(number=k, text="é" * k), range(100)))
    got = [agent.receive(PATIENCE_S) for _ in range(100)]
    assert sorted(message["number"] for message in got) == list(range(100))
    assert all(message["text"] == "é" * message["number"] for message in got)
    agent.send(code=3)
    assert launcher.receive(PATIENCE_S) == {"code": 3}
    assert launcher.receive(0.0) is None
    with pytest.raises(ValueError, match="too long"):
        agent.send(out="x" * links.LARGEST_BYTES)
    agent.send()  # what was refused has sent nothing
    assert launcher.receive(PATIENCE_S) == {}
    agent.close()
    with pytest.raises(EOFError):
        launcher.receive(PATIENCE_S)


@pytest.mark.parametrize("how", ["replayed", "swapped", "left out", "sent back", "changed", "of a size that differs"])
def test_a_message_that_is_not_the_next_one_is_refused(pair, how):
    launcher, agent, ours, theirs = pair
    launcher.send(line="first")
    launcher.send(line="second")
    first, second = taken(theirs), taken(theirs)
    changed = first.replace(b"first", b"worst")
    longer = (int.from_bytes(first[:4], "big") + 1).to_bytes(4, "big") + first[4:] + b"x"
    sent, read_by, good = {
        "replayed": (first + first, agent, 1),
        "swapped": (second + first, agent, 0),
        "left out": (second, agent, 0),
        "sent back": (first, launcher, 0),
        "changed": (changed, agent, 0),
        "of a size that differs": (longer, agent, 0),
    }[how]
    (theirs if read_by is launcher else ours).sendall(sent)
    for _ in range(good):
        assert read_by.receive(PATIENCE_S) == {"line": "first"}
    with pytest.raises(ConnectionError, match="not the next one that was signed"):
        read_by.receive(PATIENCE_S)


def test_a_message_cut_short_ends_by_its_deadline_or_with_the_connection(pair):
    launcher, agent, ours, theirs = pair
    launcher.send(line="first")
    frame = taken(theirs)
    agent._limit_s = 0.2
    ours.sendall(frame[:-1])
    with pytest.raises(TimeoutError):
        agent.receive(PATIENCE_S)
    ours.sendall(struct.pack(">I", links.LARGEST_BYTES + 1))
    ours.shutdown(socket.SHUT_WR)
    agent._limit_s = PATIENCE_S
    with pytest.raises((ConnectionError, EOFError)):
        agent.receive(PATIENCE_S)


def test_a_message_of_another_session_is_refused(pair):
    launcher, _, _, theirs = pair
    launcher.send(line="first")
    recorded = taken(theirs)
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(1) as pool:
        agent = pool.submit(agree_as_agent, right, SECRET, soon(), PATIENCE_S)
        agree_as_launcher(left, SECRET, soon(), PATIENCE_S)
        left.sendall(recorded)
        with pytest.raises(ConnectionError, match="not the next one"):
            agent.result().receive(PATIENCE_S)


def test_a_handshake_is_no_use_twice_and_one_byte_a_moment_has_one_deadline():
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(1) as pool:
        agent = pool.submit(agree_as_agent, right, SECRET, soon())
        with pytest.raises(StrangerError, match="another secret"):
            agree_as_launcher(left, b"known to somebody else", soon())
        with pytest.raises(StrangerError, match="does not know the secret"):
            agent.result()
    left, right = socket.socketpair()  # an agent's own proof, sent back to it, proves nothing
    with left, right, ThreadPoolExecutor(1) as pool:
        agent = pool.submit(agree_as_agent, right, SECRET, soon())
        hello = left.recv(len(links.HELLO) + links.NONCE_BYTES, socket.MSG_WAITALL)
        left.sendall(hello + links._hmac(b"guessed", b"launcher", hello))
        with pytest.raises(StrangerError, match="does not know the secret"):
            agent.result()
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(1) as pool:
        began_s = time.monotonic()
        agent = pool.submit(agree_as_agent, right, SECRET, began_s + 0.5)
        while not agent.done():
            with suppress(OSError):
                left.sendall(links.HELLO[:1])
            time.sleep(0.1 if time.monotonic() - began_s < 20 else PATIENCE_S)
        assert isinstance(agent.exception(), TimeoutError | StrangerError)


@pytest.fixture
def agent() -> Iterator[tuple[socket.socket, list[str]]]:
    """The listening socket of an agent in a thread, and what it reports."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    said: list[str] = []
    thread = threading.Thread(target=remote.serve, args=(listener, SECRET, dict(os.environ), said.append), daemon=True)
    thread.start()
    yield listener, said
    address = listener.getsockname()
    listener.close()
    with suppress(OSError), socket.create_connection(address, timeout=1.0):
        pass
    thread.join(PATIENCE_S)


def test_two_thousand_slow_strangers_and_the_one_who_knows(agent):
    """No more than 64 of them are there at a time, and who knows the secret is served among them."""
    listener, said = agent
    links.raise_descriptor_limit(8192)
    before = threading.active_count()
    most = 0
    with ExitStack() as stack:
        for k in range(2000):
            sock = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=PATIENCE_S))
            with suppress(OSError):  # it may be turned away by now
                sock.sendall(links.HELLO[: k % 16] if k % 3 else os.urandom(40))
            most = max(most, threading.active_count() - before)
        assert most <= remote.MOST_STRANGERS + 1
        sock = stack.enter_context(socket.create_connection(listener.getsockname(), timeout=PATIENCE_S))
        link = agree_as_launcher(sock, SECRET, soon(), PATIENCE_S)
        link.send(request=vars(remote.LaunchRequest(["--version"], {}, "/nowhere at all", 60.0, 0.1)))
        while not (answer := link.receive(PATIENCE_S)):
            assert answer is not None
        assert answer["refused"].startswith("No such file or directory")
    assert any("was turned away" in line for line in said)


def test_errors_of_accept_are_survived(monkeypatch):
    """Among others too many open files, which a stranger can bring about."""

    class Listener:
        def __init__(self) -> None:
            self.real = socket.create_server(("127.0.0.1", 0))
            self.troubles = [OSError(24, "Too many open files")] * 3 + [ConnectionAbortedError(103, "aborted")]

        def fileno(self) -> int:
            return self.real.fileno()

        def accept(self):
            if self.troubles:
                raise self.troubles.pop()
            return self.real.accept()

    monkeypatch.setattr(remote, "ACCEPT_AGAIN_S", 0.01)
    listener, said = Listener(), []
    threading.Thread(target=remote.serve, args=(listener, SECRET, {}, said.append), daemon=True).start()
    with socket.create_connection(listener.real.getsockname(), timeout=PATIENCE_S) as sock:
        agree_as_launcher(sock, SECRET, soon()).close()
    assert said[:2] == ["a connection was not taken: aborted", "a connection was not taken: Too many open files"]


def test_a_line_of_any_length_is_passed_on_in_pieces():
    """Megabytes without a line end are no message that is too long."""
    left, right = socket.socketpair()
    with left, right, ThreadPoolExecutor(2) as pool:
        agent = pool.submit(agree_as_agent, right, SECRET, soon(), PATIENCE_S)
        launcher = agree_as_launcher(left, SECRET, soon(), PATIENCE_S)
        reading, writing = os.pipe()
        session = remote._Session.__new__(remote._Session)
        session.link = agent.result()
        forward = pool.submit(session._forward, os.fdopen(reading, "rb"), "out")
        text = b"\xff" * (3 << 20) + b"\nshort\n"

        def write() -> None:
            with os.fdopen(writing, "wb") as target:
                target.write(text)

        written = pool.submit(write)
        pieces = []
        while not pieces or pieces[-1] != "short":
            message = launcher.receive(PATIENCE_S)
            assert message is not None
            pieces.append(message["out"])
        written.result()
        forward.result()
    assert "".join(pieces) == "\ufffd" * (3 << 20) + "short"
    assert max(len(json.dumps({"out": piece})) for piece in pieces) < links.LARGEST_BYTES


def test_two_thousand_strangers_at_the_door_of_a_shared_memory_sum():
    """Guests who say nothing, who guess or who hang up keep no rank out."""
    links.raise_descriptor_limit(8192)
    meet, cards = threading.Barrier(3), ["", "", ""]
    found = threading.Event()

    def exchange(rank: int, card: bytes) -> list[bytes]:
        cards[rank] = card.decode()
        meet.wait(PATIENCE_S)
        if rank:  # rank 0 is at its door, and the strangers come first
            found.wait(PATIENCE_S)
        return [text.encode() for text in cards]

    def connect(rank: int) -> dict[int, socket.socket]:
        return host_peers._connect(rank, 3, lambda card: exchange(rank, card), PATIENCE_S)

    with ThreadPoolExecutor(3) as pool, ExitStack() as stack:
        ranks = [pool.submit(connect, rank) for rank in range(3)]
        while not all(cards):
            time.sleep(0.01)
        name = cards[0].split(" ")[1]
        for k in range(2000):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
            stranger.settimeout(PATIENCE_S)
            until_s = soon()
            while time.monotonic() < until_s:
                with suppress(BlockingIOError):  # the queue is full: unlike TCP, it does not wait
                    stranger.connect("\0" + name)
                    break
                time.sleep(0.001)
            if k % 3:
                with suppress(OSError):
                    stranger.sendall(os.urandom(20 if k % 3 == 1 else 3))
            if k % 5 == 0:
                stranger.close()
        found.set()
        peers = [rank.result() for rank in ranks]
    assert [sorted(links_of) for links_of in peers] == [[1, 2], [0, 2], [0, 1]]
    peers[0][1].sendall(b"r")
    assert peers[1][0].recv(1) == b"r"
    for links_of in peers:
        for link in links_of.values():
            link.close()
