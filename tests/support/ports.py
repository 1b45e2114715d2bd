"""Ports for the servers that tests start."""

import random
import socket
from contextlib import suppress


def free_port() -> int:
    """A loopback port that nobody listens on now, outside of the range that the kernel gives to outgoing connections.

    One of those could take an ephemeral port between this call and the server's bind.
    """
    for port in random.sample(range(10_000, 32_000), 100):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("none of 100 ports is free")
