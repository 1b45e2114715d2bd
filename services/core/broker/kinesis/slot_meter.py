"""What each partition of a stream was given: from it an autoscaler knows where a shard can be split."""

from services.core import metrics


class SlotMeters:
    """Counts what was stored, of all streams of this process."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], _Meter] = {}

    def count(self, topic: str, partition: int, size: int) -> None:
        """An entry of so many bytes was stored."""
        meter = self._known.get((topic, partition))
        if meter is None:
            meter = self._known[topic, partition] = _Meter(topic, partition)
        meter.bytes.inc(size)
        meter.entries.inc()


class _Meter:
    __slots__ = ("bytes", "entries")

    def __init__(self, topic: str, partition: int) -> None:
        self.bytes = metrics.BROKER_PARTITION_BYTES.labels(topic, str(partition))
        self.entries = metrics.BROKER_PARTITION_ENTRIES.labels(topic, str(partition))
