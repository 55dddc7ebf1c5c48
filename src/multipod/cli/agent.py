"""`multipod agent`, which starts the ranks of runs that are launched on another host, and the proxies of such ranks."""

import os
import socket
from pathlib import Path

import click

from multipod.elastic.heartbeat import CONTROL_FD
from multipod.elastic.launcher.remote import (
    PASSED_VARIABLES,
    LaunchRequest,
    RankProxy,
    end_as,
    read_secret,
    serve,
    split_address,
)
from multipod.errors import ClusterError
from multipod.runtime import Timeouts

SECRET = click.option(
    "--secret",
    type=click.Path(path_type=Path, dir_okay=False),
    required=True,
    metavar="FILE",
    help="What launcher and agents both know. Nobody else may read it.",
)


@click.command()
@click.option("--listen", required=True, metavar="HOST:PORT", help="This host's address on the private network.")
@SECRET
def agent(listen: str, secret: Path) -> None:
    """Start ranks here for `multipod launch --survive --hosts ...` on another host, until Ctrl-C.

    (umask 077; openssl rand -hex 32 > secret)
    multipod agent --listen 10.0.0.2:4100 --secret secret

    Whoever knows the secret can run recipes here, which are programs. Nothing is encrypted: use a private network.
    """
    known, address = read_secret(secret), split_address(listen)
    environment = {name: value for name, value in os.environ.items() if name != CONTROL_FD}
    try:
        listener = socket.create_server(address)
    except OSError as error:
        raise ClusterError(f"agent: {listen} cannot be listened on: {error.strerror}. Take another port.") from error
    with listener:
        click.echo(f"agent at {listen}", err=True)
        serve(listener, known, environment, lambda line: click.echo(f"agent: {line}", err=True))


@click.command(hidden=True, context_settings={"allow_interspersed_args": False})
@click.argument("address")
@SECRET
@click.option("--timeout", type=float, required=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def rank_proxy(address: str, secret: Path, timeout: float, arguments: tuple[str, ...]) -> None:
    """Speaks for a rank on the host of the agent at ADDRESS; started by the launcher alone."""
    limits = Timeouts(timeout)
    ours = {
        name: value for name, value in os.environ.items() if name.startswith(PASSED_VARIABLES) and name != CONTROL_FD
    }
    order = LaunchRequest(list(arguments), ours, os.getcwd(), limits.silence_s, limits.beat_s)
    with socket.socket(fileno=int(os.environ[CONTROL_FD])) as control:
        code = RankProxy(address, read_secret(secret), order, control, lambda line: click.echo(line))()
    end_as(code)
