"""Signed messages between a launcher and its agents, which share a secret. Nothing is encrypted.

A connection begins with a handshake of fixed sizes, under one deadline. The agent sends a nonce; the launcher answers
with its own and proves that it knows the secret; the agent proves the same. Each proof is an HMAC-SHA256 over both
nonces, so none is of use on another connection. From the secret and the nonces follow two keys, one a direction. Each
message then is its length, its JSON, and an HMAC-SHA256 over its number and both: one that was changed, cut, repeated,
left out, swapped or sent back is refused, and the connection with it.

Source: HMAC is RFC 2104; proofs of both sides over both nonces are ISO/IEC 9798-4's, in three messages.
"""

import hmac
import json
import os
import resource
import select
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

HELLO = b"multipod agent 2"
NONCE_BYTES = PROOF_BYTES = 32
HANDSHAKE_S = 5.0
"""For a whole handshake and the request that follows, however often its bytes come."""
LARGEST_BYTES = 1 << 20
DESCRIPTORS = 1 << 16


class StrangerError(Exception):
    """The other side has another secret, or speaks another protocol."""


class SignedLink:
    """Sends and receives signed messages over a connected socket, which it owns.

    Sends may come from several threads, receives from one. `received_s` is when the last message came.

    Args:
      sock: from `agree_as_agent` or `agree_as_launcher`, with the keys that these return.
      limit_s: for one message, from its first byte to its last, in either direction.
    """

    def __init__(self, sock: socket.socket, sends: bytes, receives: bytes, limit_s: float) -> None:
        sock.settimeout(None)
        # The kernel's time-out: nobody waits for a link that is down, and reading waits by `poll`.
        limit = struct.pack("ll", int(limit_s), int(limit_s % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        with suppress(OSError):  # a socket pair has none
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.received_s = time.monotonic()
        self._socket, self._limit_s = sock, limit_s
        self._keys, self._counts = (sends, receives), [0, 0]
        self._sending = threading.Lock()

    def send(self, **message: Any) -> None:
        """Sends one message; raises OSError if the other side is gone or takes nothing, ValueError if it is too long.

        What was sent in part can only be followed by nonsense: the connection ends with it.
        """
        text = json.dumps(message).encode()
        if len(text) > LARGEST_BYTES:
            raise ValueError(f"a message of {len(text):,} bytes is too long: {LARGEST_BYTES:,} are allowed.")
        with self._sending:
            frame = len(text).to_bytes(4, "big") + text
            try:
                self._socket.sendall(frame + self._sign(0, frame))
            except OSError:
                with suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)
                raise
            self._counts[0] += 1

    def receive(self, wait_s: float) -> dict[str, Any] | None:
        """The next message, None if none begins in time.

        Raises:
          EOFError: the other side is gone.
          OSError: so is the connection, a message came too slowly, or it is not the next one of this session.
        """
        if not _has_bytes(self._socket, wait_s):
            return None
        until_s = time.monotonic() + self._limit_s
        head = _read(self._socket, 4, until_s)
        size = int.from_bytes(head, "big")
        if size > LARGEST_BYTES:
            raise ConnectionError(f"a message of {size:,} bytes was refused")
        frame = head + _read(self._socket, size, until_s)
        if not hmac.compare_digest(_read(self._socket, PROOF_BYTES, until_s), self._sign(1, frame)):
            raise ConnectionError("a message was refused: it is not the next one that was signed for this connection")
        self._counts[1] += 1
        self.received_s = time.monotonic()
        message: dict[str, Any] = json.loads(frame[4:])
        return message

    def close(self) -> None:
        """Ends the connection, also for a thread that waits in it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    @property
    def silent_s(self) -> float:
        """Seconds since the last message."""
        return time.monotonic() - self.received_s

    def _sign(self, direction: int, frame: bytes) -> bytes:
        return _hmac(self._keys[direction], self._counts[direction].to_bytes(8, "big"), frame)


def agree_as_agent(sock: socket.socket, secret: bytes, until_s: float, limit_s: float = HANDSHAKE_S) -> SignedLink:
    """The agent's side of a handshake that ends at `until_s` (`time.monotonic`).

    Raises:
      StrangerError: the other side does not know the secret.
      EOFError: it is gone.
      OSError: it is gone, or too slow.
    """
    ours = os.urandom(NONCE_BYTES)
    _write(sock, HELLO + ours, until_s)
    # The first bytes tell who is no launcher, before the rest is waited for.
    if _read(sock, len(HELLO), until_s) != HELLO:
        raise StrangerError("it is no launcher of this version")
    theirs = _read(sock, NONCE_BYTES, until_s)
    nonces = ours + theirs
    if not hmac.compare_digest(_read(sock, PROOF_BYTES, until_s), _hmac(secret, b"launcher", nonces)):
        _write(sock, bytes(PROOF_BYTES), until_s)  # which no proof is: the launcher is to say so, not to try again
        raise StrangerError("it does not know the secret")
    _write(sock, _hmac(secret, b"agent", nonces), until_s)
    return SignedLink(sock, _hmac(secret, b"to launcher", nonces), _hmac(secret, b"to agent", nonces), limit_s)


def agree_as_launcher(sock: socket.socket, secret: bytes, until_s: float, limit_s: float = HANDSHAKE_S) -> SignedLink:
    """The launcher's side of a handshake; see `agree_as_agent`."""
    if _read(sock, len(HELLO), until_s) != HELLO:
        raise StrangerError("what answers there is no agent of this version")
    theirs = _read(sock, NONCE_BYTES, until_s)
    ours = os.urandom(NONCE_BYTES)
    nonces = theirs + ours
    _write(sock, HELLO + ours + _hmac(secret, b"launcher", nonces), until_s)
    if not hmac.compare_digest(_read(sock, PROOF_BYTES, until_s), _hmac(secret, b"agent", nonces)):
        raise StrangerError("it has another secret")
    return SignedLink(sock, _hmac(secret, b"to agent", nonces), _hmac(secret, b"to launcher", nonces), limit_s)


def raise_descriptor_limit(wanted: int = DESCRIPTORS) -> int:
    """Lets this process open `wanted` descriptors, or as many as it may; returns how many those are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return soft


def _hmac(key: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"".join(parts), "sha256")


def _has_bytes(sock: socket.socket, wait_s: float) -> bool:
    poll = select.poll()  # select.select refuses descriptors above 1023
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(max(0.0, 1e3 * wait_s)))


def _read(sock: socket.socket, size: int, until_s: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        left_s = until_s - time.monotonic()
        if left_s <= 0 or not _has_bytes(sock, left_s):
            raise TimeoutError("too slow")
        part = sock.recv(size - len(data), socket.MSG_DONTWAIT)
        if not part:
            raise EOFError("it closed the connection")
        data += part
    return bytes(data)


def _write(sock: socket.socket, data: bytes, until_s: float) -> None:
    sock.settimeout(max(0.001, until_s - time.monotonic()))
    sock.sendall(data)
