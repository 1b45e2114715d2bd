"""Events that a pipe writes to another stream."""

from typing import cast

from services.core.broker.contract import Reader
from services.core.broker.errors import Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.broker.retry import AppendPolicy
from services.core.control.key_marks import KeyMarker
from services.core.pipe_file.topic_names import CONTROL
from services.expel.delivery import Delivery
from services.expel.stream_sender import StreamSender
from tests.support.memory_appender import MemoryAppender

_FAST = AppendPolicy(deadline=0.2, append_timeout=0.2, base_wait=0.01, max_wait=0.02)


def _delivery(*keys: bytes | None) -> Delivery:
    records = [Record(key, b"{}", 1) for key in keys]
    return Delivery([b"{}"] * len(keys), [b"e"] * len(keys), [0] * len(keys), records, [])


async def test_the_stream_is_marked_before_its_first_event_with_a_key() -> None:
    """Broken: a stream that gets its keys from a pipe, not from clients, counts as one without, and the autoscaler moves them."""
    appender = MemoryAppender()
    appender.create("archive")
    appender.create(CONTROL, 1)
    async with Producer(appender, policy=_FAST) as producer:
        sender = StreamSender(producer, KeyMarker(producer, cast("Reader", None), "expel"), "archive")
        assert await sender.send(_delivery(None, None)) is None
        assert appender.records(CONTROL) == []
        appender.errors = [Unavailable("away")] * 1000
        outcome = await sender.send(_delivery(None, b"k"))
        assert isinstance(outcome, dict)
        assert [failure.recoverable for failure in outcome.values()] == [True, True]
        appender.errors.clear()
        assert (len(appender.records("archive")), appender.records(CONTROL)) == (2, [])
        for _ in range(2):
            assert await sender.send(_delivery(None, b"k")) is None
        assert [record.key for record in appender.records(CONTROL)] == [b"keys:archive"]
        assert len(appender.records("archive")) == 6
