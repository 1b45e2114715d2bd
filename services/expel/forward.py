"""Another stream as a destination: records go on by key, with their headers, as they are."""

from collections.abc import Sequence

from services.core.broker.errors import BrokerError, RecordTooLarge
from services.core.broker.key_send import send_by_key
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.retry_state import PREFIX, own_headers
from services.expel.body import BadRecord, Rendered, render
from services.expel.delivery import Delivery
from services.expel.outcome import Failure, Outcome

MAX_EVENTS = 1000
MAX_BYTES = 900_000
"""One append of the broker layer."""
_NO_LIMIT = 1 << 62


class StreamSender:
    """Our own broker's failures are recoverable without end; only a record that never fits is given up."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer, self._topic = producer, topic

    def render(self, batch: Batch) -> Rendered:
        """As in Sender: parts are the values, of which nothing is asked but to be there."""
        return render(batch, _AnyValue(), max_part=_NO_LIMIT)

    async def send(self, delivery: Delivery) -> Outcome:
        """As in Sender. Retries within the producer's deadline; the order per key holds as long as one delivery is under way.

        What comes back from a time when the destination was a webhook goes on as it was before.
        """
        failed = await send_by_key(self._producer, self._topic, [_as_it_was(record) for record in delivery.records])
        return {index: _explain(error) for index, error in failed.items()} or None


def _as_it_was(record: Record) -> Record:
    if not record.headers or not record.headers[0][0].startswith(PREFIX):
        return record
    return Record(record.key, record.value, record.timestamp, own_headers(record))


class _AnyValue:
    """Nothing is asked of a payload but to be there."""

    def part(self, record: Record, headers: dict[str, bytes], event_id: bytes) -> bytes:
        """As in Renderer."""
        if record.value is None:
            raise BadRecord("the value is null")
        return record.value

    def usual_parts(
        self, records: Sequence[Record], ids: Sequence[bytes], arrivals: Sequence[bytes]
    ) -> Sequence[bytes] | None:
        """As in Renderer."""
        values = [record.value for record in records if record.value is not None]
        return values if len(values) == len(records) else None


def _explain(error: Exception) -> Failure:
    if isinstance(error, RecordTooLarge):
        return Failure("too_large", str(error), recoverable=False)
    if not isinstance(error, BrokerError):
        raise error
    return Failure("broker", f"the stream could not take it: {type(error).__name__}", recoverable=True, ours=True)
