"""Creates the topics of a pipe file. Idempotent; no topic is deleted. The numbers of partitions are minimums: a topic may have
more.

A stream that is a topic of others gets nothing here. It has to be there already.

| topic | partitions, at least | retention |
|---|---|---|
| a stream | of its definition | of its definition |
| `<pipe>.out`, with a transform | the most of its sources | the longest of its sources |
| `<pipe>.dead` | 1 | that, plus the longest schedule, plus DEAD_LETTER_RETENTION_S: longer than the event in its source |
| `<pipe>.retry`, with webhooks or a former name | 1 | RETRY_RETENTION_S |
| `<pipe>.parked`, with webhooks or a former name | 1 | for ever |
| retry-in and the delay topics | 1 | the delay, plus RETRY_RETENTION_S for a retrier that is down |
| `penstock.telemetry`, `penstock.observer` | 1 | TELEMETRY_RETENTION_S, twice that |
| `penstock.audit`, `penstock.control` | 1 | for ever |

The retrier's topics exist when any destination has a schedule, or had one. One partition is enough for retries, because they
are paced; it costs money on Kinesis, and files elsewhere. Several retriers share the ten topics.

A pipe with `removed` destinations also gets its `.dead`, `.retry` and `.parked` topics: events may wait there.
"""

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from services.core.audit import write_growth
from services.core.broker.contract import Admin, Broker, TopicSpec
from services.core.broker.errors import AccessRefused, BrokerError, TopicExists, Unavailable, UnsafeTopic
from services.core.broker.producer import Producer
from services.core.broker.several.brokers import DEFAULT
from services.core.control.key_marks import read_key_marks, write_key_marks
from services.core.ledger.report import SNAPSHOTS, TELEMETRY
from services.core.pipe_file.existing_topics import existing_topics, target_homes
from services.core.pipe_file.pipes import Pipe, PipeFile, needs_retrier, own_streams
from services.core.pipe_file.topic_names import (
    AUDIT,
    CONTROL,
    DELAYS_S,
    RETRIER_DEAD,
    RETRY_IN,
    dead_letter_topic,
    delay_topic,
    output_topic,
    parked_topic,
    retry_topic,
)
from services.core.yaml_source import BadConfiguration, Problem

DEAD_LETTER_RETENTION_S = 30 * 86400
RETRY_RETENTION_S = 14 * 86400
TELEMETRY_RETENTION_S = 86400
ANSWER_S = 5.0
"""A broker that only destinations name counts as down when it does not answer for so long."""


class NoSuchTopics(Exception):
    """Topics of others that the pipe file names are not there. Nothing was changed."""

    def __init__(self, topics: Collection[str]) -> None:
        names = ", ".join(sorted(topics))
        super().__init__(
            f"there is no topic {names}. The pipe file names it as a topic of others, which Penstock does not create. "
            "Try: its exact name, as kafka-topics --list shows it; or ask its owner to create it"
        )


class TooFewPartitions(Exception):
    """Topics have fewer partitions than the pipe file asks for. Nothing was changed.

    More partitions map keys to other partitions. The order of a key is then not kept over the change, so a person decides.
    keyless: the topics of which it is known that no event ever had a key.
    """

    def __init__(self, lacking: Collection[tuple[str, int, int]], keyless: Collection[str] = ()) -> None:
        lines = [_describe(topic, has, wanted, topic in keyless) for topic, has, wanted in sorted(lacking)]
        super().__init__("\n".join(lines))


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records facts about topics before `ensure_topics` changes them. who: a user."""

    broker: Broker
    producer: Producer
    who: str

    async def mark_new_streams(self, streams: Collection[str], existing: Collection[str]) -> None:
        """Mark the streams that no event can have reached yet (`key_marks`), in the control topic. Raises BrokerError kinds."""
        marks = await read_key_marks(self.broker.reader)
        new = [
            name
            for name in streams
            if name not in marks and (name not in existing or await self._was_never_written(name))
        ]
        await write_key_marks(self.producer, new, "none", self.who)

    async def find_keyless(self) -> list[str]:
        """The streams of which no event ever had a key. Raises BrokerError kinds."""
        return [name for name, mark in (await read_key_marks(self.broker.reader)).items() if mark.state == "none"]

    async def record_growth(self, topic: str, has: int, wanted: int) -> None:
        """Write an entry to the audit. Raises BrokerError kinds."""
        await write_growth(self.producer, self.who, topic, has, wanted)

    async def _was_never_written(self, topic: str) -> bool:
        """Whether it is certain, as with a topic that another tool has just created."""
        if not self.broker.is_contiguous(topic):
            return False
        return all(stored.end == 0 for stored in (await self.broker.reader.describe(topic)).values())


@dataclass(frozen=True, slots=True)
class Provisioned:
    """The result of `ensure_topics`. Each topic's name is in exactly one of these."""

    created: tuple[str, ...]
    grown: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def has_retrier(self) -> bool:
        """Whether a retrier must run. If its topics exist, events may wait there, also from an append that arrives late."""
        return RETRY_IN in self.created or RETRY_IN in self.kept


def wanted_topics(pipes: PipeFile, *, has_retrier: bool = False) -> list[TopicSpec]:
    """Every topic of the pipe file, streams first. has_retrier: include the retrier's topics even if the file needs none."""
    specs: dict[str, TopicSpec] = {}

    def add(
        topic: str, retention_s: float | None, partitions: int = 1, shards: int | None = None, *, compact: bool = False
    ) -> None:
        retention_ms = None if retention_s is None else int(retention_s * 1000)
        spec = TopicSpec(topic, partitions, retention_ms=retention_ms, shards=shards, compact=compact)
        specs.setdefault(topic, spec)

    for name, stream in own_streams(pipes).items():
        add(name, stream.retention, stream.partitions, stream.shards, compact=stream.compact)
    for name, pipe in pipes.pipes.items():
        sources = [pipes.streams[source] for source in pipe.sources]
        retention = max(source.retention for source in sources)
        if pipe.transform is not None:
            shards = max(source.shards or source.partitions for source in sources)
            add(output_topic(name), retention, max(source.partitions for source in sources), shards)
        add(dead_letter_topic(name), retention + _longest_schedule(pipe) + DEAD_LETTER_RETENTION_S)
        if pipe.renamed_from or any(destination.webhook is not None for destination in pipe.destinations):
            add(retry_topic(name), RETRY_RETENTION_S)
            add(parked_topic(name), None)
    for name in sorted({lane.partition("/")[0] for lane in pipes.removed}):
        add(dead_letter_topic(name), DEAD_LETTER_RETENTION_S)
        add(retry_topic(name), RETRY_RETENTION_S)
        add(parked_topic(name), None)
    if has_retrier or needs_retrier(pipes):
        longest = max(spec.retention_ms or 0 for spec in specs.values())
        add(RETRY_IN, RETRY_RETENTION_S)
        for seconds in DELAYS_S:
            add(delay_topic(seconds), seconds + RETRY_RETENTION_S)
        specs[RETRIER_DEAD] = TopicSpec(RETRIER_DEAD, 1, retention_ms=longest)
    add(TELEMETRY, TELEMETRY_RETENTION_S)
    add(SNAPSHOTS, 2 * TELEMETRY_RETENTION_S)
    add(AUDIT, None)
    add(CONTROL, None)
    return list(specs.values())


def _longest_schedule(pipe: Pipe) -> float:
    webhooks = [destination.webhook for destination in pipe.destinations if destination.webhook is not None]
    return max((sum(webhook.schedule) for webhook in webhooks), default=0.0)


async def ensure_topics(
    admin: Admin, pipes: PipeFile, *, grow: bool = False, recorder: Recorder | None = None
) -> Provisioned:
    """Create missing topics; with `grow`, add partitions where the pipe file has more. Sets the retention of new topics only.

    recorder: without one nothing is recorded, and new streams count as keyed.

    Raises NoSuchTopics, TooFewPartitions without `grow`, and UnsafeTopic when an existing topic can lose acknowledged events,
    or is compacted and should not be, or the other way round, or belongs to a stream and to a destination; all before any
    change. Raises BrokerError kinds; after those, call again.
    """
    existing = await admin.topics()
    others = await find_others(admin, pipes)
    if others.absent:
        raise NoSuchTopics(others.absent.values())
    await _require_no_alias(admin, pipes, existing, others.silent)
    specs = wanted_topics(pipes, has_retrier=RETRY_IN in existing)
    lacking = [
        (spec.name, existing[spec.name], spec.partitions)
        for spec in specs
        if spec.name in existing and existing[spec.name] < spec.partitions
    ]
    _require_fixed_tables([spec for spec in specs if spec.compact], {topic for topic, _, _ in lacking})
    if lacking and not grow:
        raise TooFewPartitions(lacking, () if recorder is None else await recorder.find_keyless())
    await admin.check_durability([spec.name for spec in specs if spec.name in existing])
    await check_compaction(admin, pipes, existing)
    # A stream is marked before it can have an event, so the topic of the marks comes first.
    records = [spec for spec in specs if spec.name in (AUDIT, CONTROL)]
    created = await _create(admin, records, existing)
    if recorder is not None:
        await recorder.mark_new_streams(own_streams(pipes), existing)
    created |= await _create(admin, [spec for spec in specs if spec not in records], existing)
    await admin.create_own_topics()
    for topic, has, wanted in lacking:
        if recorder is not None:
            await recorder.record_growth(topic, has, wanted)
        await _grow(admin, topic, wanted)
    grown = tuple(topic for topic, _, _ in lacking)
    names = [spec.name for spec in specs]
    kept = tuple(name for name in names if name not in created and name not in grown)
    return Provisioned(tuple(name for name in names if name in created), grown, kept)


@dataclass(frozen=True, slots=True)
class Others:
    """absent: the topics of others that are not there, by their names in the fleet: each with its broker, if that is not the
    fleet's own. silent: the brokers that only destinations name and that do not answer, each with the reason. Nothing is known
    about the topics there, and their destinations wait."""

    absent: Mapping[str, str]
    silent: Mapping[str, str]


async def find_others(admin: Admin, pipes: PipeFile) -> Others:
    """Look for the topics of others. Raises BrokerError kinds of the brokers that streams need. A fleet starts without the
    others."""
    topics = existing_topics(pipes).names
    homes = target_homes(pipes) | {name: stream.home for name, stream in pipes.streams.items()}
    needed = {DEFAULT, *(stream.home for stream in pipes.streams.values())}
    missing, silent = await find_missing(admin, {name: homes[name] for name in topics}, needed)
    for error in silent.values():
        if isinstance(error, AccessRefused):  # waiting does not help
            raise error
    where = {name: "" if homes[name] == DEFAULT else f" on broker {homes[name]}" for name in missing}
    return Others(
        {name: f"{topics[name]}{where[name]}" for name in missing}, {home: str(error) for home, error in silent.items()}
    )


async def find_missing(
    admin: Admin, homes: Mapping[str, str], needed: Collection[str]
) -> tuple[list[str], dict[str, Unavailable]]:
    """The topics that are not there; and the brokers that cannot be asked, with the reason: nothing is known about their topics.
    homes: by topic, its broker. needed: of these brokers BrokerError kinds are raised."""
    missing: list[str] = []
    silent: dict[str, Unavailable] = {}
    for home in dict.fromkeys(homes.values()):
        here = [name for name, there in homes.items() if there == home]
        try:
            async with asyncio.timeout(None if home in needed else ANSWER_S):
                present = await admin.present(here)
        except Unavailable as error:
            if home in needed:
                raise
            silent[home] = error
        except TimeoutError:
            silent[home] = Unavailable(f"no answer within {ANSWER_S:g} s")
        else:
            missing += [name for name in here if name not in present]
    return missing, silent


async def _require_no_alias(
    admin: Admin, pipes: PipeFile, existing: Mapping[str, int], silent: Collection[str]
) -> None:
    """Raises UnsafeTopic when a topic of others is a topic of the fleet, by another name of its broker. The pipe file does not
    show that: an event may go round for ever, or what a destination gets counts as a retry. existing: as of `Admin.topics`.
    silent: brokers that cannot be asked."""
    others = existing_topics(pipes).names
    homes = target_homes(pipes) | {name: stream.home for name, stream in pipes.streams.items() if name in others}
    known = {spec.name: DEFAULT for spec in wanted_topics(pipes, has_retrier=RETRY_IN in existing)}
    known |= {name: stream.home for name, stream in pipes.streams.items()}
    problems = []
    for other, home in homes.items():
        if home in silent:
            continue
        names = [
            name
            for name, there in known.items()
            if there != home and existing.get(name) and _may_be(others[other], others.get(name), name)
            if not (other in pipes.streams and name in others)  # only read, by two names
        ]
        found = await admin.incarnation(other) if names else None
        for name in names:
            if await admin.incarnation(name) == found:
                ours = f"the topic of stream {name}" if name in pipes.streams else f"our own topic {name}"
                problems.append((others[other], "on", _ALIAS.format(ours=ours, home=home, there=known[name])))
    if problems:
        raise UnsafeTopic(problems)


def _may_be(topic: str, full: str | None, name: str) -> bool:
    """Whether a topic of this name on its cluster may be this one of the fleet, which may have a prefix there. full: its name on
    its cluster, if it is of others."""
    return topic == full if full is not None else topic == name or topic.endswith(f".{name}")


_ALIAS = (
    "it is {ours}, and {home} and {there} are the same cluster. Its events could go round for ever. "
    "Try: one name for this cluster in the pipe file, and penstock check"
)


def _require_fixed_tables(compacted: Collection[TopicSpec], lacking: Collection[str]) -> None:
    """Raises UnsafeTopic for compacted topics that the file would grow."""
    if problems := [(spec.name, "partitions", _TABLE_GROWS) for spec in compacted if spec.name in lacking]:
        raise UnsafeTopic(problems)


async def check_compaction(admin: Admin, pipes: PipeFile, existing: Collection[str]) -> None:
    """Raises UnsafeTopic when the broker cannot compact, or an existing stream is compacted and the file says otherwise: a table
    would lack what was removed before, or a stream would lose events that it should keep."""
    streams = own_streams(pipes)
    wanted = {name for name, stream in streams.items() if stream.compact}
    if wanted and (why := admin.why_not_compact) is not None:
        raise UnsafeTopic([(name, "compact", why) for name in sorted(wanted)])
    present = {name for name in streams if name in existing}
    compacted = await admin.compacted(present)
    problems = [(name, "compact", _NOT_COMPACTED) for name in sorted((wanted & present) - compacted)]
    problems += [(name, "compact", _IS_COMPACTED) for name in sorted(compacted - wanted)]
    if problems:
        raise UnsafeTopic(problems)


_NOT_COMPACTED = (
    "the topic exists and is not compacted, so the newest event of a key may be gone already. Try: a stream with another name, "
    "and a pipe that copies this one into it"
)
_TABLE_GROWS = (
    "the topic is compacted and has fewer partitions. More of them would move keys, and their former events would stay for ever. "
    "Try: the number that the topic has, or a stream with another name"
)
_IS_COMPACTED = (
    "the topic exists and is compacted, so it loses events that a newer one of their key replaces. Try: compact: true, or a "
    "stream with another name"
)


async def _grow(admin: Admin, topic: str, wanted: int) -> None:
    try:
        await admin.add_partitions(topic, wanted)
    except (ValueError, BrokerError):
        # Another process applies the same file, or the autoscaler was faster.
        if (await admin.topics()).get(topic, 0) < wanted:
            raise


async def _create(admin: Admin, specs: Collection[TopicSpec], existing: Collection[str]) -> set[str]:
    """Create the topics that do not exist. Gives the names of those that this call has created."""
    created = set()
    for spec in specs:
        if spec.name in existing:
            continue
        try:
            await admin.create_topic(spec)
            created.add(spec.name)
        except TopicExists:  # another process applies the same file
            pass
    return created


@dataclass(frozen=True, slots=True)
class LargerTopic:
    """A topic with more partitions than the pipe file asks for."""

    name: str
    partitions: int
    wanted: int


def find_larger(existing: Mapping[str, int], pipes: PipeFile) -> list[LargerTopic]:
    """The topics of the pipe file that have more partitions. existing: the number of partitions by topic."""
    return [
        LargerTopic(spec.name, existing[spec.name], spec.partitions)
        for spec in wanted_topics(pipes, has_retrier=RETRY_IN in existing)
        if existing.get(spec.name, 0) > spec.partitions
    ]


async def require_safe_topics(admin: Admin, topics: Collection[str]) -> None:
    """Check the durability of existing topics, for a service that starts alone. Raises BadConfiguration with topic and key, and
    BrokerError kinds."""
    try:
        await admin.check_durability(topics)
    except UnsafeTopic as error:
        raise BadConfiguration([Problem(f"topic {topic}", key, text) for topic, key, text in error.problems]) from error


def _describe(topic: str, has: int, wanted: int, is_keyless: bool) -> str:
    if is_keyless:
        effect = "no event of it ever had a key, so no order breaks"
    else:
        effect = "keys will map to other partitions, and their order is not kept over the change"
    return f"topic {topic} has {has} partitions, the pipe file asks for {wanted}; {effect}. Try: penstock apply --grow"
