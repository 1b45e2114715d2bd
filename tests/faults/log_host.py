"""A machine for the state machine: one data folder, two processes on it, a clock that is moved, a disk that forgets.

A crash is chosen before an operation (`Moment`) and happens before its n-th change of the disk: the operation goes on, on a
folder that nobody will see again; what the crash left is built elsewhere, and the processes begin anew there.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

from services.core.broker.contract import Start
from services.core.broker.lease_member import end_tasks
from services.core.broker.log import LogBroker, clock
from services.core.broker.log import membership as membership_module
from services.core.broker.log.clock import WallClock
from services.core.broker.log.consumer import LogConsumer
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.membership import LogMembership, Timing
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.record import TopicPartition
from tests.contract.traffic import ignore_revoke
from tests.faults.log_disk import Crash, Disk
from tests.faults.log_disk_listen import listening
from tests.faults.log_small import quick_folder, small_pages

T = TypeVar("T")

TOPIC = "t"
LEASE = 10.0


class Moment(NamedTuple):
    """When a crash happens: before the n-th change. power: the power goes, else the processes are killed.

    again: the power goes once more when the processes are up and have read what is there.
    """

    change: int
    power: bool
    seed: int
    again: bool = False


class Member:
    """One consumer. Its heart beats only when told."""

    def __init__(self, group: str, membership: LogMembership, consumer: LogConsumer) -> None:
        self.group, self.membership, self.consumer = group, membership, consumer
        self.polled: dict[TopicPartition, int] = {}

    @property
    def owned(self) -> frozenset[TopicPartition]:
        """What it believes to own, while its lease holds."""
        return self.consumer.assignment() if self.membership.is_alive else frozenset()


class Host:
    """Everything is closed by `close`."""

    def __init__(self, base: Path, disk: Disk) -> None:
        self._base, self._disk = base, disk
        self._loop = asyncio.new_event_loop()
        self._folders = 0
        self.now_ns = 1_000_000_000_000
        self.boot = base / "boot_id"
        self.boot.write_text("0")
        self.folder = DataFolder.prepare(base / "0")
        self._disk.load(self.folder.root)
        self.clock = WallClock()
        self._brokers: list[LogBroker | None] = [None, None]
        self.members: list[Member] = []

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run it in the loop of all processes."""
        return self._loop.run_until_complete(work)

    def broker(self, process: int) -> LogBroker:
        """One of the two processes, started when it is first used."""
        broker = self._brokers[process]
        if broker is None:
            broker = self._brokers[process] = self.run(self._start())
        return broker

    def read(self, work: Callable[[TopicReader], T]) -> T:
        """Use the reader of the first process, which stays open as a consumer's does."""
        found: T = self.run(self.broker(0)._readers.use(TOPIC, work))
        return found

    def join(self, process: int, group: str, topics: list[str], start: Start) -> Member:
        """A new member."""
        shared = self.run(self.broker(process)._shared_resources())
        membership = LogMembership(shared, group, topics, start, ignore_revoke)
        member = Member(group, membership, LogConsumer(shared, membership, self.clock))
        self.members.append(member)
        self.run(membership.join())
        return member

    def beat(self, member: Member) -> None:
        """One heartbeat, and what it drains."""
        self.run(_beat(member.membership))

    def leave(self, member: Member) -> None:
        """It leaves in order."""
        self.members.remove(member)
        self.run(member.membership.leave())

    def die(self, member: Member) -> None:
        """It does nothing more, and the kernel lets go of its lock."""
        self.members.remove(member)
        self.run(end_tasks(member.membership._heartbeats))
        member.membership._shared.leases._alive.release(member.membership.member)

    def arm(self, moment: Moment | None) -> None:
        """Crash before the n-th change from now on."""
        self._disk.crash_in, self._disk.crash = (None if moment is None else moment.change), None

    def crashed(self, moment: Moment | None) -> bool:
        """Whether the crash happened meanwhile; then the processes are gone and the folder is what it left."""
        crash, self._disk.crash_in = self._disk.crash, None
        if crash is None or moment is None:
            return False
        self._fall(crash, moment)
        return True

    def crash(self, moment: Moment) -> None:
        """Now."""
        self._fall(Crash(self._disk, None), moment)

    def stop(self) -> None:
        """End both processes: no member leaves, nothing is in flight."""
        self.run(self._stop())

    def close(self) -> None:
        """End everything."""
        self.stop()
        self._loop.close()

    def _fall(self, crash: Crash, moment: Moment) -> None:
        self.stop()
        self._folders += 1
        root = self._base / f"{self._folders}"
        choose = random.Random(moment.seed).randrange
        (crash.cut if moment.power else crash.kill)(root, choose, self._disk)
        if moment.power:
            self.boot.write_text(f"{self._folders}")
        self.folder = DataFolder.prepare(root)

    async def _start(self) -> LogBroker:
        return LogBroker(self.folder, self.clock, Timing(lease=LEASE, drain=LEASE))

    async def _stop(self) -> None:
        for member in self.members:
            await end_tasks(member.membership._heartbeats, member.membership._drain)
        self.members.clear()
        for number, broker in enumerate(self._brokers):
            if broker is not None:
                await broker._close()
                self._brokers[number] = None


async def _beat(membership: LogMembership) -> None:
    await membership.heartbeat()
    if membership._drain is not None:
        await membership._drain


@contextmanager
def machine_room() -> Iterator[tuple[Path, Disk]]:
    """Where hosts may stand: quick files with small pages, a listening disk, hearts that do not beat by themselves."""
    disk = Disk()
    with quick_folder() as base, small_pages(), listening(disk), pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership_module, "_CHECK_SECONDS", 1e6)
        yield base, disk


@contextmanager
def clock_of(host: Host) -> Iterator[None]:
    """All clocks of the log show the host's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "boot_ns", lambda: host.now_ns)
        patch.setattr(clock, "_BOOT_ID", host.boot)
        yield
