"""Events that wait for another attempt or for a resume, as expel and the retrier have them in their topics."""

from collections.abc import Sequence

from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.undelivered.retry_state import RetryState, wrap


def waiting_event(lane: str, number: int, *, due: int = 0, at: int = 1) -> Record:
    """Event `e<number>`, as it was handed over for this lane at `at` (ms)."""
    pipe, _, destination = lane.partition("/")
    state = RetryState(pipe, destination, 4, 1, 77, due, "http_503", "busy", f"s:0:{number}", 1_700_000_000_000)
    record = Record(b"k", b'{"n":%d}' % number, state.time, (("ce_id", b"e%d" % number), ("penstock_arrival", b"1")))
    return wrap(record, state, at)


async def store(broker: Broker, topic: str, records: Sequence[Record]) -> None:
    """In its first partition."""
    async with Producer(broker.appender) as producer:
        (await producer.send_to(topic, {0: list(records)})).raise_first()


async def stored(broker: Broker, topic: str) -> list[Record]:
    """All that the topic holds."""
    found: list[Record] = []
    for partition, held in (await broker.reader.describe(topic)).items():
        offset = held.start
        while (batch := await broker.reader.read(topic, partition, offset, max_records=1000)) is not None:
            found += batch.records
            offset = batch.offsets[-1] + 1
    return found
