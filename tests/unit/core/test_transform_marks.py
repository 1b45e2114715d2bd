"""The marks of transforms that have begun, beside the other records of `penstock.control`."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.control.key_marks import read_key_marks, write_key_marks
from services.core.control.pauses import Pause, list_paused, write_pause
from services.core.control.transform_marks import Begin, TransformMarks, read_transform_mark, write_transform_mark
from services.core.pipe_file.topic_names import CONTROL
from services.core.undelivered.waiting import Bookmark, read_bookmark, write_bookmark


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with open_broker(f"log://{tmp_path}") as opened:
        await opened.admin.create_topic(TopicSpec(CONTROL, 1))
        yield opened


async def test_the_newest_mark_of_a_pipe_counts(broker: Broker) -> None:
    """Broken: a reset, or another pipe's mark, is taken for the mark of this one."""
    marks = TransformMarks(broker.reader)
    async with Producer(broker.appender) as producer:
        await write_transform_mark(producer, "a", "begun", "1", "transform")
        await write_transform_mark(producer, "ab", "begun", "2", "transform")
        await marks.refresh()
        first = marks.of("a")
        assert first is not None
        assert (first.has_begun, first.fits("1"), first.fits("2"), marks.of("b")) == (True, True, False, None)
        await write_transform_mark(producer, "a", "reset", "1", "ann")
    await marks.refresh()
    second = marks.of("a")
    assert second is not None
    assert (second.has_begun, second.fits("1"), second.by) == (False, False, "ann")
    assert await read_transform_mark(broker.reader, "a") == second


async def test_where_a_reset_to_a_time_begins(broker: Broker) -> None:
    """Broken: a transform reads a mark of a reset without its offsets, and begins at the oldest event; or with those of an
    earlier reset."""
    begins = {"s": Begin("made-once", {0: 7, 1: 1 << 40})}
    async with Producer(broker.appender) as producer:
        await write_transform_mark(producer, "a", "reset", "1", "ann", begins=begins, former="a.20261123T034000Z")
        mark = await read_transform_mark(broker.reader, "a")
        assert mark is not None
        assert (mark.has_begun, mark.begins, mark.former) == (False, begins, "a.20261123T034000Z")
        await write_transform_mark(producer, "a", "reset", "1", "ann")
    mark = await read_transform_mark(broker.reader, "a")
    assert mark is not None
    assert (mark.begins, mark.former) == ({}, "")


@pytest.mark.parametrize(
    "value", [b"{", b'{"state":"moved"}', b'{"state":"reset","checkpoint":"","by":"","at":1,"version":2}']
)
async def test_an_unreadable_mark_says_begun(broker: Broker, value: bytes) -> None:
    """Broken: damage, or the mark of a later version, lets a transform without its checkpoint begin again."""
    async with Producer(broker.appender) as producer:
        (await producer.send_to(CONTROL, {0: [Record(b"transform:a", value, 1)]})).raise_first()
    mark = await read_transform_mark(broker.reader, "a")
    assert mark is not None
    assert (mark.has_begun, mark.fits("any")) == (True, True)


async def test_no_control_topic(tmp_path: Path) -> None:
    """Broken: a command fails on a broker that never had a fleet."""
    async with open_broker(f"log://{tmp_path}") as broker:
        assert await read_transform_mark(broker.reader, "a") is None


async def test_other_readers_of_the_topic(broker: Broker) -> None:
    """Broken: a mark is taken for a pause, for the key of a stream or for a bookmark, or one of those for a mark."""
    pause = Pause("paused", "operator", "ann", 1)
    async with Producer(broker.appender) as producer:
        await write_bookmark(producer, Bookmark(lanes=frozenset({"a/b"})), 1)
        await write_pause(producer, "a", pause)
        await write_key_marks(producer, ["a"], "none", "ann")
        await write_transform_mark(producer, "a", "begun", "1", "transform")
    assert await list_paused(broker.reader, {}) == {"a": pause}
    assert (await read_key_marks(broker.reader))["a"].state == "none"
    assert (await read_bookmark(broker.reader)).lanes == {"a/b"}
    mark = await read_transform_mark(broker.reader, "a")
    assert mark is not None
    assert mark.checkpoint == "1"
