"""The topics that a pipe file implies, and seeing to it that they exist. Idempotent; nothing is ever deleted.

A stream has the partitions and retention of its definition. `<pipe>.out` has as many partitions as the pipe's widest
source and the longest of their retentions. `<pipe>.dead` has one partition and keeps for `DEAD_LETTER_RETENTION_S`
more than that and than its longest schedule, so that what is found in a source is found in its dead letters.

Pipes with webhooks have `<pipe>.retry`, and `<pipe>.parked`, which keeps for ever; when any destination has a schedule, or
once had one, the global retrier has its topics. What waits there outlives a retrier that is down by `RETRY_RETENTION_S`.
Each has one partition: on Kinesis a partition costs money, elsewhere files, and it takes far more than the retries of a
destination, which come paced; ten delay topics are shared among several retriers all the same.

What waits for destinations that are `removed` is read where their pipe kept it: those topics are made, too, if they are gone.

`penstock.telemetry` holds the nodes' reports of the last `TELEMETRY_RETENTION_S` (`services.core.ledger`), `penstock.observer`
for twice as long what the observer made of them.

`penstock.audit` says what operators did with dead letters, `penstock.control` what is paused. Both are kept for ever.
"""

from collections.abc import Collection
from dataclasses import dataclass

from services.core.broker.contract import Admin, TopicSpec
from services.core.broker.errors import TopicExists, UnsafeTopic
from services.core.ledger.report import SNAPSHOTS, TELEMETRY
from services.core.pipes import (
    AUDIT,
    CONTROL,
    DELAYS_S,
    RETRIER_DEAD,
    RETRY_IN,
    Pipe,
    PipeFile,
    dead_letter_topic,
    delay_topic,
    needs_retrier,
    output_topic,
    parked_topic,
    retry_topic,
)
from services.core.yaml_source import BadConfiguration, Problem

DEAD_LETTER_RETENTION_S = 30 * 86400
RETRY_RETENTION_S = 14 * 86400
TELEMETRY_RETENTION_S = 86400


class PartitionsDiffer(Exception):
    """Topics exist with other partition counts than the pipe file says. Nothing was changed.

    More partitions map keys elsewhere, so the order of a key is not kept across the change: a person decides.
    """

    def __init__(self, differences: list[tuple[str, int, int]]) -> None:
        lines = [_difference(topic, has, wanted) for topic, has, wanted in sorted(differences)]
        super().__init__("\n".join(lines))
        self.differences = differences


@dataclass(frozen=True, slots=True)
class Provisioned:
    """What `ensure_topics` did: topic names, each in exactly one of these."""

    created: tuple[str, ...]
    grown: tuple[str, ...]
    kept: tuple[str, ...]

    @property
    def has_retrier(self) -> bool:
        """Whether a retrier must run: once its topics exist events may wait there, also those of an append that arrives late."""
        return RETRY_IN in self.created or RETRY_IN in self.kept


def wanted_topics(pipes: PipeFile, *, has_retrier: bool = False) -> list[TopicSpec]:
    """Every topic of the pipe file, streams first. has_retrier: with the retrier's topics although the file needs none."""
    specs = [
        TopicSpec(name, stream.partitions, retention_ms=_millis(stream.retention), shards=stream.shards)
        for name, stream in pipes.streams.items()
    ]
    for name, pipe in pipes.pipes.items():
        sources = [pipes.streams[source] for source in pipe.sources]
        retention = max(source.retention for source in sources)
        if pipe.transform is not None:
            partitions = max(source.partitions for source in sources)
            shards = max((source.shards or source.partitions for source in sources), default=None)
            specs.append(TopicSpec(output_topic(name), partitions, retention_ms=_millis(retention), shards=shards))
        dead_for = retention + _longest_schedule(pipe) + DEAD_LETTER_RETENTION_S
        specs.append(TopicSpec(dead_letter_topic(name), 1, retention_ms=_millis(dead_for)))
        if any(destination.webhook is not None for destination in pipe.destinations):
            specs.append(TopicSpec(retry_topic(name), 1, retention_ms=_millis(RETRY_RETENTION_S)))
            specs.append(TopicSpec(parked_topic(name), 1))
    for name in sorted({lane.partition("/")[0] for lane in pipes.removed}):
        known = {spec.name for spec in specs}
        kept = (
            (dead_letter_topic(name), _millis(DEAD_LETTER_RETENTION_S)),
            (retry_topic(name), _millis(RETRY_RETENTION_S)),
        )
        gone = [TopicSpec(topic, 1, retention_ms=retention) for topic, retention in (*kept, (parked_topic(name), None))]
        specs += [spec for spec in gone if spec.name not in known]
    if has_retrier or needs_retrier(pipes):
        specs += _retrier_topics(
            max((spec.retention_ms or 0 for spec in specs), default=_millis(DEAD_LETTER_RETENTION_S))
        )
    specs.append(TopicSpec(TELEMETRY, 1, retention_ms=_millis(TELEMETRY_RETENTION_S)))
    specs.append(TopicSpec(SNAPSHOTS, 1, retention_ms=_millis(2 * TELEMETRY_RETENTION_S)))
    if pipes.pipes:
        specs += [TopicSpec(AUDIT, 1), TopicSpec(CONTROL, 1)]
    return specs


def _retrier_topics(dead_letters_ms: int) -> list[TopicSpec]:
    waits = {RETRY_IN: 0} | {delay_topic(seconds): seconds for seconds in DELAYS_S}
    specs = [TopicSpec(topic, 1, retention_ms=_millis(wait + RETRY_RETENTION_S)) for topic, wait in waits.items()]
    return [*specs, TopicSpec(RETRIER_DEAD, 1, retention_ms=dead_letters_ms)]


def _longest_schedule(pipe: Pipe) -> float:
    webhooks = [destination.webhook for destination in pipe.destinations if destination.webhook is not None]
    return max((sum(webhook.schedule) for webhook in webhooks), default=0.0)


async def ensure_topics(admin: Admin, pipes: PipeFile, *, grow: bool = False) -> Provisioned:
    """Create what is missing; with `grow`, add partitions where the pipe file wants more.

    Raises PartitionsDiffer when counts differ (fewer wanted: always), and UnsafeTopic when a topic that exists can lose
    acknowledged events: both before changing anything. Raises BrokerError kinds; after one of those, call again.
    Retention is set when a topic is created and left alone afterwards.
    """
    existing = await admin.topics()
    specs = wanted_topics(pipes, has_retrier=RETRY_IN in existing)
    differing = [
        (spec.name, existing[spec.name], spec.partitions)
        for spec in specs
        if spec.name in existing and existing[spec.name] != spec.partitions
    ]
    if refused := [item for item in differing if not grow or item[2] < item[1]]:
        raise PartitionsDiffer(refused)
    await admin.check_durability([spec.name for spec in specs if spec.name in existing])
    created, kept = [], []
    for spec in specs:
        if spec.name in existing:
            kept.append(spec.name)
            continue
        try:
            await admin.create_topic(spec)
            created.append(spec.name)
        except TopicExists:  # somebody else applies the same file at the same time
            kept.append(spec.name)
    for topic, _has, wanted in differing:
        await admin.add_partitions(topic, wanted)
        kept.remove(topic)
    return Provisioned(tuple(created), tuple(topic for topic, _, _ in differing), tuple(kept))


async def require_safe_topics(admin: Admin, topics: Collection[str]) -> None:
    """For a service that starts alone. Raises BadConfiguration naming topic and key, and BrokerError kinds.

    Topics that do not exist yet are passed over.
    """
    try:
        await admin.check_durability(topics)
    except UnsafeTopic as error:
        raise BadConfiguration([Problem(f"topic {topic}", key, text) for topic, key, text in error.problems]) from error


def _millis(seconds: float) -> int:
    return int(seconds * 1000)


def _difference(topic: str, has: int, wanted: int) -> str:
    if wanted < has:
        remedy = f"partitions are never taken away. Try: partitions: {has}"
    else:
        remedy = "keys will map elsewhere, their order is not kept across the change. Try: penstock apply --grow"
    return f"topic {topic} has {has} partitions, the pipe file wants {wanted}; {remedy}"
