"""The produce request, encoded with one copy of its batches; aiokafka's own copies them once for each level of its schema."""

import struct
from collections.abc import Sequence

from aiokafka.protocol.api import Request
from aiokafka.protocol.produce import ProduceRequest_v7

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
        """Called by aiokafka."""
        return version(None, _ALL_REPLICAS, self._patience, self._topics)
