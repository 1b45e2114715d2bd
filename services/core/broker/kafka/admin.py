"""Administration of topics and groups."""

import asyncio
from collections.abc import Collection, Mapping
from uuid import UUID

from aiokafka.protocol.admin import (
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    DescribeGroupsRequest,
)

from services.core.broker.contract import Lag, PartitionRange, Start, TopicSpec
from services.core.broker.errors import NotAllowed, UnknownTopic
from services.core.broker.existing import NO_EXISTING, ExistingTopics
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.error_codes import NOT_ALLOWED, UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID, bounded, raise_for
from services.core.broker.kafka.leaders import EARLIEST, LagMeter, ends, list_offsets, partitions_of, starts
from services.core.broker.kafka.offsets import commit_without_member, copy_positions, fetch_positions
from services.core.broker.kafka.positions import GROUPS, Append, GroupStart, GroupStarts
from services.core.broker.kafka.protocol import DeleteByIdRequest, DescribeTopicsRequest, GroupRightsRequest
from services.core.broker.kafka.reader import read_at
from services.core.broker.kafka.record_batch import MAX_BATCH_BYTES
from services.core.broker.kafka.topic_settings import (
    BY_STORING,
    CLEANUP,
    TIMESTAMPS,
    check_durability,
    find_by_event_time,
    keep_by_storing,
    read_settings,
)
from services.core.broker.prefix import find_own
from services.core.broker.record import Batch, TopicPartition
from services.core.broker.rights import Right

_REPLICAS = 3
_MIN_IN_SYNC = {3: 2}
"""With three replicas, two must have a record. With fewer brokers (a demo), one must."""

_FOR_EVER = -1
_ANY_TIME = (1 << 63) - 1
_PAUSE = 0.05


class KafkaAdmin:
    """The contract's `Admin`. Topics get three replicas, or as many as there are brokers."""

    def __init__(
        self, cluster: Cluster, append: Append, prefix: str = "", existing: ExistingTopics = NO_EXISTING
    ) -> None:
        """`append`: stores records in a topic, durably. `prefix`: of this fleet's names; all names here have it."""
        self._cluster, self._prefix, self._translate = cluster, prefix, existing.translate
        self.begun = GroupStarts(cluster, self.create_topic, append, prefix)
        self._lag = LagMeter(cluster)

    async def create_topic(self, spec: TopicSpec) -> None:
        """As in the contract; returns when every partition has a leader. retention_bytes counts per partition."""
        client = await self._cluster.client()
        replicas = min(_REPLICAS, len(client.cluster.brokers()))
        settings = {
            "min.insync.replicas": _MIN_IN_SYNC.get(replicas, 1),
            "unclean.leader.election.enable": "false",
            "max.message.bytes": MAX_BATCH_BYTES,
            "retention.ms": _FOR_EVER if spec.retention_ms is None or spec.compact else spec.retention_ms,
            "retention.bytes": _FOR_EVER if spec.retention_bytes is None else spec.retention_bytes,
            "cleanup.policy": "compact" if spec.compact else "delete",
            # Clients' clocks are wrong: retention counts from storing. The event time is in a header (`event.TIME`).
            TIMESTAMPS: BY_STORING,
            # For an operator who sets CreateTime: Kafka would refuse a whole batch if one event is an hour ahead.
            "message.timestamp.after.max.ms": _ANY_TIME,
        }
        if spec.compact and spec.retention_ms is not None:
            # Kafka's own names for what TopicSpec promises. Two times: as the log, it does not let garbage wait for ever.
            settings["min.compaction.lag.ms"] = settings["delete.retention.ms"] = spec.retention_ms
            settings["max.compaction.lag.ms"] = max(1, 2 * spec.retention_ms)
        configs = [(name, str(value)) for name, value in settings.items()]
        row = (spec.name, spec.partitions, replicas, (), configs)
        answer = await self._cluster.ask_any(CreateTopicsRequest([row], self._patience, validate_only=False))
        for name, code, message in answer.topic_errors:
            raise_for(
                code, f"create topic {name}: {message or 'refused'}", f"Create on topic {name}", "Create on the cluster"
            )
        await self._wait_for(spec.name, spec.partitions)

    async def create_own_topics(self) -> None:
        """As in the contract: `penstock.groups`."""
        await self.begun.create_topic()

    async def delete_topic(self, topic: str, incarnation: str | None = None) -> None:
        """As in the contract; Kafka forgets the groups' offsets with it."""
        if incarnation is not None:
            await self._delete_one(topic, incarnation)
            return
        await partitions_of(self._cluster, [topic])
        answer = await self._cluster.ask_any(DeleteTopicsRequest([topic], self._patience))
        for name, code in answer.topic_error_codes:
            raise_for(code, f"delete topic {name}", f"Delete on topic {name}")
        await self._wait_for(topic, 0)

    async def _delete_one(self, topic: str, incarnation: str) -> None:
        """By its id. Meanwhile another topic may get the name: so the id is waited for, not the name."""
        try:
            topic_id = UUID(incarnation)
        except ValueError:  # of another kind of broker: the URL of this one was changed
            raise UnknownTopic(f"topic {topic} of Kafka has another id than {incarnation}") from None
        answer = await self._cluster.ask_any(DeleteByIdRequest(topic_id, self._patience))
        for _, _, code, message, _ in answer.responses:
            if code == UNKNOWN_TOPIC_ID:
                raise UnknownTopic(
                    f"topic {topic} with id {incarnation} is gone. It was deleted, and maybe created again"
                )
            raise_for(code, f"delete topic {topic}: {message or 'refused'}", f"Delete on topic {topic}")
        async with bounded(f"delete topic {topic}", self._cluster.timing.request):
            while not await self._is_gone(topic, incarnation):  # noqa: ASYNC110 - Kafka sends no notice
                await asyncio.sleep(_PAUSE)

    async def _is_gone(self, topic: str, incarnation: str) -> bool:
        """Whether no node lists it any more."""
        async for states in self._cluster.describe_by_node([topic]):
            if topic in states and states[topic].id == incarnation:
                return False
        return True

    async def topics(self) -> dict[str, int]:
        """As in the contract, without topics of other fleets."""
        states = await self._cluster.describe()
        return {
            name: len(states[name].partitions)
            for name in find_own(states, self._prefix)
            if not states[name].internal and not name.startswith("__") and name != self._prefix + GROUPS
        }

    async def present(self, topics: Collection[str]) -> frozenset[str]:
        return frozenset(topics) & (await self._cluster.describe()).keys()

    async def add_partitions(self, topic: str, partitions: int) -> None:
        now = len(await partitions_of(self._cluster, [topic]))
        if partitions <= now:
            raise ValueError(f"{topic} has {now} partitions and cannot get {partitions}. Kafka only adds partitions")
        request = CreatePartitionsRequest([(topic, (partitions, None))], self._patience, validate_only=False)
        answer = await self._cluster.ask_any(request)
        for name, code, message in answer.topic_errors:
            raise_for(code, f"add partitions to {name}: {message or 'refused'}", f"Alter on topic {name}")
        await self._wait_for(topic, partitions)

    async def describe(self, topic: str) -> dict[int, PartitionRange]:
        sources = await partitions_of(self._cluster, [topic])
        first = await list_offsets(self._cluster, dict.fromkeys(sources, EARLIEST))
        end = await ends(self._cluster, sources)
        return {source.partition: PartitionRange(first[source], end[source]) for source in sources}

    async def next_at_least(self, topic: str) -> dict[int, int]:
        return {partition: stored.end for partition, stored in (await self.describe(topic)).items()}

    async def fence(self, topic: str) -> dict[int, int]:
        return await self.next_at_least(topic)

    async def offsets_at(self, topic: str, start: Start) -> dict[int, int]:
        sources = await partitions_of(self._cluster, [topic])
        found = await starts(self._cluster, sources, start)
        return {source.partition: found[source] for source in sources}

    async def committed(self, group: str, topic: str) -> dict[int, int]:
        """As in the contract. A start position of 0 is no processed record, and absent."""
        found = await fetch_positions(self._cluster, group, topic)
        return {source.partition: position - 1 for source, position in found.items() if position}

    async def has_begun(self, group: str, topic: str) -> bool:
        """As in the contract, also when Kafka has expired the group's offsets."""
        if await fetch_positions(self._cluster, group, topic):
            return True
        sources = await partitions_of(self._cluster, [topic])
        now = (await self._cluster.describe([topic]))[topic].id
        return any(row.topic == now for row in (await self.begun.find(group, sources)).values())

    async def positions(self, group: str, topic: str) -> dict[int, int]:
        """As in the contract. Absent, too, where Kafka has expired the group's offset."""
        found = await fetch_positions(self._cluster, group, topic)
        return {source.partition: position for source, position in found.items()}

    async def members(self, group: str) -> list[str]:
        """As in the contract: the name of the client, and its host."""
        answer = await self._cluster.ask_coordinator(group, DescribeGroupsRequest([group]))
        found = []
        for code, name, _state, _type, _protocol, members, *_ in answer.groups:
            raise_for(code, f"describe group {name}", f"Describe on group {name}")
            found += [f"{client} at {host.lstrip('/')}" for _, client, host, *_ in members]
        return sorted(found)

    async def set_committed(self, group: str, topic: str, processed: Mapping[int, int]) -> None:
        positions = {partition: last + 1 for partition, last in processed.items()}
        sources = [TopicPartition(topic, partition) for partition in positions]
        found = await self.begun.find(group, sources)  # before the commit: what can fail behind it is the record only
        note = await commit_without_member(self._cluster, group, topic, positions)
        row = GroupStart(note.topic, note.partitions or len(positions))
        new = [source for source in sources if source not in found or found[source].topic != note.topic]
        await self.begun.record(group, dict.fromkeys(new, row))

    async def copy_positions(self, group: str, to: str, topic: str) -> bool:
        """As in the contract. When Kafka has expired the group's offsets, `to` stops as the group would."""
        has_commits = await copy_positions(self._cluster, group, to, topic)
        return await self.begun.copy(group, to, await partitions_of(self._cluster, [topic])) or has_commits

    async def incarnation(self, topic: str) -> str:
        """As in the contract: Kafka's id of the topic."""
        await partitions_of(self._cluster, [topic])
        return (await self._cluster.describe([topic]))[topic].id

    why_not_compact: str | None = None

    async def compacted(self, topics: Collection[str]) -> frozenset[str]:
        states = await self._cluster.describe(list(topics))
        policies = {topic: await read_settings(self._cluster, topic, [CLEANUP]) for topic in states}
        return frozenset([topic for topic, found in policies.items() if "compact" in found[CLEANUP].split(",")])

    async def check_durability(self, topics: Collection[str]) -> None:
        await check_durability(self._cluster, topics)

    async def kept_by_event_time(self, topics: Collection[str]) -> frozenset[str]:
        return await find_by_event_time(self._cluster, topics)

    async def keep_by_storing(self, topics: Collection[str]) -> None:
        await keep_by_storing(self._cluster, topics)

    async def group_lag(self, group: str, topic: str) -> dict[int, Lag]:
        """As in the contract; a partition without a commit counts from its oldest record."""
        sources = await partitions_of(self._cluster, [topic])
        positions = await list_offsets(self._cluster, dict.fromkeys(sources, EARLIEST))
        positions |= await fetch_positions(self._cluster, group, topic)
        lag = await self._lag.measure(positions)
        return {source.partition: lag[source] for source in sources}

    async def missing_rights(self, rights: Collection[Right]) -> list[Right]:
        """As in `RightsReader`; one request, and two for each group. None are missing where nobody logs in."""
        if self._cluster.access is None:
            return []
        topics = sorted({right.name for right in rights if right.kind == "topic"})
        answer = await self._cluster.ask_any(DescribeTopicsRequest(topics, rights=True))
        granted = {("topic", row[1]): None if row[0] == UNKNOWN_TOPIC else row[5] for row in answer.topics}
        granted |= {("topic", row[1]): _HIDDEN for row in answer.topics if row[0] in NOT_ALLOWED}
        for group in {right.name for right in rights if right.kind == "group"}:
            granted["group", group] = await self._group_rights(group)
        return [right for right in rights if not _is_granted(right.operation, granted.get(right[1:]))]

    async def _group_rights(self, group: str) -> int | None:
        try:
            answer = await self._cluster.ask_coordinator(group, GroupRightsRequest(group))
        except NotAllowed:
            return 0
        code, *_, bits = answer.groups[0]
        if code in NOT_ALLOWED:
            return 0
        raise_for(code, f"describe group {group}")
        return int(bits)

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        """As in the contract; see `read_at`."""
        translate = self._translate.get(topic)
        source = TopicPartition(topic, partition)
        batch = await read_at(self._cluster, source, offset, max_records, timed=translate is None)
        if batch is None or translate is None:
            return batch
        state = (await self._cluster.describe([topic])).get(topic)
        if state is None:
            raise UnknownTopic(f"Kafka has no topic {topic!r}")
        return translate(batch, state.id)

    @property
    def _patience(self) -> int:
        return round(self._cluster.timing.request * 1000)

    async def _wait_for(self, topic: str, partitions: int) -> None:
        """Wait until every node lists the topic with this many partitions, each with a leader; 0: until none lists it."""
        async with bounded(f"topic {topic} with {partitions} partitions", self._cluster.timing.request):
            while not await self._is_everywhere(topic, partitions):  # noqa: ASYNC110 - Kafka sends no notice
                await asyncio.sleep(_PAUSE)

    async def _is_everywhere(self, topic: str, partitions: int) -> bool:
        async for states in self._cluster.describe_by_node([topic]):
            leaders = [part.leader for part in states[topic].partitions.values()] if topic in states else []
            if len(leaders) != partitions or min(leaders, default=0) < 0:
                return False
        return True


_OPERATIONS = {"Read": 3, "Write": 4, "Create": 5, "Delete": 6, "Alter": 7, "Describe": 8, "DescribeConfigs": 10}
"""Kafka's numbers; a right is the bit of its operation's number."""
_NOT_KNOWN = -(1 << 31)
_HIDDEN = 1 << _OPERATIONS["DescribeConfigs"] | 1 << _OPERATIONS["Create"]
"""Of a topic that we may not describe: we have no right that contains Describe, and about these two nothing is known."""


def _is_granted(operation: str, bits: int | None) -> bool:
    """bits: of all that is granted, with what it implies; None, or _NOT_KNOWN from a cluster that does not say: who knows."""
    return bits is None or bits == _NOT_KNOWN or bool(bits >> _OPERATIONS[operation] & 1)
