"""Random histories of a query over shards, with the protocol of Spark and without Spark: shards split, merge and expire, requests
fail, and the driver and its tasks die between any two steps.
"""

import asyncio
import json
import pickle
import random
from collections import Counter
from collections.abc import Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.core.broker.errors import BrokerError, OffsetOutOfRange, Unavailable, UnknownTopic
from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.pace import ReadPace
from services.core.broker.kinesis.shard_lookup import KnownEnds
from services.core.broker.kinesis.streams import Shard
from services.core.broker.record import Batch, Record
from spark.sources import ends
from spark.sources.ends import KEPT, FolderNotes, Place, open_notes, plan_of
from spark.sources.kinesis import KinesisStreamReader, read_task

HOUR = 3_600_000
DAY = 24 * HOUR
BIG = 1 << 190
FAILS = 0.06
ShardPlace = tuple[int, int]
"""A shard and an offset in it."""


class Crash(Exception):
    """The process ends here."""


class Shards:
    """The stream: every record with the time of its arrival. Stands for `BlockingKinesis`, its broker and its reader, too."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.now = 1_700_000_000_000
        self.shards = {0: Shard(0, (), 0, 1, is_open=True), 1: Shard(1, (), 0, 1, is_open=True)}
        self.closed_at: dict[int, int] = {}
        self.records: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
        self._next = BIG
        self.faults = True
        self.loop = asyncio.new_event_loop()
        self.broker = SimpleNamespace(reader=self)
        self.ends = KnownEnds(lambda: self.now)

    def put(self) -> None:
        number = self.chance.choice([shard.number for shard in self.shards.values() if shard.is_open])
        for _ in range(self.chance.randint(1, 6)):
            self._next += self.chance.randint(1, 5)
            self.records[number].append((self._next, self.now))

    def reshard(self) -> None:
        """Split a shard or merge two."""
        every = [shard.number for shard in self.shards.values() if shard.is_open]
        parents = self.chance.sample(every, 2) if len(every) > 2 else [self.chance.choice(every)]
        for number in parents:
            self.shards[number] = self.shards[number]._replace(is_open=False)
            self.closed_at[number] = self.now
        for _ in range(3 - len(parents)):
            number = max(self.shards) + 1
            self.shards[number] = Shard(number, tuple(parents), 0, 1, is_open=True)
            self.records[number] = []

    def kept(self, shard: int) -> list[int]:
        return [offset for offset, arrived in self.records[shard] if arrived + DAY > self.now]

    def expired(self, read: Counter[ShardPlace]) -> bool:
        """Whether retention took a record that was not read."""
        return any(
            arrived + DAY <= self.now and (shard, offset) not in read
            for shard, every in self.records.items()
            for offset, arrived in every
        )

    def listed(self) -> list[Shard]:
        return [one for one in self.shards.values() if self.closed_at.get(one.number, self.now) + DAY > self.now]

    def stream(self, _topic: str) -> Stream:
        self._fail()
        return Stream("account:s:1", tuple(self.listed()), DAY)

    def pace(self, topic: str, shard: int) -> ReadPace:
        return ReadPace(topic, shard)

    def wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def _fail(self) -> None:
        if self.faults and self.chance.random() < FAILS:
            raise Unavailable("throttled for too long")

    async def read_shard(self, topic: str, which: Shard, offset: int, *, max_records: int) -> Batch | None:
        self._fail()
        if which.number not in {one.number for one in self.listed()}:
            raise UnknownTopic(f"no shard {which.number}")
        kept = self.kept(which.number)
        if offset and offset - 1 not in kept and kept and not kept[0] <= offset <= kept[-1] + 1:
            raise OffsetOutOfRange(topic, which.number, offset, kept[0], kept[-1] + 1, contiguous=False)
        found = [one for one in kept if one >= offset][: min(max_records, self.chance.randint(1, 9))]
        if not found:
            return None
        arrived = dict(self.records[which.number])[found[-1]]
        return Batch(topic, which.number, found, [Record(b"k", b"v", arrived)] * len(found))

    def read(self, topic: str, number: int, offset: int) -> Batch | None:
        found: Batch | None = self.wait(self.read_shard(topic, self.shards[number], offset, max_records=100))
        return found

    read_range = BlockingKinesis.read_range


class Query:
    """Spark's part: a log of offsets, commits, tasks with several attempts. It remembers what each batch handed out."""

    def __init__(self, stream: Shards, checkpoint: Path) -> None:
        self.stream, self.chance = stream, stream.chance
        self.options = {"broker": "kinesis://x", "topics": "s", "checkpoint": f"file://{checkpoint}", "tasks": "3"}
        self.log: list[str] = []
        self.done = -1
        self.handed: dict[int, list[list[ShardPlace]]] = {}
        self.read: Counter[ShardPlace] = Counter()
        self.order: list[ShardPlace] = []
        self.restart()

    def restart(self, *, power_cut: bool = False) -> None:
        """power_cut: what Spark wrote and did not sync is gone: the offset of the batch under way. Notes are synced."""
        if power_cut and len(self.log) - 1 > self.done:
            self.handed.pop(len(self.log) - 1, None)
            self.log.pop()
            self.stream.reshard()  # so the next plan has other tasks
            self.stream.put()
        limit = str(self.chance.choice([1, 7, 40]))
        self.reader = KinesisStreamReader(self.options | {"max_events": limit})

    def unsettled(self) -> int:
        """Since when a shard may hold records that were not read, as far as Spark's log knows."""
        known = json.loads(self.log[-1])["topics"]["s"]
        return min(int(settled) for shard, settled in known["settled"].items() if int(shard) not in known["ended"])

    def step(self) -> bool:
        """One trigger; whether there was a batch. Raises whatever ends a query."""
        start = json.loads(self.log[self.done]) if self.done >= 0 else self.reader.initialOffset()
        if len(self.log) - 1 == self.done:
            end = self.reader.latestOffset(start, self.reader.getDefaultReadLimit())
            if json.dumps(end) == json.dumps(start):
                return False
            self._may_crash()
            self.log.append(json.dumps(end))
        self._may_crash()
        end = json.loads(self.log[-1])
        tasks = [pickle.loads(pickle.dumps(task)) for task in self.reader.partitions(start, end)]
        handed = [self._compute(task) for task in self.chance.sample(tasks, len(tasks))]
        batch = len(self.log) - 1
        handed.sort()
        assert self.handed.setdefault(batch, handed) == handed, "a repeated batch is another one"
        self._may_crash()
        self.done = batch
        for place in (place for task in handed for place in task):
            self.read[place] += 1
            self.order.append(place)
        return True

    def _compute(self, task: Any) -> list[ShardPlace]:
        """The first attempt that ends counts; what others handed out before they died is the beginning of it."""
        died = []
        while True:
            handed = list[ShardPlace]()
            try:
                for place in self._attempt(task):
                    handed.append(place)
                    self._may_crash()
            except Crash:
                died.append(handed)
                if self.chance.random() < 0.3:
                    raise
            else:
                assert all(handed[: len(part)] == part for part in died), "attempts of a task read other records"
                return handed

    def _attempt(self, task: Any) -> Iterator[ShardPlace]:
        for batch in read_task(cast(BlockingKinesis, self.stream), task):
            yield from ((batch.partition, offset) for offset in batch.offsets)

    def _may_crash(self) -> None:
        if self.stream.faults and self.chance.random() < 0.01:
            raise Crash


class HastyNotes(FolderNotes):
    """Dies before or after it stores a note, and lets others store theirs first."""

    query: Query

    def fix(self, name: str, content: bytes) -> bytes:
        chance, faults = self.query.chance, self.query.stream.faults
        self.query._may_crash()
        if faults and chance.random() < 0.1:
            self.query.stream.put()  # so the other attempt finds more
            (task,) = [one for one in self.tasks() if one.note == name]
            with suppress(BrokerError, Crash):
                list(self.query._attempt(task))
        stored = super().fix(name, content)
        self.query._may_crash()
        return stored

    def tasks(self) -> list[Any]:
        log = self.query.log
        start = json.loads(log[-2]) if len(log) > 1 else self.query.reader.initialOffset()
        return list(self.query.reader.partitions(start, json.loads(log[-1])))


def run(seed: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """One history. Gives how it ended: `all` records were read, or some were `lost`, and the query said so."""
    chance = random.Random(seed)
    stream = Shards(chance)
    query = Query(stream, path)
    clock = SimpleNamespace(time_ns=lambda: stream.now * 1_000_000, monotonic=lambda: stream.now / 1000, time=lambda: 0)
    for module in ("shards", "kinesis"):
        monkeypatch.setattr(f"spark.sources.{module}.time", clock)

    def notes(place: Place, folder: str) -> HastyNotes:
        made = HastyNotes(Path(f"{place.checkpoint}/{folder}".removeprefix("file://")))
        made.query = query
        return made

    monkeypatch.setattr("spark.sources.kinesis.open_notes", notes)
    monkeypatch.setattr("spark.sources.kinesis.connection", lambda _url: stream)
    for number in range(220):
        stream.faults = number < 180
        action = chance.random()
        if stream.faults and action < 0.3:
            stream.put()
        elif stream.faults and action < 0.34:
            stream.reshard()
        stream.now += chance.choice([200, 1000, 60_000, HOUR // 2]) if action < 0.97 else chance.choice([9, 20]) * HOUR
        try:
            query.step()
        except OffsetOutOfRange:
            assert stream.expired(query.read) or query.unsettled() < stream.now - DAY, f"seed {seed}: nothing is lost"
            stream.loop.close()
            return "lost"
        except (Crash, BrokerError):
            query.restart(power_cut=chance.random() < 0.2)
    idle = 0
    while idle < 3:
        idle = 0 if query.step() else idle + 1
        stream.now += 1000
    every = Counter((shard, offset) for shard, found in stream.records.items() for offset, _ in found)
    assert query.read == every, f"seed {seed}"
    check_order(stream, query.order)
    newest = plan_of(json.loads(query.log[-1]))
    assert newest is not None
    assert len(open_notes(Place(query.options["checkpoint"]), newest.folder).list()) <= 3 * (KEPT + 1), (
        "notes are removed"
    )
    stream.loop.close()
    return "all"


def check_order(stream: Shards, order: list[ShardPlace]) -> None:
    """Each shard in order, and behind its parents."""
    first, last = dict[int, int](), dict[int, int]()
    newest = dict[int, int]()
    for at, (shard, offset) in enumerate(order):
        assert newest.get(shard, 0) < offset
        newest[shard] = offset
        first.setdefault(shard, at)
        last[shard] = at
    for shard, at in first.items():
        assert all(last.get(parent, -1) < at for parent in stream.shards[shard].parents)


def test_no_history_loses_or_repeats_a_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """If this fails, a crash, a second attempt or a split loses records at some moment, or a repeated batch is another one."""
    monkeypatch.setattr(ends, "sync", lambda _path: None)
    monkeypatch.setattr("os.fsync", lambda _file: None)
    ended = Counter(run(seed, tmp_path / str(seed), monkeypatch) for seed in range(40))
    assert ended["all"] > 20
    assert ended["lost"] > 0, "expired records were not part of any history"
