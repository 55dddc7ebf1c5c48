"""The launcher's helper: holds the coordination services of a run's worlds, one after the other.

Run as a program. Each line of its standard input is `open HOST PROCESSES SILENT_S` or `close ADDRESS`; it answers
`ok ADDRESS` or `failed WHY`, and ends with its input. It holds no arrays and imports the C++ part of JAX alone,
a third of a second. A process of its own because no rank's death may take the services away: JAX aborts every client
whose service is gone.
"""

import socket
import sys
from typing import Any


def serve() -> None:
    """Obeys lines until there are no more."""
    from jaxlib import _jax

    services: dict[str, Any] = {}
    for line in sys.stdin:
        what, address, *numbers = line.split()
        try:
            if what == "open":
                with socket.create_server((address, 0)) as probe:
                    address = f"{address}:{probe.getsockname()[1]}"
                services[address] = _jax.get_distributed_runtime_service(
                    address,
                    int(numbers[0]),
                    heartbeat_timeout=int(numbers[1]),
                    shutdown_timeout=1,
                    recoverable=True,  # a peer's death is told to nobody: the launcher does that
                )
            else:
                services.pop(address).shutdown()
            answer = f"ok {address}"
        except Exception as error:
            answer = f"failed {' '.join(str(error).split())[:200]}"
        print(answer, flush=True)


if __name__ == "__main__":
    serve()
