"""Creates the topics of a pipe file. Idempotent; no topic is deleted.

| topic | partitions | retention |
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
    """The partition counts of topics differ from the pipe file. Nothing was changed.

    More partitions map keys to other partitions. The order of a key is then not kept over the change, so a person decides.
    """

    def __init__(self, differences: list[tuple[str, int, int]]) -> None:
        lines = [_difference(topic, has, wanted) for topic, has, wanted in sorted(differences)]
        super().__init__("\n".join(lines))


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

    def add(topic: str, retention_s: float | None, partitions: int = 1, shards: int | None = None) -> None:
        retention_ms = None if retention_s is None else int(retention_s * 1000)
        specs.setdefault(topic, TopicSpec(topic, partitions, retention_ms=retention_ms, shards=shards))

    for name, stream in pipes.streams.items():
        add(name, stream.retention, stream.partitions, stream.shards)
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
    if pipes.pipes:
        add(AUDIT, None)
        add(CONTROL, None)
    return list(specs.values())


def _longest_schedule(pipe: Pipe) -> float:
    webhooks = [destination.webhook for destination in pipe.destinations if destination.webhook is not None]
    return max((sum(webhook.schedule) for webhook in webhooks), default=0.0)


async def ensure_topics(admin: Admin, pipes: PipeFile, *, grow: bool = False) -> Provisioned:
    """Create missing topics; with `grow`, add partitions where the pipe file has more. Sets the retention of new topics only.

    Raises PartitionsDiffer when counts differ (always if the file has fewer), and UnsafeTopic when an existing topic can lose
    acknowledged events; both before any change. Raises BrokerError kinds; after those, call again.
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
        except TopicExists:  # another process applies the same file
            kept.append(spec.name)
    for topic, _has, wanted in differing:
        await admin.add_partitions(topic, wanted)
        kept.remove(topic)
    return Provisioned(tuple(created), tuple(topic for topic, _, _ in differing), tuple(kept))


async def require_safe_topics(admin: Admin, topics: Collection[str]) -> None:
    """Check the durability of existing topics, for a service that starts alone. Raises BadConfiguration with topic and key, and
    BrokerError kinds."""
    try:
        await admin.check_durability(topics)
    except UnsafeTopic as error:
        raise BadConfiguration([Problem(f"topic {topic}", key, text) for topic, key, text in error.problems]) from error


def _difference(topic: str, has: int, wanted: int) -> str:
    if wanted < has:
        remedy = f"partitions are never removed. Try: partitions: {has}"
    else:
        remedy = (
            "keys will map to other partitions, and their order is not kept over the change. Try: penstock apply --grow"
        )
    return f"topic {topic} has {has} partitions, the pipe file has {wanted}; {remedy}"
