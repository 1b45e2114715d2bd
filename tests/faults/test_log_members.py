"""A member that died is replaced at once, one that is only silent when its lease ran out. Both leases last ten minutes."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.log import leases as leases_module
from services.core.broker.log import topics
from services.core.broker.log.clock import boot_ms
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import GroupsFile
from services.core.broker.log.leases import Leases
from services.core.broker.record import TopicPartition
from tests.support.freeze import freeze

TOPIC = "orders"
LEASE = 600
DEADLINE = 300.0
ALL = {TopicPartition(TOPIC, partition) for partition in range(4)}


@pytest.fixture
def folder(tmp_path: Path) -> DataFolder:
    """A data folder with one topic of four partitions."""
    folder = DataFolder.prepare(tmp_path / "log")
    topics.create_topic(folder, TopicSpec(TOPIC, partitions=len(ALL)))
    return folder


@contextmanager
def member(folder: DataFolder) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that owns all partitions."""
    command = [sys.executable, "-m", "tests.faults.log_member", str(folder.root), TOPIC, str(LEASE)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert said(process) == {"owns": len(ALL)}
            yield process
        finally:
            process.kill()


def said(process: "subprocess.Popen[bytes]") -> dict[str, int]:
    """The next line of a child."""
    assert process.stdout is not None
    line: dict[str, int] = json.loads(process.stdout.readline())
    return line


def test_a_killed_member_is_replaced_at_the_next_heartbeat(folder: DataFolder) -> None:
    """If it fails, events wait for the rest of a lease each time that an expel process is killed."""
    with member(folder) as owner, closing(Leases(folder, LEASE * 1000)) as leases:
        assert not leases.heartbeat("g", "other", {TOPIC: len(ALL)}, {}).acquired
        owner.kill()
        owner.wait(DEADLINE)
        taken = leases.heartbeat("g", "other", {TOPIC: len(ALL)}, {}).acquired
        assert taken == dict.fromkeys(ALL, 2), "not all, or under the dead member's epoch"


def test_an_operator_need_not_wait_for_a_killed_member(folder: DataFolder) -> None:
    """If it fails, a group cannot be moved (time travel) for a whole lease after its processes were killed."""
    with member(folder) as owner, closing(GroupsFile(folder)) as file:
        assert file.live_members("g", TOPIC) == 1
        owner.kill()
        owner.wait(DEADLINE)
        assert file.live_members("g", TOPIC) == 0


def test_a_frozen_member_keeps_its_lease_and_then_is_fenced(
    folder: DataFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a process that hangs for a moment loses its partitions while it believes to own them, or one that
    hung for long commits over its successor."""
    with member(folder) as owner, closing(Leases(folder, LEASE * 1000)) as leases:
        freeze(owner.pid)
        for _ in range(5):
            beat = leases.heartbeat("g", "other", {TOPIC: len(ALL)}, {})
            assert not beat.acquired, "taken from a member whose lease holds"
        monkeypatch.setattr(leases_module, "boot_ms", lambda: boot_ms() + LEASE * 1000 + 1)
        taken = leases.heartbeat("g", "other", {TOPIC: len(ALL)}, {}).acquired
        assert taken.keys() == ALL
        owner.send_signal(signal.SIGCONT)
        assert owner.stdin is not None
        owner.stdin.write(b"\n")
        owner.stdin.flush()
        assert said(owner) == {"refused": len(ALL)}


def test_nothing_of_many_dead_members_stays(folder: DataFolder) -> None:
    """If it fails, each restart leaves something behind, and after a year the folder is full of it."""
    before = {path.name for path in folder.root.iterdir()}
    names = set[str]()
    with closing(GroupsFile(folder)) as file:
        for number in range(20):
            with closing(Leases(folder, LEASE * 1000)) as leases:
                leases.heartbeat("g", f"m{number}", {TOPIC: len(ALL)}, {})
                names |= {path.name for path in folder.root.iterdir()}
        with closing(Leases(folder, LEASE * 1000)) as leases:
            assert leases.heartbeat("g", "last", {TOPIC: len(ALL)}, {}).acquired.keys() == ALL
        assert file.connection.execute("SELECT member FROM members").fetchall() == [("last",)]
    assert {name for name in names - before if not name.startswith("groups.db")} <= {
        "groups.hwm",
        "groups.lock",
        "groups.alive",
    }
    assert (folder.root / "groups.alive").stat().st_size == 0
