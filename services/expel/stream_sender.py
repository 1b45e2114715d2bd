"""Sends events to another stream: records are appended by key, with their headers, unchanged."""

from collections.abc import Sequence

from services.core.broker.errors import BrokerError, RecordTooLarge
from services.core.broker.producer import Producer, send_by_key
from services.core.broker.record import Batch, Record
from services.core.http_failure import Failure
from services.core.key_marks import KeyMarker
from services.core.retry_state import PREFIX, own_headers
from services.expel.delivery import Delivery, Rendered
from services.expel.retry_policy import Outcome
from services.expel.webhook.body import BadRecord, render

MAX_EVENTS = 1000
MAX_BYTES = 900_000
"""One append of the broker layer."""
_NO_LIMIT = 1 << 62


class StreamSender:
    """Every failure of the broker is recoverable, except for a record that is too large. marker: marks the stream as keyed
    before it gets its first event with a key."""

    def __init__(self, producer: Producer, marker: KeyMarker, topic: str) -> None:
        self._producer, self._marker, self._topic = producer, marker, topic

    def render(self, batch: Batch) -> Rendered:
        """The parts are the values."""
        return render(batch, _ValueRenderer(), max_part=_NO_LIMIT)

    async def send(self, delivery: Delivery) -> Outcome:
        """Append within the producer's deadline. Keys stay in order when only one delivery is sent at a time.

        An event from a time when the destination was a webhook is appended without its retry state.
        """
        records = delivery.records
        if not self._marker.is_marked(self._topic) and any(record.key is not None for record in records):
            try:
                await self._marker.mark(self._topic)
            except BrokerError as error:
                return dict.fromkeys(range(len(records)), _explain(error))
        failed = await send_by_key(self._producer, self._topic, [_unwrap(record) for record in records])
        return {index: _explain(error) for index, error in failed.items()} or None


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


def _explain(error: Exception) -> Failure:
    if isinstance(error, RecordTooLarge):
        return Failure("too_large", str(error), recoverable=False)
    if not isinstance(error, BrokerError):
        raise error
    return Failure("broker", f"the stream could not store it: {type(error).__name__}", recoverable=True, ours=True)
