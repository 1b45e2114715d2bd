"""Requests that aiokafka does not have, or encodes slowly: topics with their ids, the ends of leaders' epochs, and produce."""

import struct
from collections.abc import Sequence
from io import BytesIO
from typing import Any
from uuid import UUID

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.admin import DescribeGroupsRequest_v3, DescribeGroupsResponse_v3
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.produce import ProduceRequest_v7
from aiokafka.protocol.types import (
    Array,
    Boolean,
    CompactArray,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
)

CONSUMER = -1
UNKNOWN = -1


class Uuid(AbstractType[UUID]):  # type: ignore[misc]  # aiokafka has no types
    """Sixteen bytes; all zero where Kafka has none."""

    @classmethod
    def encode(cls, value: UUID) -> bytes:
        return value.bytes

    @classmethod
    def decode(cls, data: BytesIO) -> UUID:
        return UUID(bytes=data.read(16))


TAGS = ("tags", TaggedFields)


def by_id(*fields: tuple[str, Any]) -> CompactArray:
    """Topics, named by their ids, with these fields of each of their partitions."""
    return CompactArray(("topic_id", Uuid), ("partitions", CompactArray(*fields, TAGS)), TAGS)


_TEXT = CompactString("utf-8")
_NODES = CompactArray(Int32)
_BROKERS = CompactArray(("node_id", Int32), ("host", _TEXT), ("port", Int32), ("rack", _TEXT), TAGS)
_PARTITIONS = CompactArray(
    ("error_code", Int16),
    ("partition", Int32),
    ("leader", Int32),
    ("leader_epoch", Int32),
    ("replicas", _NODES),
    ("isr", _NODES),
    ("offline_replicas", _NODES),
    TAGS,
)
_TOPICS = CompactArray(
    ("error_code", Int16),
    ("topic", _TEXT),
    ("topic_id", Uuid),
    ("is_internal", Boolean),
    ("partitions", _PARTITIONS),
    ("authorized_operations", Int32),
    TAGS,
)


class DescribeTopicsResponse(Response):  # type: ignore[misc]  # aiokafka has no types
    """Metadata, version 12."""

    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("brokers", _BROKERS),
        ("cluster_id", _TEXT),
        ("controller_id", Int32),
        ("topics", _TOPICS),
        TAGS,
    )


class DescribeTopicsStruct(RequestStruct):  # type: ignore[misc]  # aiokafka has no types
    """Metadata, version 12."""

    FLEXIBLE_VERSION = True
    API_KEY = 3
    API_VERSION = 12
    RESPONSE_TYPE = DescribeTopicsResponse
    SCHEMA = Schema(
        ("topics", CompactArray(("topic_id", Uuid), ("topic", _TEXT), TAGS)),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        TAGS,
    )


_NO_ID = UUID(int=0)


class DescribeTopicsRequest(Request[DescribeTopicsStruct]):  # type: ignore[misc]  # aiokafka has no types
    """Topics with their ids; None: all of them. Creates none. rights: with what our user may do to each, as bits."""

    API_KEY = 3

    def __init__(self, topics: Sequence[str] | None, *, rights: bool = False) -> None:
        self._topics, self._rights = topics, rights

    def build(self, request_struct_class: type[DescribeTopicsStruct]) -> DescribeTopicsStruct:
        rows: list[tuple[UUID, str, dict[int, bytes]]] | None = None
        if self._topics is not None:
            rows = [(_NO_ID, topic, {}) for topic in self._topics]
        return request_struct_class(rows, False, self._rights, {})


class DeleteByIdResponse(Response):  # type: ignore[misc]  # aiokafka has no types
    """DeleteTopics, version 6."""

    API_KEY = 20
    API_VERSION = 6
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "responses",
            CompactArray(("topic", _TEXT), ("topic_id", Uuid), ("error_code", Int16), ("error_message", _TEXT), TAGS),
        ),
        TAGS,
    )


class DeleteByIdStruct(RequestStruct):  # type: ignore[misc]  # aiokafka has no types
    """DeleteTopics, version 6, which every Kafka since 2.8 understands."""

    FLEXIBLE_VERSION = True
    API_KEY = 20
    API_VERSION = 6
    RESPONSE_TYPE = DeleteByIdResponse
    SCHEMA = Schema(
        ("topics", CompactArray(("topic", _TEXT), ("topic_id", Uuid), TAGS)),
        ("timeout_ms", Int32),
        TAGS,
    )


class DeleteByIdRequest(Request[DeleteByIdStruct]):  # type: ignore[misc]  # aiokafka has no types
    """Deletes the topic of this id, whatever topic has its name by now. patience: in milliseconds."""

    API_KEY = 20

    def __init__(self, topic_id: UUID, patience: int) -> None:
        self._topic_id, self._patience = topic_id, patience

    def build(self, request_struct_class: type[DeleteByIdStruct]) -> DeleteByIdStruct:
        return request_struct_class([(None, self._topic_id, {})], self._patience, {})


_TOPIC = ("topic", String("utf-8"))
_ENDS = Array(("error_code", Int16), ("partition", Int32), ("leader_epoch", Int32), ("end_offset", Int64))
_EPOCHS = Array(("partition", Int32), ("current_leader_epoch", Int32), ("leader_epoch", Int32))


class EpochEndResponse(Response):  # type: ignore[misc]  # aiokafka has no types
    """OffsetForLeaderEpoch, version 3."""

    API_KEY = 23
    API_VERSION = 3
    SCHEMA = Schema(("throttle_time_ms", Int32), ("topics", Array(_TOPIC, ("partitions", _ENDS))))


class EpochEndStruct(RequestStruct):  # type: ignore[misc]  # aiokafka has no types
    """OffsetForLeaderEpoch, version 3."""

    API_KEY = 23
    API_VERSION = 3
    RESPONSE_TYPE = EpochEndResponse
    SCHEMA = Schema(("replica_id", Int32), ("topics", Array(_TOPIC, ("partitions", _EPOCHS))))


class EpochEndRequest(Request[EpochEndStruct]):  # type: ignore[misc]  # aiokafka has no types
    """Where the records of each of these epochs end in the leader's log. topics: [(topic, [(partition, epoch), …]), …]."""

    API_KEY = 23

    def __init__(self, topics: Sequence[tuple[str, Sequence[tuple[Any, ...]]]]) -> None:
        self._topics = topics

    def build(self, request_struct_class: type[EpochEndStruct]) -> EpochEndStruct:
        rows: list[tuple[str, list[tuple[int, int, int]]]] = [
            (topic, [(partition, UNKNOWN, epoch) for partition, epoch in partitions])
            for topic, partitions in self._topics
        ]
        return request_struct_class(CONSUMER, rows)


class GroupRightsStruct(RequestStruct):  # type: ignore[misc]  # aiokafka has no types
    """DescribeGroups, version 3; aiokafka reads its answer as that of version 2, without the rights."""

    API_KEY = 15
    API_VERSION = 3
    RESPONSE_TYPE = DescribeGroupsResponse_v3
    SCHEMA = DescribeGroupsRequest_v3.SCHEMA


class GroupRightsRequest(Request[GroupRightsStruct]):  # type: ignore[misc]  # aiokafka has no types
    """A group, with what our user may do to it, as bits."""

    API_KEY = 15

    def __init__(self, group: str) -> None:
        self._group = group

    def build(self, request_struct_class: type[GroupRightsStruct]) -> GroupRightsStruct:
        return request_struct_class([self._group], True)


_RESOURCE = (("kind", Int8), ("name", String("utf-8")))


class AlterConfigsResponse(Response):  # type: ignore[misc]  # aiokafka has no types
    """IncrementalAlterConfigs, version 0."""

    API_KEY = 44
    API_VERSION = 0
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("responses", Array(("error_code", Int16), ("error_message", String("utf-8")), *_RESOURCE)),
    )


class AlterConfigsStruct(RequestStruct):  # type: ignore[misc]  # aiokafka has no types
    """IncrementalAlterConfigs, version 0."""

    API_KEY = 44
    API_VERSION = 0
    RESPONSE_TYPE = AlterConfigsResponse
    SCHEMA = Schema(
        (
            "resources",
            Array(
                *_RESOURCE,
                ("configs", Array(("name", String("utf-8")), ("operation", Int8), ("value", String("utf-8")))),
            ),
        ),
        ("validate_only", Boolean),
    )


class AlterConfigRequest(Request[AlterConfigsStruct]):  # type: ignore[misc]  # aiokafka has no types
    """Set one setting of a topic; the others stay, which aiokafka's request does not do."""

    API_KEY = 44
    _TOPIC, _SET = 2, 0

    def __init__(self, topic: str, name: str, value: str) -> None:
        self._topic, self._setting = topic, (name, self._SET, value)

    def build(self, request_struct_class: type[AlterConfigsStruct]) -> AlterConfigsStruct:
        return request_struct_class([(self._TOPIC, self._topic, [self._setting])], False)


_ALL_REPLICAS = -1
_HEAD = struct.Struct(">hhii").pack
_NAME = struct.Struct(">h").pack
_COUNT = struct.Struct(">i").pack
_BATCH = struct.Struct(">ii").pack
_NO_TRANSACTION = -1

Topics = Sequence[tuple[str, Sequence[tuple[int, bytes]]]]
"""Topics with, for each of their partitions, its number and a record batch."""


class _Produce7(ProduceRequest_v7):  # type: ignore[misc]  # aiokafka has no types
    """Version 7, which every Kafka since 2.1 understands."""

    def encode(self) -> bytes:
        topics: Topics = self.topics
        pieces: list[bytes] = [_HEAD(_NO_TRANSACTION, _ALL_REPLICAS, self.timeout, len(topics))]
        for topic, batches in topics:
            name = topic.encode()
            pieces += [_NAME(len(name)), name, _COUNT(len(batches))]
            for partition, data in batches:
                pieces += [_BATCH(partition, len(data)), data]
        return b"".join(pieces)


class Produce(Request[_Produce7]):  # type: ignore[misc]  # aiokafka has no types
    """Store these batches on all in-sync replicas; the node gives up after `patience` milliseconds."""

    API_KEY = 0

    def __init__(self, topics: Topics, patience: int) -> None:
        self._topics, self._patience = topics, patience

    def build(self, version: type[_Produce7]) -> _Produce7:
        return version(None, _ALL_REPLICAS, self._patience, self._topics)
