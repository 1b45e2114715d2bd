"""Shows and moves the offsets of a destination: back, so that events are delivered again, or forward over events.

A destination reads its streams, or the output of its transform, through a group of its own. Only a group without members moves.
The events that a skip passes over are reported to the ledger, then written to the audit, then passed: after a crash in
between, the same command does all of it again. The topics of waiting events (`Lane.waiting`) are moved only where they are
named; what a skip passes there becomes dead letters (`Burial`).
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Literal

from services.core.audit import RESET, SKIP, MovedGroup, write_moves
from services.core.broker.contract import Broker, Lag, PartitionRange
from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.producer import Producer
from services.core.broker.reading import READ_RECORDS, read_tail, read_topic
from services.core.broker.record import TopicPartition
from services.core.control.pauses import Pause
from services.core.ledger.report import TELEMETRY, pack_offset
from services.core.ledger.reporter import Reporter, new_instance
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import RETRY_IN, removed_lanes
from services.core.takeover_dedup import TAIL_EVENTS, WITHIN_S
from services.core.undelivered.retry_state import state_for
from services.core.undelivered.waiting import find_takeover, read_bookmark
from services.fleet.positions.buried import Burial, events_of
from services.fleet.positions.lanes import Lane
from services.fleet.problem import CommandFailed
from services.fleet.status.paused import pause_json

_REPORT_EVENTS = 100_000
"""Events between two reports of a skip."""


@dataclass(frozen=True, slots=True)
class PartitionOffsets:
    """One partition as a group sees it. stored: its stored offsets. next: the group's next offset; None: it has none."""

    source: TopicPartition
    stored: PartitionRange
    next: int | None
    lag: Lag

    def as_json(self) -> dict[str, Any]:
        """Offsets that do not fit into 64 bits are texts."""
        return {
            "topic": self.source.topic,
            "partition": self.source.partition,
            "start": pack_offset(self.stored.start),
            "next": None if self.next is None else pack_offset(self.next),
            "end": pack_offset(self.stored.end),
            "lag_records": self.lag.records,
            "lag_ms": self.lag.millis,
        }


@dataclass(frozen=True, slots=True)
class LaneOffsets:
    """members: the broker's names for the living members. pause: while the destination is paused.

    waiting: of the topics of waiting events. A pipe's destinations share them, so their lag counts events of others, too.
    """

    lane: Lane
    members: Sequence[str]
    pause: Pause | None
    partitions: Sequence[PartitionOffsets]
    waiting: Sequence[PartitionOffsets] = ()

    @property
    def lag(self) -> Lag:
        """The events behind, and the age of the oldest of them."""
        lags = [one.lag for one in self.partitions]
        return Lag(sum(lag.records for lag in lags), max((lag.millis for lag in lags), default=0))

    def as_json(self) -> dict[str, Any]:
        """For `group show --json`."""
        return {
            "pipe": self.lane.pipe,
            "destination": self.lane.destination,
            "group": self.lane.group,
            "members": list(self.members),
            "paused": None if self.pause is None else pause_json(self.pause),
            "lag_records": self.lag.records,
            "lag_ms": self.lag.millis,
            "partitions": [one.as_json() for one in self.partitions],
            "waiting": [one.as_json() for one in self.waiting],
        }


async def read_offsets(broker: Broker, lane: Lane, topics: Collection[str]) -> list[PartitionOffsets]:
    """The offsets of the group in every partition of these topics. Raises BrokerError kinds."""
    found = []
    for topic in topics:
        stored = await broker.reader.describe(topic)
        nexts = await broker.admin.positions(lane.group, topic)
        lags = await broker.admin.group_lag(lane.group, topic)
        found += [
            PartitionOffsets(TopicPartition(topic, number), one, nexts.get(number), lags.get(number, Lag(0, 0)))
            for number, one in sorted(stored.items())
        ]
    return found


async def read_lanes(broker: Broker, lanes: Sequence[Lane], paused: Mapping[str, Pause]) -> list[LaneOffsets]:
    """The offsets and members of these destinations. Raises BrokerError kinds."""
    return [
        LaneOffsets(
            lane,
            await broker.admin.members(lane.group),
            paused.get(lane.name),
            await read_offsets(broker, lane, lane.topics or lane.waiting),
            await _read_waiting(broker, lane) if lane.topics else (),
        )
        for lane in lanes
    ]


async def _read_waiting(broker: Broker, lane: Lane) -> list[PartitionOffsets]:
    """Of the topics of waiting events that exist."""
    found = []
    for topic in lane.waiting:
        with suppress(UnknownTopic):
            found += await read_offsets(broker, lane, [topic])
    return found


Target = Literal["earliest", "end"] | datetime | Mapping[TopicPartition, int]
"""Where a group is moved to: the oldest event, behind the newest one, the first event that is not older than a time, or
the next offset of some partitions."""


@dataclass(frozen=True, slots=True)
class Move:
    """Of one partition. to: the next offset afterwards. passed: the stored offsets between both. count: the events there.

    gone: how many events before `passed` the broker no longer has.
    """

    now: PartitionOffsets
    to: int
    passed: PartitionRange
    count: int = 0
    gone: int = 0

    def as_json(self) -> dict[str, Any]:
        """For `--json`; from: null when the group had no offset."""
        return {
            "topic": self.now.source.topic,
            "partition": self.now.source.partition,
            "from": None if self.now.next is None else pack_offset(self.now.next),
            "to": pack_offset(self.to),
            "events": self.count,
        }


async def plan_moves(broker: Broker, lane: Lane, target: Target, action: str) -> list[Move]:
    """The moves of a RESET or SKIP; of partitions that are there already, or on the other side, none.

    Raises CommandFailed for an offset that the partition does not hold or that is on the other side, and BrokerError kinds.
    """
    is_named = not isinstance(target, str | datetime)
    if not is_named and not lane.topics:
        example = f"--to-offset {lane.waiting[0]}:0:4712"
        raise CommandFailed(f"{lane.name} has only waiting events, which are moved by offset", example, status=2)
    named = () if isinstance(target, str | datetime) else dict.fromkeys(source.topic for source in target)
    offsets = await read_offsets(broker, lane, list(named or lane.topics))
    wanted = await _resolve(broker, lane, target, offsets)
    moves = []
    for now in offsets:
        if now.source not in wanted:
            continue
        move = _plan_move(
            now, wanted[now.source], action, is_named=is_named, contiguous=broker.is_contiguous(now.source.topic)
        )
        if move is not None:
            moves.append(move)
    if action == RESET and not moves and all(now.next is None for now in offsets):
        raise CommandFailed(
            f"{lane.name} has not begun to read, so it cannot go back",
            "start the fleet, which begins as the destination's `start` says; or penstock group skip, to begin later",
        )
    return [await count_events(broker, move, lane) for move in moves]


async def _resolve(
    broker: Broker, lane: Lane, target: Target, offsets: Sequence[PartitionOffsets]
) -> dict[TopicPartition, int]:
    stored = {one.source: one.stored for one in offsets}
    if isinstance(target, datetime):
        found = {topic: await broker.reader.offsets_at(topic, target) for topic in lane.topics}
        wanted = {TopicPartition(topic, number): to for topic, each in found.items() for number, to in each.items()}
    elif isinstance(target, str):
        wanted = {source: one.start if target == "earliest" else one.end for source, one in stored.items()}
    else:
        wanted = dict(target)
    for source in wanted:
        if source not in stored:
            numbers = ", ".join(str(number) for topic, number in stored if topic == source.topic)
            raise CommandFailed(f"{source.topic} has no partition {source.partition}", f"one of: {numbers}", status=2)
    return {  # an empty shard has no offset
        source: to
        for source, to in wanted.items()
        if stored[source].end > stored[source].start or broker.is_contiguous(source.topic)
    }


def _plan_move(now: PartitionOffsets, to: int, action: str, *, is_named: bool, contiguous: bool) -> Move | None:
    stored, (topic, number) = now.stored, now.source
    if not stored.start <= to <= stored.end:
        raise CommandFailed(
            f"{topic}:{number} holds the offsets {stored.start} to {stored.end}, not {to}",
            "penstock group show",
            status=2,
        )
    if to == now.next:
        return None
    at = stored.start if now.next is None else now.next
    if action == RESET:
        again = stored.end if now.next is None else min(at, stored.end)
        move, is_other = Move(now, to, PartitionRange(to, max(to, again))), to > max(at, stored.start)
        other = f"--to-offset {to} would skip events of {topic}:{number}, which is at {at}", "penstock group skip"
    else:
        gone = max(0, min(stored.start, to) - at) if contiguous else 0
        move, is_other = Move(now, to, PartitionRange(max(at, stored.start), to), gone=gone), to < at
        other = (
            f"--to-offset {to} would deliver events of {topic}:{number} again, which is at {at}",
            "penstock group reset",
        )
    if not is_other:
        is_idle = action == SKIP and now.next is None and to == at and not is_named
        return None if is_idle else move
    if is_named:
        raise CommandFailed(*other, status=2)
    return None


async def count_events(broker: Broker, move: Move, lane: Lane | None = None) -> Move:
    """The move with its number of events. They are read where offsets do not count them. Raises BrokerError kinds.

    lane: whose group moves; in a topic of waiting events only those count that it would process."""
    passed, (topic, number) = move.passed, move.now.source
    count = max(0, passed.end - passed.start)
    if lane is not None and topic in lane.waiting:
        batches = read_topic(broker.reader, topic, number, passed, page=READ_RECORDS, skips_damage=True)
        count = sum([len(list(events_of(batch, lane))) async for batch in batches])
    elif not broker.is_contiguous(topic):
        batches = read_topic(broker.reader, topic, number, passed, page=READ_RECORDS, skips_damage=True)
        count = sum([len(batch.records) async for batch in batches])
    return replace(move, count=count)


async def require_no_members(broker: Broker, lane: Lane, note: str = "") -> None:
    """Raise CommandFailed while any process reads for the destination. note: the end of its text."""
    if members := await broker.admin.members(lane.group):
        names = ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")
        raise CommandFailed(
            f"{lane.name} runs: its group {lane.group} has living members: {names}{note}", lane.stopped_by
        )


async def require_own_position(broker: Broker, pipes: PipeFile, lane: Lane) -> None:
    """Raise CommandFailed while the destination is to get the position of a former name: that would undo a move, and a skip
    would count events that the former name has delivered."""
    former = [old for old, choice in removed_lanes(pipes).items() if choice.deliver_to == lane.name]
    if not former:
        return
    left = (await read_bookmark(broker.reader)).left
    found = await find_takeover(broker.admin, former, lane.name, lane.topics, left)
    if found is not None and found[1]:
        raise CommandFailed(
            f"{lane.name} gets the position of {found[0]} first, and has not got it yet",
            "penstock apply, then the same command",
        )


async def skip_events(
    broker: Broker,
    producer: Producer,
    lane: Lane,
    moves: Sequence[Move],
    who: str,
    because: str,
    show: Callable[[int], None] = lambda _events: None,
) -> list[Move]:
    """Report the events as skipped, write the audit, then move the group. After a failure, repeat it.

    Returns the moves with the number of events that could be read and are reported. Waiting events become dead letters.
    because: the operator's reason. show: called with the sum so far.
    Raises CommandFailed when the group has members, and BrokerError kinds.
    """
    await _require_unmoved(broker, lane, moves)
    reporter = Reporter(producer, f"skip-{new_instance()}", "expel", lane.pipe, lane.destination)
    burial = Burial(broker, producer, lane, because)
    done: list[Move] = []
    events = unreported = 0
    for move in moves:
        before, (topic, number) = events, move.now.source
        async for batch in read_topic(broker.reader, topic, number, move.passed, page=READ_RECORDS, skips_damage=True):
            if topic in lane.waiting:
                events += await burial.bury(batch)
            else:
                reporter.settled.add("skipped", batch.records)
                events += len(batch.records)
                unreported += len(batch.records)
            if unreported >= _REPORT_EVENTS:
                await reporter.report()
                unreported = 0
            show(events)
        done.append(replace(move, count=events - before))
    if any(one.now.source.topic in lane.topics for one in moves):
        await reporter.report(closed=True)
    await burial.close()
    await _move(broker, producer, lane, done, SKIP, who, {"destination": lane.name, "because": because})
    return done


async def reset_offsets(broker: Broker, producer: Producer, lane: Lane, moves: Sequence[Move], who: str) -> None:
    """Write the audit, then move the group. Raises as `skip_events`."""
    await _move(broker, producer, lane, moves, RESET, who, {"destination": lane.name})


async def _move(
    broker: Broker,
    producer: Producer,
    lane: Lane,
    moves: Sequence[Move],
    action: str,
    who: str,
    filters: Mapping[str, str],
) -> None:
    note = "; its events count as skipped until they are delivered" if action == SKIP else ""
    await _require_unmoved(broker, lane, moves, note)
    await write_moves(producer, action, who, filters, audited(moves))
    for topic in dict.fromkeys(one.now.source.topic for one in moves):
        processed = {one.now.source.partition: one.to - 1 for one in moves if one.now.source.topic == topic}
        try:
            await broker.admin.set_committed(lane.group, topic, processed)
        except Unavailable as error:
            raise CommandFailed(f"{lane.name} was not moved in {topic}: {error}{note}", lane.stopped_by) from error


async def _require_unmoved(broker: Broker, lane: Lane, moves: Sequence[Move], note: str = "") -> None:
    """Raise CommandFailed when the group has members, or is not where the moves begin. note: the end of its text."""
    await require_no_members(broker, lane, note)
    topics = {one.now.source.topic for one in moves}
    now = {one.source: one.next for one in await read_offsets(broker, lane, topics)}
    if any(now.get(one.now.source) != one.now.next for one in moves):
        raise CommandFailed(
            f"{lane.name} was moved by another process meanwhile, and is not moved now{note}", "the same command"
        )


def audited(moves: Sequence[Move]) -> list[MovedGroup]:
    """The moves as the audit has them."""
    return [
        MovedGroup(*one.now.source, one.now.next, one.to, one.count, one.passed.start, one.passed.end - 1)
        if one.count
        else MovedGroup(*one.now.source, one.now.next, one.to, 0)
        for one in moves
    ]


async def require_ledger(producer: Producer) -> None:
    """Raise CommandFailed when skipped events could not be reported."""
    try:
        await producer.partition_count(TELEMETRY)
    except UnknownTopic as error:
        raise CommandFailed(f"there is no topic {TELEMETRY}", "penstock apply, which creates it") from error


async def retry_wait_s(broker: Broker, lane: Lane, moves: Sequence[Move]) -> float:
    """How long a reset must wait so that each event is delivered again, in seconds.

    Expel takes an event of its stream for written to the retry topic when it finds it among that topic's newest records.
    """
    if not lane.retries:
        return 0.0
    newest, now = 0, time.time()
    ranges = {one.now.source: one.passed for one in moves}
    async for batch in read_tail(broker, RETRY_IN, int((now - WITHIN_S) * 1000), TAIL_EVENTS):
        for record in batch.records:
            state = state_for(record, lane.pipe, lane.destination)
            if state is None or state.rounds != 1:
                continue
            source, offset = state.position()
            if source in ranges and ranges[source].start <= offset < ranges[source].end:
                newest = max(newest, record.timestamp)
    return max(0.0, newest / 1000 + WITHIN_S + 1 - now) if newest else 0.0
