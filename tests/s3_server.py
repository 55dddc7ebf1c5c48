"""An S3-compatible server on this machine, for tests of what lies in object stores."""

import socket
from contextlib import closing

import pytest


class Server:
    """An S3 server in a thread, that can go and come back with what it held."""

    def __init__(self) -> None:
        with closing(socket.socket()) as taken:
            taken.bind(("127.0.0.1", 0))
            self.port = taken.getsockname()[1]
        self.start()

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


def s3_server():
    """The server, with a bucket, to make a fixture of; the environment leads to it meanwhile."""
    pytest.importorskip("moto.server", reason="moto[server] is not installed")
    s3fs = pytest.importorskip("s3fs", reason="s3fs is not installed")
    values = {
        "AWS_ENDPOINT_URL": "",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_MAX_ATTEMPTS": "1",
    }
    one = Server()
    values["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{one.port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().makedirs("s3://bucket", exist_ok=True)  # its memory outlives a server
        yield one
    one.stop()
