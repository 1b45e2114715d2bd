"""Which members of a group are known to be dead: only those of processes that ran here and have ended."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.core.broker.kafka.eviction import client_id, is_dead, name_process

_NAMES_ITSELF = (
    "from services.core.broker.kafka.eviction import name_process; import time; "
    "print(name_process(), flush=True); time.sleep(600)"
)


@pytest.fixture
def child() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running process, and the client id that it would have."""
    process = subprocess.Popen([sys.executable, "-c", _NAMES_ITSELF], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process, client_id("g@1:2", process.stdout.readline().strip())
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_the_living_and_the_frozen_stay(child: tuple[subprocess.Popen[str], str]) -> None:
    """If it fails, a working member is thrown out of its group whenever another one joins."""
    process, name = child
    assert not is_dead(name)
    os.kill(process.pid, signal.SIGSTOP)
    assert not is_dead(name)
    assert not is_dead(client_id("g", name_process()))


def test_the_dead_are_known(child: tuple[subprocess.Popen[str], str]) -> None:
    """If it fails, what a killed process owned waits for the session time-out."""
    process, name = child
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert is_dead(name), "a process that nobody has waited for yet has ended, too"
    process.wait()
    assert is_dead(name)


def test_a_process_id_that_is_used_again() -> None:
    """If it fails, a dead member counts as living because another process has its number."""
    scope, _, _ = name_process().rpartition(":")
    assert is_dead(client_id("g", f"{scope}:1"))


@pytest.mark.parametrize("part", [0, 1], ids=["another machine or boot", "another container"])
def test_others_are_not_judged(part: int) -> None:
    """If it fails, two fleets on one cluster, or two containers on one machine, throw each other out of their groups."""
    parts = name_process().split(":")
    assert len(parts) == 4
    parts[part], parts[3] = "0", "1"
    assert not is_dead(client_id("g", ":".join(parts)))


@pytest.mark.parametrize("name", ["", "penstock-g", "rdkafka", "penstock-g@", "a@b:c:d:e", "a@b:c:1:", "x@1:2:3"])
def test_foreign_names_are_not_judged(name: str) -> None:
    """If it fails, somebody else's client is thrown out, or its name stops us from joining."""
    assert not is_dead(name)
