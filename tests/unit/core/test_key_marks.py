"""The record of whether a stream ever got an event with a key."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.control.key_marks import KeyMarker, read_key_marks, write_key_marks
from services.core.pipe_file.topic_names import CONTROL
from tests.contract.traffic import append, until


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with LogBroker.open(str(tmp_path)) as opened:
        yield opened


@pytest.fixture
async def producer(broker: Broker) -> AsyncIterator[Producer]:
    async with Producer(broker.appender) as opened:
        yield opened


async def _states(broker: Broker) -> dict[str, str]:
    return {stream: mark.state for stream, mark in (await read_key_marks(broker.reader)).items()}


async def test_a_key_is_never_forgotten(broker: Broker, producer: Producer) -> None:
    """Broken: a stream that is created again, or a record that a later version wrote, makes a keyed stream a keyless one."""
    assert await _states(broker) == {}, "there is no topic"
    await broker.admin.create_topic(TopicSpec(CONTROL, 1))
    await write_key_marks(producer, ["a", "b"], "none", "me")
    await write_key_marks(producer, ["a"], "seen", "ingest")
    await write_key_marks(producer, ["a"], "none", "me")
    odd = [Record(b"keys:c", b"of a later version", 1), Record(b"pause:d", b"{}", 2), Record(None, None, 3)]
    await append(broker, CONTROL, odd, 0)
    assert await _states(broker) == {"a": "seen", "b": "none", "c": "seen"}


async def test_one_record_per_stream(broker: Broker, producer: Producer) -> None:
    """Broken: each request or each start adds a record to a topic that is kept for ever."""
    await broker.admin.create_topic(TopicSpec(CONTROL, 1))
    marker = KeyMarker(producer, broker.reader, "ingest")
    await marker.load()
    assert not marker.is_marked("orders")
    await asyncio.gather(*(marker.mark("orders") for _ in range(20)))
    assert marker.is_marked("orders")
    restarted = KeyMarker(producer, broker.reader, "ingest")
    await restarted.load()
    assert restarted.is_marked("orders")
    await restarted.mark("orders")
    assert (await broker.reader.describe(CONTROL))[0].end == 1


async def test_all_wait_for_one_append(broker: Broker, producer: Producer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: while the broker does not answer, the hundredth request waits for a hundred time limits, and holds its bytes; or
    a client that goes away takes the mark from the others."""
    marker, calls, answer = KeyMarker(producer, broker.reader, "ingest"), 0, asyncio.Event()

    async def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        await answer.wait()
        raise Unavailable("away")

    monkeypatch.setattr(producer, "send_to", fail)
    waiting = [asyncio.create_task(marker.mark("orders")) for _ in range(20)]
    other = asyncio.create_task(marker.mark("payments"))
    await until(lambda: calls == 2, "one append for each stream")
    waiting[0].cancel()
    answer.set()
    results = await asyncio.gather(*waiting, other, return_exceptions=True)
    assert [type(result) for result in results] == [asyncio.CancelledError, *[Unavailable] * 20]
    assert calls == 2


async def test_a_broker_that_was_set_up_anew_is_marked_again(
    broker: Broker, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a service that runs meanwhile believes its own memory, and the autoscaler the mark `none` of the new topic."""
    monkeypatch.setattr("services.core.control.key_marks.CHECK_EVERY_S", 0.01)
    await broker.admin.create_topic(TopicSpec(CONTROL, 1))
    marker, stopping = KeyMarker(producer, broker.reader, "ingest"), asyncio.Event()
    await marker.mark("orders")
    running = asyncio.create_task(marker.run(stopping))
    await broker.admin.delete_topic(CONTROL)
    await broker.admin.create_topic(TopicSpec(CONTROL, 1))
    await write_key_marks(producer, ["orders"], "none", "me")
    await until(lambda: not marker.is_marked("orders"), "the marks are read again")
    await marker.mark("orders")
    assert await _states(broker) == {"orders": "seen"}
    stopping.set()
    await running


async def test_a_mark_that_is_not_durable_is_none(
    broker: Broker, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after a failure of the broker an event with a key is stored without a mark."""
    marker = KeyMarker(producer, broker.reader, "ingest")
    await marker.mark("orders")
    assert not marker.is_marked("orders"), "there is no topic, so every stream counts as keyed"
    await broker.admin.create_topic(TopicSpec(CONTROL, 1))
    monkeypatch.setattr("services.core.control.key_marks._ASK_AGAIN_S", 0.0)
    marker = KeyMarker(producer, broker.reader, "ingest")

    async def fail(*_: object, **__: object) -> None:
        raise Unavailable("away")

    with monkeypatch.context() as away:
        away.setattr(producer, "send_to", fail)
        away.setattr(broker.reader, "read", fail)
        await marker.load()
        with pytest.raises(Unavailable):
            await marker.mark("orders")
    assert not marker.is_marked("orders")
    await marker.mark("orders")
    assert await _states(broker) == {"orders": "seen"}
