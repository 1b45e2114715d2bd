"""Kinesis as a source of Spark's streams and batches. Runs in Spark's Python workers.

The process that plans a stream carries positions and counts; tasks read. Each shard is read by one task at a time. Its pace goes
from there to the task with the plan, and back with the notes of `ends`.
"""

import asyncio
import atexit
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows

from services.core.broker.errors import OffsetOutOfRange, UnknownTopic
from services.core.broker.kinesis.blocking import BlockingKinesis
from services.core.broker.kinesis.bucket import Store
from services.core.broker.kinesis.incarnation import Stream
from services.core.broker.kinesis.pace import ReadPace
from services.core.broker.kinesis.streams import Shard
from services.core.broker.record import Batch, TopicPartition
from spark.records import RAW_SCHEMA, OffsetRange, to_arrow
from spark.sources.ends import (
    FOLDER,
    EndNotes,
    Place,
    Plan,
    ShardEnd,
    decode_note,
    encode_note,
    ends_of,
    next_plan,
    old_notes,
    open_notes,
    pack_plan,
    plan_of,
    position_after,
    share_tasks,
)
from spark.sources.offsets import Offset, check_incarnation
from spark.sources.shards import (
    BATCH_BYTES,
    ShardRead,
    ShardRecords,
    Shards,
    ShardStart,
    check_beginning,
    has_more,
    list_shards,
    pack_shards,
    read_shards,
    readable,
    shards_of,
)

POLL_EVERY_S = 0.5
"""The interval of looks at an idle stream: a shard allows five reads a second, for all its readers together."""
TASK_EVENTS = 5_000
"""A task gets at least this number of records, if there are enough."""
_BUSY_RECORDS = 2
"""After a batch with as many the next one is planned without a look: it would take one of the shard's five reads a second."""


@cache
def connection(url: str) -> BlockingKinesis:
    """One per process, for its whole life: opening one takes a second."""
    opened = BlockingKinesis(url)
    atexit.register(opened.close)
    return opened


class ShardTask(InputPartition):
    """Reads these shards from where the batch begins in them. Its note is in `folder` of the place. room, size: of each."""

    def __init__(
        self, place: Place, folder: str, note: str, starts: Sequence[ShardStart], room: int, size: int
    ) -> None:
        super().__init__(note)
        self.place, self.folder, self.note = place, folder, note
        self.starts, self.room, self.size = list(starts), room, size


class RangeTask(InputPartition):
    """Reads ranges whose ends are known."""

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        super().__init__(None)
        self.ranges = list(ranges)


def read_task(kinesis: BlockingKinesis, task: InputPartition | None) -> Iterator[Batch]:
    """The records of a task: the same ones however often and by however many attempts. Raises OffsetOutOfRange, EndsMissing,
    EndsDamaged, BrokerError kinds: then Spark fails the batch.

    An empty read has one task without a value.
    """
    if isinstance(task, RangeTask):
        for part in task.ranges:
            yield from kinesis.read_range(*part)
    elif isinstance(task, ShardTask):
        yield from _read_shards(kinesis, task, open_notes(task.place, task.folder))


def _read_shards(kinesis: BlockingKinesis, task: ShardTask, notes: EndNotes) -> Iterator[Batch]:
    fixed, reader = notes.find(task.note), kinesis.broker.reader
    _continue_paces(reader, task.starts)
    if fixed is None:
        starts = [start._replace(refused=start.refused - _pace(reader, start).refused) for start in task.starts]
        reads = kinesis.wait(read_shards(reader, starts, task.room, task.size))
        mine = encode_note(list(_ends(reader, starts, reads)))
        fixed = notes.fix(task.note, mine)
        if fixed == mine:
            for read in reads:
                yield from read.batches
            return
    for end in decode_note(task.note, fixed):
        if end.records:
            try:
                yield from kinesis.read_range(end.topic, end.shard, int(end.begun), int(end.next))
            except UnknownTopic as error:  # the whole shard expired
                raise OffsetOutOfRange(end.topic, end.shard, int(end.begun), 0, 0, contiguous=False) from error


def _continue_paces(reader: ShardRecords, starts: Sequence[ShardStart]) -> None:
    for start in starts:
        if start.arrived:
            reader.ends.record(TopicPartition(start.topic, start.shard.number), start.position.next, start.arrived)
        _continue_pace(_pace(reader, start), start)


def _pace(reader: ShardRecords, start: ShardStart) -> ReadPace:
    return reader.pace(start.topic, start.shard.number)


def _continue_pace(pace: ReadPace, before: ShardStart | ShardEnd) -> None:
    if before.rate:
        pace.go_on(before.rate, (before.next_read - _now_ms()) / 1000)


def _next_read(pace: ReadPace) -> int:
    return _now_ms() + round(pace.wait() * 1000)


def _ends(reader: ShardRecords, starts: Sequence[ShardStart], reads: Sequence[ShardRead]) -> Iterator[ShardEnd]:
    """starts: `refused` is without what this process was refused before."""
    for start, read in zip(starts, reads, strict=True):
        topic, number, position = start.topic, start.shard.number, read.position
        pace = _pace(reader, start)
        yield ShardEnd(
            topic=topic,
            shard=number,
            next=str(position.next),
            settled=position.settled,
            ended=position.ended,
            retention=position.retention,
            begun=str(position.begun),
            records=read.records,
            more=read.more,
            arrived=reader.ends.arrival(TopicPartition(topic, number), position.next),
            rate=round(pace.rate, 2),
            next_read=_next_read(pace),
            refused=start.refused + pace.refused,
        )


class KinesisStreamReader(DataSourceStreamReader):
    """At most `max_events` a micro-batch. Options `checkpoint`: the query's, a URI; `store`: of it.

    Plans in a Python process of its own beside the query; `read` runs in task workers and uses no state.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self._url = options["broker"]
        self._topics = options["topics"].split(",")
        self._max_events, self._most_tasks = int(options["max_events"]), int(options.get("tasks", "1"))
        self._place = Place(options.get("checkpoint", ""), Store(*json.loads(options.get("store", "[]"))))
        self._folder = f"{FOLDER}/{self._topics[0]}"
        self._polled_at = -POLL_EVERY_S
        self._ends: tuple[Plan | None, dict[tuple[str, int], ShardEnd]] = (None, {})
        self._notes: list[str] | None = None

    def initialOffset(self) -> Offset:  # noqa: N802 - pyspark's name
        """The beginning of every shard."""
        streams = {topic: connection(self._url).stream(topic) for topic in self._topics}
        return pack_shards(
            {topic: (found.name, list_shards(topic, found, {}, _now_ms())) for topic, found in streams.items()}
        )

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - pyspark's name
        return ReadMaxRows(self._max_events)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - pyspark's name
        """Plan the next micro-batch, or return `start` when there is nothing new. Called after the batch of `start` is done.

        Raises OffsetOutOfRange, TopicRecreated: the query stops, nothing is skipped.
        """
        ends = self._ends_before(start)
        busy = any(end.more for end in ends.values()) or sum(end.records for end in ends.values()) >= _BUSY_RECORDS
        if not busy and time.monotonic() - self._polled_at < POLL_EVERY_S:
            return start
        topics, starts = dict[str, tuple[str, Shards]](), list[ShardStart]()
        changed = False
        for topic in self._topics:
            stream = self._stream(topic, start)
            known = position_after(
                shards_of(start, topic)[1], {shard: end for (of, shard), end in ends.items() if of == topic}
            )
            listed = list_shards(topic, stream, known, _now_ms())
            changed |= listed != known
            topics[topic] = stream.name, listed
            starts += self._starts(stream, topic, readable(stream, listed), listed, ends)
        if not (busy or changed):
            self._polled_at = time.monotonic()
            if not self._find_more(starts):
                return start
        expected = [((s.topic, s.shard.number), self._expect(ends.get((s.topic, s.shard.number)))) for s in starts]
        plan = next_plan(
            self._folder, plan_of(start), share_tasks(expected, self._most_tasks, TASK_EVENTS) if expected else []
        )
        self._keep_notes(plan)
        return pack_plan(pack_shards(topics), plan)

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The tasks of a planned batch; of a batch that an earlier version planned, the records between the two offsets."""
        plan = plan_of(end)
        if plan is None:
            return self._ranges(start, end)
        ends = self._ends_before(start)
        count = max(1, sum(len(task) for task in plan.tasks))
        tasks = list[InputPartition]()
        streams = {topic: self._stream(topic, end) for topic in self._topics}
        for number, shards in enumerate(plan.tasks):
            starts = list[ShardStart]()
            for topic in self._topics:
                stream, positions = streams[topic], shards_of(end, topic)[1]
                listed = {shard.number: shard for shard in stream.shards}
                mine = [listed.get(n, Shard(n, (), 0, 0, is_open=False)) for of, n in shards if of == topic]
                starts += self._starts(stream, topic, mine, positions, ends)
            room, size = -(-self._max_events // count), BATCH_BYTES * len(self._topics) // count
            tasks.append(ShardTask(self._place, plan.folder, plan.note(number), starts, room, size))
        return tasks

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Arrow batches of one task."""
        for batch in read_task(connection(self._url), partition):
            yield to_arrow(batch, RAW_SCHEMA)

    def _ends_before(self, offset: Offset) -> dict[tuple[str, int], ShardEnd]:
        """Where the batch of this offset ended, as far as it has run; once it was planned after, all of it has."""
        plan = plan_of(offset)
        if plan is None:
            return {}
        if self._ends[0] != plan:
            reader = connection(self._url).broker.reader
            ends = ends_of(plan, open_notes(self._place, plan.folder))
            for end in ends.values():
                if end.arrived:  # so a look need not read that entry again
                    reader.ends.record(TopicPartition(end.topic, end.shard), int(end.next), end.arrived)
                _continue_pace(reader.pace(end.topic, end.shard), end)
            self._ends = plan, ends
        return self._ends[1]

    def _starts(
        self,
        stream: Stream,
        topic: str,
        shards: Sequence[Shard],
        positions: Shards,
        ends: Mapping[tuple[str, int], ShardEnd],
    ) -> list[ShardStart]:
        found, reader = [], connection(self._url).broker.reader
        for shard in shards:
            start = ShardStart(topic, shard, positions[shard.number], stream.retention_ms)
            if (end := ends.get((topic, shard.number))) is not None:
                start = start._replace(arrived=end.arrived, refused=end.refused)
            pace = _pace(reader, start)
            found.append(start._replace(rate=round(pace.rate, 2), next_read=_next_read(pace)))
        return found

    def _find_more(self, starts: Sequence[ShardStart]) -> bool:
        kinesis = connection(self._url)

        async def ask() -> bool:
            return any(await asyncio.gather(*(has_more(kinesis.broker.reader, start) for start in starts)))

        return kinesis.wait(ask())

    def _expect(self, end: ShardEnd | None) -> int:
        """Records that the next batch may find in a shard."""
        return 1 if end is None else TASK_EVENTS if end.more else end.records

    def _keep_notes(self, plan: Plan) -> None:
        """Make the folder of the notes, and remove those that nobody needs any more."""
        notes = open_notes(self._place, plan.folder)
        if self._notes is None:
            notes.prepare()
            self._notes = notes.list()
        gone = old_notes(self._notes, plan.number)
        notes.remove(gone)
        self._notes = [name for name in self._notes if name not in set(gone)] + plan.notes

    def _ranges(self, start: Offset, end: Offset) -> list[InputPartition]:
        """They are read from their first record on: the record before it may have expired long before they arrived."""
        tasks = list[InputPartition]()
        for topic in self._topics:
            known, stream = shards_of(start, topic)[1], self._stream(topic, start)
            for shard, position in shards_of(end, topic)[1].items():
                if shard in known and known[shard].next < position.next:
                    if not position.begun:  # a checkpoint of 0.1
                        check_beginning(topic, shard, known[shard], stream.retention_ms, _now_ms())
                    part = OffsetRange(topic, shard, position.begun or known[shard].next, position.next)
                    tasks.append(RangeTask([part]))
        return tasks

    def _stream(self, topic: str, offset: Offset) -> Stream:
        stream = connection(self._url).stream(topic)
        check_incarnation(topic, stream.name, shards_of(offset, topic)[0])
        return stream


class KinesisBatchReader(DataSourceReader):
    """Reads the ranges of the option `ranges`, JSON `[[topic, shard, start, end], …]`. A range that is gone raises."""

    def __init__(self, options: Mapping[str, str]) -> None:
        self._url = options["broker"]
        self._ranges = [OffsetRange(*item) for item in json.loads(options["ranges"])]

    def partitions(self) -> list[InputPartition]:
        return [RangeTask([part]) for part in self._ranges]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        for batch in read_task(connection(self._url), partition):
            yield to_arrow(batch, RAW_SCHEMA)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
