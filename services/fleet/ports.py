"""Ports of this machine: which are free."""

import socket

from services.core.address import parse_address
from services.fleet.problem import CommandFailed


def free_port() -> int:
    """A loopback port that nobody listens on now; somebody may take it a moment later."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def check_port_free(listen: str) -> None:
    """Raise CommandFailed when somebody listens on this address already. Blocking for a moment.

    Ingest processes share their port (SO_REUSEPORT), so a second fleet would not notice by itself and take half of the events.
    """
    host, port = parse_address(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CommandFailed(
                f"ingest cannot listen on {listen}: {error.strerror}",
                f"end what listens there, or --listen {listen.removesuffix(str(port))}{port + 1}",
            ) from error
