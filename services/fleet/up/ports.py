"""Finds free ports on this machine."""

import errno
import socket
from collections import deque
from contextlib import suppress

from services.core.http.address import parse_address
from services.fleet.problem import CommandFailed

_newest: deque[int] = deque(maxlen=1000)


def free_port() -> int:
    """A loopback port that nobody listens on now. Another process may use it a moment later. None of the last thousand is given
    again, while there are others: whom it was given to may not listen yet."""
    port = 0
    for _ in range(100):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        if port not in _newest:
            break
    _newest.append(port)
    return port


def next_free_port(host: str, port: int) -> int:
    """The first port behind this one on which nobody listens now, or the next one where none of a hundred is free."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for other in range(port + 1, min(port + 101, 1 << 16)):
        with socket.socket(family) as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, other))
            return other
    return port + 1


def check_port_free(address: str, who: str, flag: str) -> None:
    """Raise CommandFailed when `who` cannot listen on this address. flag: sets the address. Blocks briefly.

    Ingest processes share their port (SO_REUSEPORT). Without this check a second fleet would start and get half of the events.
    """
    host, port = parse_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            remedy = f"{flag} with an address of this machine"
            if error.errno == errno.EADDRINUSE:
                other = next_free_port(host, port)
                remedy = f"stop the program that listens there, or {flag} {address.removesuffix(str(port))}{other}"
            raise CommandFailed(f"{who} cannot listen on {address}: {error.strerror}", remedy) from error
