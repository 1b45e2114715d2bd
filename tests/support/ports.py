"""Ports for the servers that tests start."""

import os
import random
import socket
from contextlib import suppress

from services.core.jvm.kafka import PORTS

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
_given: set[int] = set()


def free_port() -> int:
    """A loopback port that nobody listens on now, outside of the ranges that the kernel gives to outgoing connections and
    `KafkaCluster` to its nodes.

    One of those could take an ephemeral port between this call and the server's bind. No port is given twice, by no worker
    either: whom it was given to before may just be starting again.
    """
    for port in random.sample(range(10_000 + _WORKER, PORTS.start, _WORKERS), 100):
        with socket.socket() as probe, suppress(OSError):
            if port in _given:
                continue
            probe.bind(("127.0.0.1", port))
            _given.add(port)
            return port
    raise AssertionError("none of 100 ports is free")
