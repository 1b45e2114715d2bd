"""Sends events to another stream, or to a topic of others: records are appended by key.

To a stream they go unchanged, with their headers. A topic of others gets either the Kafka binding of CloudEvents (binary mode:
the payload, and the attributes as headers) or only the key and the payload.
"""

import time
from collections.abc import Sequence
from operator import attrgetter

from services.core import event
from services.core.broker.errors import BrokerError, RecordRefused, RecordTooLarge
from services.core.broker.existing import target_name
from services.core.broker.producer import Producer, send_by_key
from services.core.broker.record import Batch, Record
from services.core.control.key_marks import KeyMarker
from services.core.http.failure import Failure
from services.core.pipe_file.topic_of_others import TopicTarget
from services.core.times import format_time
from services.core.undelivered.retry_state import PREFIX, own_headers
from services.expel.delivery import Delivery, Rendered
from services.expel.retry_policy import Outcome
from services.expel.webhook.body import BadRecord, render

MAX_EVENTS = 1000
MAX_BYTES = 900_000
"""One append of the broker layer."""
_NO_LIMIT = 1 << 62
_KEY = attrgetter("key")


class StreamSender:
    """Every failure of the broker is recoverable, except for a record that is too large. marker: marks the stream as keyed
    before it gets its first event with a key; None for a topic of others. compact: the stream is compacted, so it takes
    tombstones, and only events with keys."""

    def __init__(self, producer: Producer, marker: KeyMarker | None, topic: str, *, compact: bool = False) -> None:
        self._producer, self._marker, self._topic = producer, marker, topic
        self._renderer = _CompactedRenderer() if compact else _ValueRenderer()

    def render(self, batch: Batch) -> Rendered:
        """The parts are the values."""
        return render(batch, self._renderer, max_part=_NO_LIMIT)

    def prepare(self, delivery: Delivery) -> list[Record]:
        return [_unwrap(record) for record in delivery.records]

    async def send(self, delivery: Delivery) -> Outcome:
        """Append within the producer's deadline. Keys stay in order when only one delivery is sent at a time.

        An event from a time when the destination was a webhook is appended without its retry state.
        """
        records = delivery.records
        marker = self._marker
        if (
            marker is not None
            and not marker.is_marked(self._topic)
            and any(record.key is not None for record in records)
        ):
            try:
                await marker.mark(self._topic)
            except BrokerError as error:
                return dict.fromkeys(range(len(records)), self.explain(error))
        failed = await send_by_key(self._producer, self._topic, self.prepare(delivery))
        return {index: self.explain(error) for index, error in failed.items()} or None

    def explain(self, error: Exception) -> Failure:
        if isinstance(error, RecordTooLarge):
            return Failure("too_large", str(error), recoverable=False)
        if not isinstance(error, BrokerError):
            raise error
        return Failure("broker", f"the stream could not store it: {type(error).__name__}", recoverable=True, ours=True)


class TopicSender(StreamSender):
    """To a topic of others. pipe: names the source of events that name none.

    Its settings are others'. An event that it refuses is a dead letter: otherwise it would hold up all events behind it.
    """

    def __init__(self, producer: Producer, target: TopicTarget, pipe: str) -> None:
        super().__init__(producer, None, target_name(target.name, target.home))
        self._format, self._source = target.format, f"penstock/{pipe}".encode()

    def prepare(self, delivery: Delivery) -> list[Record]:
        """The records to append, without our headers."""
        records = super().prepare(delivery)
        now = time.time_ns() // 1_000_000
        if self._format == "plain":
            return [Record(record.key, record.value, min(record.timestamp, now)) for record in records]
        topics = [run.source.topic for run in delivery.runs for _ in run.offsets]
        return [self._as_cloud_event(record, topic, now) for record, topic in zip(records, topics, strict=True)]

    def explain(self, error: Exception) -> Failure:
        if isinstance(error, RecordRefused):
            return Failure("refused", str(error), recoverable=False)
        return super().explain(error)

    def _as_cloud_event(self, record: Record, topic: str, now: int) -> Record:
        """The required attributes first, then the event's others. now: ms; Kafka refuses a timestamp that is far ahead of it."""
        given = dict(reversed(record.headers))  # the first of a name counts
        own = {
            "ce_specversion": b"1.0",
            event.ID: given.get(event.ID, b""),
            "ce_source": self._source,
            "ce_type": f"penstock.{topic}".encode(),
            "ce_time": format_time(record.timestamp).encode(),
            event.CONTENT_TYPE: b"application/json",
        }
        kept = {name: given[name] for name in reversed(given) if not name.startswith("penstock_")}
        return Record(record.key, record.value, min(record.timestamp, now), tuple((own | kept).items()))


def _unwrap(record: Record) -> Record:
    if not record.headers or not record.headers[0][0].startswith(PREFIX):
        return record
    return Record(record.key, record.value, record.timestamp, own_headers(record))


class _ValueRenderer:
    """A payload may be anything but null."""

    def part(self, record: Record, headers: dict[str, bytes], event_id: bytes) -> bytes:
        if record.value is None:
            raise BadRecord("the value is null")
        return record.value

    def usual_parts(
        self, records: Sequence[Record], ids: Sequence[bytes], arrivals: Sequence[bytes]
    ) -> Sequence[bytes] | None:
        values = [record.value for record in records if record.value is not None]
        return values if len(values) == len(records) else None


class _CompactedRenderer(_ValueRenderer):
    """A compacted stream refuses an event without a key: it could never be replaced, and Kafka stores none."""

    def part(self, record: Record, headers: dict[str, bytes], event_id: bytes) -> bytes:
        if not record.key:
            raise BadRecord(
                "the stream is compacted, and the event has no key. Try: `key` at the stream that is the source"
            )
        return record.value or b""

    def usual_parts(
        self, records: Sequence[Record], ids: Sequence[bytes], arrivals: Sequence[bytes]
    ) -> Sequence[bytes] | None:
        if not all(map(_KEY, records)):
            return None
        return super().usual_parts(records, ids, arrivals)
