"""Fetch requests that name topics by their ids (version 13, KIP-516), in place of aiokafka's, which name them by their names.

A topic may be deleted and created again while a node hears no news. That node still leads partitions of the deleted topic, and
answers by name with its records. They would be taken for the new topic's: their offsets would be committed onto it, and what it
stores there would never be read. By id such a node answers that it does not know the topic, and so does one that knows only a
later topic of this name.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any
from uuid import UUID

from aiokafka import errors as kafka
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.fetch import FetchRequest, FetchResponse_v11
from aiokafka.protocol.types import CompactArray, CompactBytes, CompactString, Int8, Int16, Int32, Int64, Schema
from aiokafka.structs import TopicPartition as KafkaPartition

from services.core.broker.kafka.error_codes import UNKNOWN_TOPIC, UNKNOWN_TOPIC_ID
from services.core.broker.kafka.protocol import CONSUMER, TAGS, UNKNOWN, Uuid, by_id

_NO_SESSION = (0, -1)
_INCONSISTENT_TOPIC_ID = 103
_FENCED_EPOCH, _UNKNOWN_EPOCH, _OFFSET_NOT_AVAILABLE = 74, 75, 78
_MOVED = frozenset(
    {
        kafka.LeaderNotAvailableError.errno,
        kafka.ReplicaNotAvailableError.errno,
        kafka.KafkaStorageError.errno,
        _FENCED_EPOCH,
        _UNKNOWN_EPOCH,
        _OFFSET_NOT_AVAILABLE,
    }
)
"""Another node may lead the partition. Of these codes aiokafka asks for no new metadata."""

FindId = Callable[[KafkaPartition], UUID | None]
"""The id of the topic in which a partition is read; None while its position is not known."""


class FetchByIdResponse(Response):  # type: ignore[misc]  # aiokafka has no types
    """Fetch, version 13."""

    API_KEY = 1
    API_VERSION = 13
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("session_id", Int32),
        (
            "topics",
            by_id(
                ("partition", Int32),
                ("error_code", Int16),
                ("high_water_mark", Int64),
                ("last_stable_offset", Int64),
                ("log_start_offset", Int64),
                ("aborted", CompactArray(("producer_id", Int64), ("first_offset", Int64), TAGS)),
                ("preferred_replica", Int32),
                ("records", CompactBytes),
            ),
        ),
        TAGS,
    )


class FetchByIdStruct(RequestStruct):  # type: ignore[misc]  # aiokafka has no types
    """Fetch, version 13, which every Kafka since 3.1 understands."""

    FLEXIBLE_VERSION = True
    API_KEY = 1
    API_VERSION = 13
    RESPONSE_TYPE = FetchByIdResponse
    SCHEMA = Schema(
        ("replica_id", Int32),
        ("max_wait_time", Int32),
        ("min_bytes", Int32),
        ("max_bytes", Int32),
        ("isolation_level", Int8),
        ("session_id", Int32),
        ("session_epoch", Int32),
        (
            "topics",
            by_id(
                ("partition", Int32),
                ("current_leader_epoch", Int32),
                ("offset", Int64),
                ("last_fetched_epoch", Int32),
                ("log_start_offset", Int64),
                ("max_bytes", Int32),
            ),
        ),
        ("forgotten_topics", CompactArray(("topic_id", Uuid), ("partitions", CompactArray(Int32)), TAGS)),
        ("rack_id", CompactString("utf-8")),
        TAGS,
    )


class FetchById(Request[FetchByIdStruct]):  # type: ignore[misc]  # aiokafka has no types
    """What `named` asks for, without the partitions that have no id now: they are asked for once their position is known."""

    API_KEY = 1

    def __init__(self, named: FetchRequest, find_id: FindId) -> None:
        self._named, self._find_id = named, find_id
        self._ids: dict[KafkaPartition, UUID] = {}
        self.topics: list[tuple[str, list[tuple[int, int, int]]]] = []
        for topic, rows in named.topics:
            known = []
            for row in rows:
                source = KafkaPartition(topic, row[0])
                if (found := find_id(source)) is not None:
                    self._ids[source] = found
                    known.append(row)
            if known:
                self.topics.append((topic, known))

    def build(self, request_struct_class: type[FetchByIdStruct]) -> FetchByIdStruct:
        grouped: defaultdict[UUID, list[tuple[Any, ...]]] = defaultdict(list)
        for topic, rows in self.topics:
            for number, offset, most in rows:
                row: tuple[Any, ...] = (number, UNKNOWN, offset, UNKNOWN, UNKNOWN, most, {})
                grouped[self._ids[KafkaPartition(topic, number)]].append(row)
        named = self._named
        limits = (named._max_wait_ms, named._min_bytes, named._max_bytes, named._isolation_level)
        topics: list[tuple[Any, ...]] = [(found, rows, {}) for found, rows in grouped.items()]
        return request_struct_class(CONSUMER, *limits, *_NO_SESSION, topics, [], "", {})

    def read(self, answer: Any) -> FetchResponse_v11:
        """The answer as aiokafka expects it. What is not of the topic that is read now is UnknownTopicOrPartition."""
        names = {(found, source.partition): source for source, found in self._ids.items()}
        topics: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)
        if answer.error_code:
            for source in self._ids:
                topics[source.topic].append((source.partition, _translate(answer.error_code), *_NOTHING))
        for found, partitions, *_ in answer.topics:
            for number, code, high, stable, first, aborted, replica, records, *_ in partitions:
                source = names[found, number]
                if self._find_id(source) != found:
                    topics[source.topic].append((number, UNKNOWN_TOPIC, *_NOTHING))
                    continue
                rolled_back = [tuple(each[:2]) for each in aborted or ()]
                rest = (high, stable, first, rolled_back, replica, records or b"")
                topics[source.topic].append((number, _translate(code), *rest))
        return FetchResponse_v11(answer.throttle_time_ms, 0, 0, list(topics.items()))


_NOTHING: tuple[Any, ...] = (UNKNOWN, UNKNOWN, UNKNOWN, [], UNKNOWN, b"")


def _translate(code: int) -> int:
    translated: int = code
    if code in (UNKNOWN_TOPIC_ID, _INCONSISTENT_TOPIC_ID):
        translated = UNKNOWN_TOPIC
    elif code in _MOVED:
        translated = kafka.NotLeaderForPartitionError.errno
    return translated


def is_refused(answer: FetchResponse_v11) -> bool:
    """Whether partitions are refused and no records came: aiokafka would ask again at once, thousands of times a second."""
    found = [row for _, rows in answer.topics for row in rows]
    return any(row[1] for row in found) and not any(row[-1] for row in found)
