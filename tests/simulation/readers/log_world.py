"""The embedded log as readers meet it: its real files, on a disk in memory, with the real code of topics, groups and leases.

Blocking work runs in the step of the process that asks for it, some milliseconds later; a process never ends in the middle of a
transaction. A process that ends closes its files, as the kernel does.

The faults, by name. unmarked: a writer ends between its commit and the high-water mark. outrun: retention passes what is not
read. remake: a topic is deleted and made anew. grow: partitions are added. lose_rows: rows of groups.db are not there any more,
and an operator repairs the file.
"""

import asyncio
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from pathlib import Path
from typing import Any

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.log import appender, broker, consumer, groups, membership, repair, topic_reader, topics
from services.core.broker.log.broker import LogBroker
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import GroupsFile
from services.core.broker.log.membership import Timing
from services.core.broker.log.retention import remove_before
from services.core.broker.log.row_format import pack_all
from services.core.broker.log.sqlite_file import connect
from services.core.broker.log.topic_store import TopicStore
from services.core.broker.log.topic_writer import TopicWriter
from services.core.broker.record import Record
from tests.simulation.machine import Process, current_process
from tests.simulation.readers.world import World
from tests.support.virtual_loop import EPOCH

_TIMING = Timing(lease=4.0, drain=8.0)
_MOST_PARTITIONS = 4
_NO_RETENTION_S = 1e9
_MEMORY = Path("/dev/shm")


class LogWorld(World):
    """One data folder."""

    faults = ("unmarked", "outrun", "remake", "grow")
    away = ("lose_rows", "remake", "grow", "outrun")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        where = _MEMORY if _MEMORY.is_dir() else None
        self._folder = DataFolder.prepare(tempfile.mkdtemp(prefix="penstock-simulation-", dir=where))
        self._writers: dict[str, TopicWriter] = {}
        self._lives: dict[str, int] = {}
        self._partitions: dict[str, int] = {}
        self._made = 0
        self.open: list[LogBroker] = []

    def attach(self, process: Process) -> None:
        """As there."""
        process.found["log"] = self

    def open_broker(self) -> AbstractAsyncContextManager[Broker]:
        """As there."""
        return _open(self, self._folder.root)

    def make_topics(self, topics: Mapping[str, int]) -> None:
        """As there."""
        for name, count in topics.items():
            self._make(name, count)

    def _make(self, name: str, count: int) -> None:
        topics.create_topic(self._folder, TopicSpec(name, partitions=count))
        self._made += 1
        self._lives[name], self._partitions[name] = self._made, count

    async def has_begun(self, broker: Broker, group: str, topic: str, count: int) -> bool:
        """As there; and its name is in the topic's own file, which a repair of groups.db relies on."""
        return len(await broker.admin.positions(group, topic)) >= count and group in self._registered(topic)

    def _registered(self, topic: str) -> set[str]:
        with closing(TopicStore.open(self._folder, topic)) as store:
            return store.groups()

    def write(self, topic: str) -> None:
        """As there."""
        self._append(topic, self.rng.randrange(self._partitions[topic]))

    def _append(self, topic: str, number: int, *, is_marked: bool = True) -> None:
        writer = self._writer(topic)
        events = [self.oracle.issue(topic, self._lives[topic], number, 0) for _ in range(self.rng.choice((1, 1, 3, 8)))]
        now = int((EPOCH + self.machine.time()) * 1000)
        blocks = {number: pack_all([Record(b"k", b"%d" % event.number, now) for event in events])}
        if is_marked:
            stored = writer.append(blocks)
            assert stored is not None
            first = stored[number][0]
        else:
            done = writer._store.transact(lambda: writer._insert(blocks, None), lambda _: {}, 0)
            assert done is not None
            first = done.firsts[number][0]
            self._close_writer(topic)
        for index, event in enumerate(events):
            event.state, event.offset = "stored", first + index
        self.trace(f"append e{events[0].number}.. to {topic}[{number}] at {first}, {len(events)}, {is_marked=}")

    def _writer(self, topic: str) -> TopicWriter:
        if topic not in self._writers:
            self._writers[topic] = TopicWriter(self._folder, topic, WallClock())
        return self._writers[topic]

    def _close_writer(self, topic: str) -> None:
        if (writer := self._writers.pop(topic, None)) is not None:
            writer.close()

    def strike(self, fault: str) -> None:
        """As there."""
        topic = self.rng.choice(sorted(self._partitions))
        self.trace(f"log: {fault} {topic}")
        match fault:
            case "unmarked":
                self._append(topic, self.rng.randrange(self._partitions[topic]), is_marked=False)
            case "outrun":
                self._outrun(topic)
            case "remake":
                self._remake(topic)
            case "grow":
                self._grow(topic)
            case "lose_rows":
                self._lose_rows()

    def _outrun(self, topic: str) -> None:
        number = self.rng.randrange(self._partitions[topic])
        with closing(TopicStore.open(self._folder, topic)) as store:
            head = store.heads()[number]
            start = self.rng.randint(head.start, head.next)
            remove_before(store, number, start)
        self.trace(f"retention passes {topic}[{number}] up to {start}")
        self.oracle.lose(self.oracle.of(topic, self._lives[topic], number), lambda event: event.offset < start)

    def _remake(self, topic: str) -> None:
        self.oracle.lose(self.oracle.of(topic, self._lives[topic]))
        self._close_writer(topic)
        deleted = topics.delete_topic(self._folder, topic)
        with closing(GroupsFile(self._folder)) as file:
            file.forget_topic(topic, deleted)
        self._make(topic, self._partitions[topic])
        for _ in range(self.rng.randrange(4)):
            self.write(topic)

    def _grow(self, topic: str) -> None:
        """Writers use a new partition at once."""
        number = self._partitions[topic]
        if number == _MOST_PARTITIONS:
            return
        topics.add_partitions(self._folder, topic, number + 1)
        self._partitions[topic] += 1
        for _ in range(self.rng.randrange(3)):
            self._append(topic, number)

    def _lose_rows(self) -> None:
        """Of groups whose names are in the topics' own files: nobody else knows that they had begun."""
        begun = {(group, topic) for topic in sorted(self._partitions) for group in self._registered(topic)}
        with closing(connect(self._folder.groups.db)) as connection:
            rows = connection.execute("SELECT grp, topic, partition FROM offsets ORDER BY 1, 2, 3").fetchall()
            lost = [row for row in rows if row[:2] in begun and self.rng.random() < 0.5]
            connection.executemany("DELETE FROM offsets WHERE grp=? AND topic=? AND partition=?", lost)
        self.trace(f"groups.db loses {lost}")
        self.oracle.displaced |= {str(row[0]) for row in lost}
        if lost:
            self.trace(f"operator: penstock log repair: {repair.repair(self._folder.root).groups.problems}")

    def calm(self) -> None:
        """As there."""
        self.is_calm = True

    def close(self) -> None:
        """As there."""
        for one in list(self.open):
            self.abandon(one)
        for topic in list(self._writers):
            self._close_writer(topic)
        shutil.rmtree(self._folder.root)

    def abandon(self, broker: LogBroker) -> None:
        """The process that had this open has ended: its files are closed, its locks are free, and nothing else happens."""
        if broker not in self.open:
            return
        self.open.remove(broker)
        shared, file = broker._shared, broker._offsets._file
        if shared is not None and shared.leases._alive._held >= 0:
            shared.leases.close()
        if shared is not None and shared.wakeup._fd >= 0:
            shared.wakeup.close()
        if file is not None and file.marks._fd >= 0:
            file.close()
        broker._readers._close()


@asynccontextmanager
async def _open(world: LogWorld, root: Path) -> AsyncIterator[Broker]:
    process = current_process()
    assert process is not None
    async with LogBroker.open(str(root), timing=_TIMING, retention_seconds=_NO_RETENTION_S) as made:
        world.open.append(made)
        process.on_death.append(lambda: world.abandon(made))
        yield made
    world.open.remove(made)  # only now: it may be killed while it closes them


class _Thread:
    """As ThreadPoolExecutor with one thread: what it is given runs in the process's own steps, in order, a moment later."""

    def __init__(self, *_: object, **__: object) -> None:
        self._free_at = 0.0

    def submit(self, work: Callable[..., object], *args: Any) -> None:
        """As there, without a future: `Gatherer` asks for none."""
        process = current_process()
        assert process is not None
        loop = asyncio.get_running_loop()
        delay = process.found["log"].rng.choice((0.0, 0.001, 0.005))
        self._free_at = max(self._free_at, loop.time()) + delay
        loop.call_at(self._free_at, work, *args)

    def run(self, call: Callable[..., Any], *args: Any) -> "asyncio.Future[Any]":
        """What `run_in_executor` gives."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def work() -> None:
            try:
                result = call(*args)
            except Exception as error:  # as an executor does: it is the caller's, who awaits the future
                if not future.done():
                    future.set_exception(error)
            else:
                if not future.done():
                    future.set_result(result)

        self.submit(work)
        return future

    def shutdown(self, *, wait: bool) -> None:
        """There is no thread."""


def _refuse_to_sleep(_seconds: object) -> None:
    raise RuntimeError("something waits for a lock that another process holds between two of its steps: for ever")


def replace_threads() -> None:
    """Once, before the first history; and let members look for news ten times less often, which a history need not pay for."""
    time.sleep = _refuse_to_sleep
    for module in (appender, broker, groups, topic_reader):
        assert hasattr(module, "ThreadPoolExecutor")
        module.ThreadPoolExecutor = _Thread  # type: ignore[attr-defined]
    consumer._IDLE_SECONDS = (0.02, 0.25)
    membership._CHECK_SECONDS = 0.25
    os.RWF_NOWAIT = 0  # type: ignore[misc]  # not every disk in memory has it, and none makes anybody wait
