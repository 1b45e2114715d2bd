"""Looks at the broker: whether it answers, its topics, the position and lag of each group, open dead letters, stored times."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from services.core.audit import Entry, decode_entry, digest_of
from services.core.broker.connect import BadBrokerUrl
from services.core.broker.contract import Broker
from services.core.broker.errors import BrokerError, DataDamaged, UnknownTopic
from services.core.broker.reading import read_tail
from services.core.broker.record import TopicPartition
from services.core.broker.several.brokers import DEFAULT
from services.core.control.pauses import list_paused
from services.core.control.transform_marks import TransformMarks
from services.core.event import read_arrival
from services.core.fleet_broker import open_fleet_broker
from services.core.pipe_file.existing_topics import existing_topics, target_homes
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import (
    AUDIT,
    RETRIER_DEAD,
    RETRIER_GROUP,
    RETRIER_TOPICS,
    dead_letter_topic,
    delivery_group,
    delivery_topics,
    lane_name,
    output_topic,
    renames_of,
    retry_topic,
)
from services.core.provision import find_missing, wanted_topics
from services.core.undelivered.dead_letter import DeadLetter, Position
from services.fleet.dead.audit import AuditedActions
from services.fleet.doctor.collectors.bounds import bounded, describe, in_thread
from services.fleet.doctor.facts import Facts, Letters

OPEN_S = 8.0
READ_S = 8.0
WINDOW_S = 5.0
NEW_LETTERS_S = 900.0
"""Dead letters written within this time count as new."""
MOST_LETTERS = 500
MOST_ACTS = 5000
"""A redrive of a letter is younger than the letter, so the audit is read for the same time."""
NEWEST_RECORDS = 20

MOST_GONE = 5
"""Files that are named."""
AT_ONCE = 8
"""Groups that are read at once."""

GroupTopic = tuple[str, str]


async def collect_broker(facts: Facts) -> None:
    """All of it. Writes nothing. A broker that does not answer is a fact, not a failure of the collector."""
    found = facts.broker
    kind, _, path = found.url.partition("://")
    found.is_log = kind == "log"
    if found.is_log and (problem := await in_thread(lambda: _log_problem(Path(path), facts.pipes))) is not None:
        found.problem = problem  # opening would create the folder
        return
    try:
        async with _opened(facts) as broker:
            if broker is None:
                return
            await _collect_all(facts, broker)
    except (BrokerError, TimeoutError, OSError) as error:
        found.problem = found.problem or describe(error)


def _log_problem(root: Path, pipes: PipeFile | None) -> str | None:
    """The reason why the folder of the embedded log cannot be read; None when it can. Blocking.

    A command that deletes a topic removes the topic's file and its high-water marks. Then the topic is missing, and the folder is
    in order. If the marks are left, or if no topic has a file, files were lost.
    """
    topics = root / "topics"
    if not topics.is_dir():
        return f"the folder of the embedded log is not there: {topics}"
    try:
        names = {path.name for path in topics.iterdir()}
    except OSError as error:
        return f"the folder of the embedded log cannot be read: {topics}: {error.strerror}"
    elsewhere = (
        {name for name, stream in pipes.streams.items() if stream.home != DEFAULT} if pipes is not None else set()
    )
    wanted = [spec.name for spec in wanted_topics(pipes) if spec.name not in elsewhere] if pipes is not None else []
    is_empty = not any(name.endswith(".db") for name in names)
    gone = [
        f"{topics / name}.db" for name in wanted if f"{name}.db" not in names and (is_empty or f"{name}.hwm" in names)
    ]
    more = f" and {len(gone) - MOST_GONE} more" if len(gone) > MOST_GONE else ""
    return f"files of the embedded log are gone: {', '.join(gone[:MOST_GONE])}{more}" if gone else None


@asynccontextmanager
async def _opened(facts: Facts) -> AsyncIterator[Broker | None]:
    """The broker, without those of its topics that are missing; None when it cannot be used, with the reason in the facts."""
    found = facts.broker
    async with AsyncExitStack() as stack:
        try:
            opening = open_fleet_broker(found.url, facts.pipes)
            async with asyncio.timeout(OPEN_S):
                broker = await opening.__aenter__()
            stack.push_async_callback(_close, opening)
            await _find_missing(facts, broker)
        except BadBrokerUrl as error:
            found.problem, found.hint = str(error), "--broker with the fleet's broker"
            yield None
        except TimeoutError:
            found.problem = f"it does not answer within {OPEN_S:g} s"
            yield None
        except (BrokerError, OSError) as error:
            found.problem = describe(error)
            yield None
        else:
            yield broker


async def _close(opening: AbstractAsyncContextManager[Broker]) -> None:
    with suppress(BrokerError, TimeoutError, OSError):  # the facts are there
        async with asyncio.timeout(OPEN_S):
            await opening.__aexit__(None, None, None)


async def _find_missing(facts: Facts, broker: Broker) -> None:
    """The topics of the pipe file that are missing, where they live, and the brokers beside the fleet's own that cannot be used.
    Raises BrokerError kinds of the fleet's own."""
    found, pipes = facts.broker, facts.pipes
    async with asyncio.timeout(OPEN_S):
        if pipes is None:
            await broker.admin.topics()
            return
        homes = dict.fromkeys((spec.name for spec in wanted_topics(pipes)), DEFAULT)
        homes |= {name: stream.home for name, stream in pipes.streams.items()} | target_homes(pipes)
        own = {name: home for name, home in homes.items() if home == DEFAULT}
        missing, _ = await find_missing(broker.admin, own, {DEFAULT})
    others, silent = await find_missing(
        broker.admin, {name: home for name, home in homes.items() if home != DEFAULT}, ()
    )
    found.silent = {home: describe(error) for home, error in silent.items()}
    titles = existing_topics(pipes).names
    missing += [f"{titles.get(name, name)} on broker {homes[name]}" for name in others]
    found.missing = tuple(sorted(titles.get(name, name) for name in missing))


async def _collect_all(facts: Facts, broker: Broker) -> None:
    pipes = facts.pipes
    if pipes is None:
        return
    streams = {name: stream for name, stream in pipes.streams.items() if stream.home not in facts.broker.silent}
    unread = pipes.streams.keys() - streams.keys()
    groups = [(group, topic) for group, topic in groups_of(pipes) if topic not in unread]
    collectors: dict[str, Coroutine[Any, Any, None]] = {
        "the pauses": _read_pauses(facts, broker, pipes),
        "the transforms that have begun": _read_marks(facts, broker, pipes),
        "the groups": _read_groups(facts, broker, groups),
        "new dead letters": _read_letters(facts, broker, pipes),
        "the newest events": _read_newest(facts, broker, [*streams, *_outputs(pipes)]),
    }
    await asyncio.gather(*(bounded(facts, name, READ_S, work) for name, work in collectors.items()))
    if not facts.broker.lags:
        return
    await asyncio.sleep(WINDOW_S)
    await bounded(facts, "the groups, a second time", READ_S, _read_groups(facts, broker, groups, later=True))


def groups_of(pipes: PipeFile) -> list[GroupTopic]:
    """Each group with each topic that it must empty: those of the destinations, and the retrier's."""
    found = [
        (delivery_group(name, destination.name), topic)
        for name, pipe in pipes.pipes.items()
        for destination in pipe.destinations
        for topic in (
            *delivery_topics(name, pipe),
            *([retry_topic(name)] if destination.webhook is not None else []),
        )
    ]
    return [*found, *((RETRIER_GROUP, topic) for topic in RETRIER_TOPICS)]


async def _read_pauses(facts: Facts, broker: Broker, pipes: PipeFile) -> None:
    facts.broker.pauses = await list_paused(broker.reader, renames_of(pipes))


async def _read_marks(facts: Facts, broker: Broker, pipes: PipeFile) -> None:
    marks = TransformMarks(broker.reader)
    with suppress(UnknownTopic):
        await marks.refresh()
    found = {name: marks.of(name) for name, pipe in pipes.pipes.items() if pipe.transform is not None}
    facts.broker.marks = {name: mark for name, mark in found.items() if mark is not None}


async def _read_groups(facts: Facts, broker: Broker, groups: list[GroupTopic], *, later: bool = False) -> None:
    """Several at once: one after the other they take longer than READ_S where a lag costs a second, as on Kinesis."""
    found, free = facts.broker, asyncio.Semaphore(AT_ONCE)
    lags, positions = (found.later, found.positions_later) if later else (found.lags, found.positions)

    async def read(group: str, topic: str) -> None:
        async with free:
            with suppress(UnknownTopic):  # it is among the missing ones, or the pipe has no retrier
                lags[group, topic] = await broker.admin.group_lag(group, topic)
                positions[group, topic] = await broker.admin.positions(group, topic)
                if not later and broker.is_contiguous(topic):
                    await _find_gaps(facts, broker, group, topic)

    await asyncio.gather(*(read(group, topic) for group, topic in groups))


async def _find_gaps(facts: Facts, broker: Broker, group: str, topic: str) -> None:
    """Partitions whose next record of the group is no longer stored."""
    stored = await broker.reader.describe(topic)
    for partition, position in facts.broker.positions[group, topic].items():
        if partition in stored and position < stored[partition].start:
            facts.broker.gaps[group, TopicPartition(topic, partition)] = position, stored[partition].start


async def _read_letters(facts: Facts, broker: Broker, pipes: PipeFile) -> None:
    """Those that nobody has redriven or discarded. A lane of a former name counts for the present one."""
    since, renames = int((time.time() - NEW_LETTERS_S) * 1000), renames_of(pipes)
    acts = AuditedActions([entry async for entry in _read_audit(broker, since)])
    count: Counter[tuple[str, str, str, str, str]] = Counter()
    examples: dict[tuple[str, str, str, str, str], DeadLetter] = {}
    newest: dict[tuple[str, str, str, str, str], float] = {}
    names = {*pipes.pipes, *(lane.partition("/")[0] for lane in renames)}
    for topic in (*map(dead_letter_topic, sorted(names)), RETRIER_DEAD):
        async for batch in read_tail(broker, topic, since, MOST_LETTERS, skips_damage=True):
            for offset, record in zip(batch.offsets, batch.records, strict=True):
                letter = DeadLetter.of(Position(topic, batch.partition, offset), record)
                if acts.fate(letter.position, digest_of(record)):
                    continue
                lane = lane_name(letter.pipe, letter.destination)
                pipe, _, destination = renames.get(lane, lane).partition("/")
                key = (topic, pipe, destination, letter.node, letter.reason)
                count[key] += 1
                examples[key] = letter
                newest[key] = max(newest.get(key, 0.0), record.timestamp / 1000)
    facts.broker.letters = tuple(
        Letters(*key, examples[key].detail, number, str(examples[key].position), newest[key])
        for key, number in count.most_common()
    )


async def _read_audit(broker: Broker, since: int) -> AsyncIterator[Entry]:
    async for batch in read_tail(broker, AUDIT, since, MOST_ACTS, skips_damage=True):
        for record in batch.records:
            with suppress(ValueError):  # no entry: `penstock dead audit` says so
                yield decode_entry(record.value)


def _outputs(pipes: PipeFile) -> list[str]:
    return [output_topic(name) for name, pipe in pipes.pipes.items() if pipe.transform is not None]


async def _read_newest(facts: Facts, broker: Broker, topics: Sequence[str]) -> None:
    """The newest arrival time in each stream and output, and whether the newest records can be read. Kinesis has no cheap
    end."""
    damage: list[str] = []
    for topic in filter(broker.is_contiguous, topics):
        try:
            ranges = await broker.reader.describe(topic)
        except UnknownTopic:
            continue
        facts.broker.ends[topic] = sum(stored.end for stored in ranges.values())
        for partition, stored in ranges.items():
            start = max(stored.start, stored.end - NEWEST_RECORDS)
            if start >= stored.end:
                continue
            try:
                batch = await broker.reader.read(topic, partition, start, max_records=NEWEST_RECORDS)
            except DataDamaged as error:
                damage.append(str(error))
                continue
            arrivals = [arrival for record in (batch.records if batch else ()) if (arrival := read_arrival(record))]
            if arrivals:
                facts.broker.newest[topic] = max(facts.broker.newest.get(topic, 0), *arrivals)
    facts.broker.newest_at = time.time()
    facts.broker.damage = tuple(damage)
