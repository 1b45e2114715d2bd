"""What waits for destinations that are gone is found on every backend, and a new name goes on where the old one ended."""

import asyncio
import time
from contextlib import suppress

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import TopicExists
from services.core.broker.record import TopicPartition
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import RETRIER_GROUP, delay_topic
from services.core.undelivered.waiting import Bookmark, find_waiting, hand_over_positions
from tests.contract.harness import Harness
from tests.contract.traffic import DEADLINE, append, ignore_revoke, marks_of, numbered, numbers_of, poll, read
from tests.support.waiting_events import waiting_event

_LONG_MS = 100 * 365 * 86_400_000
DELAY = delay_topic(64)


async def test_what_waits_is_found(harness: Harness) -> None:
    """Broken: on this backend a destination is removed while events wait for it, and nobody is told."""
    async with harness.open() as broker:
        pipe = harness.fresh_name("pipe").replace(".", "-")
        old, claimed = f"{pipe}/old", f"{pipe}/new"
        for topic in (f"{pipe}.retry", f"{pipe}.parked", DELAY):
            with suppress(TopicExists):
                await broker.admin.create_topic(TopicSpec(topic, 1, retention_ms=_LONG_MS))
        now = time.time_ns() // 1_000_000  # another test may have made the delay topic, with a retention of weeks
        placed = {
            topic: [
                await append(broker, topic, [waiting_event(lane, n, at=now)])
                for n in range(3)
                for lane in (old, claimed)
            ]
            for topic in (f"{pipe}.retry", f"{pipe}.parked", DELAY)
        }
        first = await find_waiting(broker, {claimed}, Bookmark())
        assert first.unclaimed[old] == {DELAY: 3, f"{pipe}.parked": 3, f"{pipe}.retry": 3}
        assert claimed not in first.unclaimed
        await broker.admin.set_committed(f"{pipe}.old", f"{pipe}.parked", {0: placed[f"{pipe}.parked"][2].last})
        await broker.admin.set_committed(f"{pipe}.old", f"{pipe}.retry", {0: placed[f"{pipe}.retry"][5].last})
        await broker.admin.set_committed(RETRIER_GROUP, DELAY, {0: placed[DELAY][5].last})
        for bookmark in (Bookmark(), first.bookmark):
            found = await find_waiting(broker, {claimed}, bookmark)
            assert found.unclaimed[old] == {f"{pipe}.parked": 1}


async def test_a_new_name_goes_on_where_the_old_one_ended(harness: Harness) -> None:
    """Broken: a destination gets a new name, and its receiver never gets what it had not read, or all of the stream again."""
    async with harness.open() as broker:
        stream, pipe = (harness.fresh_name("topic").replace(".", "-") for _ in range(2))
        await broker.admin.create_topic(TopicSpec(stream, 1, retention_ms=_LONG_MS))
        await append(broker, stream, numbered(range(5)))
        async with broker.consumer(f"{pipe}.old", [stream], start="earliest", on_revoke=ignore_revoke) as consumer:
            await consumer.commit(marks_of(await read(consumer, 5)))
        await append(broker, stream, numbered(range(5, 10)))
        hook = {"url": "https://example.org/"}
        pipes = PipeFile.model_validate(
            {
                "streams": {stream: {}},
                "pipes": {pipe: {"sources": [stream], "destinations": [{"name": "new", "webhook": hook}]}},
                "removed": {f"{pipe}/old": {"deliver_to": f"{pipe}/new"}},
            }
        )
        settled = (await broker.admin.committed(f"{pipe}.old", stream))[0]
        assert await hand_over_positions(broker.admin, pipes) == {f"{pipe}/new": f"{pipe}/old"}
        assert (await broker.admin.committed(f"{pipe}.new", stream)) == {0: settled}
        async with broker.consumer(f"{pipe}.new", [stream], start="latest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 5)) == list(range(5, 10))
        assert await hand_over_positions(broker.admin, pipes) == {}  # it has begun


def _renamed(pipe: str, streams: list[str]) -> PipeFile:
    hook = {"url": "https://example.org/"}
    new = {"name": "new", "webhook": hook, "start": "latest", "renamed_from": "old"}
    return PipeFile.model_validate(
        {
            "streams": {stream: {} for stream in streams},
            "pipes": {pipe: {"sources": streams, "destinations": [new]}},
        }
    )


async def test_what_the_old_name_had_begun_and_not_settled_is_the_new_ones(harness: Harness) -> None:
    """Broken: a destination whose receiver was down since its first event is renamed, and the new one begins at the end."""
    async with harness.open() as broker:
        stream, pipe = (harness.fresh_name("topic").replace(".", "-") for _ in range(2))
        await broker.admin.create_topic(TopicSpec(stream, 2, retention_ms=_LONG_MS))
        async with broker.consumer(f"{pipe}.old", [stream], start="latest", on_revoke=ignore_revoke) as consumer:
            async with asyncio.timeout(DEADLINE):
                while len(consumer.assignment()) < 2:
                    await poll(consumer)
            await append(broker, stream, numbered(range(5)))
            assert numbers_of(await read(consumer, 5)) == list(range(5))
        pipes = _renamed(pipe, [stream])
        begun = [await broker.admin.has_begun(f"{pipe}.{name}", stream) for name in ("old", "new")]
        assert begun == [True, False]
        assert await hand_over_positions(broker.admin, pipes) == {f"{pipe}/new": f"{pipe}/old"}
        async with broker.consumer(f"{pipe}.new", [stream], start="latest", on_revoke=ignore_revoke) as consumer:
            assert numbers_of(await read(consumer, 5)) == list(range(5))


async def test_a_hand_over_that_was_cut_off_goes_on(harness: Harness) -> None:
    """Broken: the broker was away between two streams, and the new name begins at the end of the second one."""
    async with harness.open() as broker:
        streams = [harness.fresh_name("topic").replace(".", "-") for _ in range(2)]
        pipe = harness.fresh_name("topic").replace(".", "-")
        for stream in streams:
            await broker.admin.create_topic(TopicSpec(stream, 1, retention_ms=_LONG_MS))
            await append(broker, stream, numbered(range(5)))
            async with broker.consumer(f"{pipe}.old", [stream], start="earliest", on_revoke=ignore_revoke) as consumer:
                await consumer.commit(marks_of(await read(consumer, 5)))
            await append(broker, stream, numbered(range(5, 8)))
        await hand_over_positions(broker.admin, _renamed(pipe, streams[:1]))  # as far as it came
        pipes = _renamed(pipe, streams)
        assert await hand_over_positions(broker.admin, pipes) == {f"{pipe}/new": f"{pipe}/old"}
        async with broker.consumer(f"{pipe}.new", streams, start="latest", on_revoke=ignore_revoke) as consumer:
            assert sorted(numbers_of(await read(consumer, 6))) == [5, 5, 6, 6, 7, 7]


@pytest.mark.parametrize("ahead", [True, False])
async def test_a_name_that_was_given_up_goes_on_where_the_other_one_ended(harness: Harness, *, ahead: bool) -> None:
    """Broken: a name is used again, and its receiver gets what was delivered since, or misses what was not."""
    async with harness.open() as broker:
        stream, pipe = (harness.fresh_name("topic").replace(".", "-") for _ in range(2))
        await broker.admin.create_topic(TopicSpec(stream, 1, retention_ms=_LONG_MS))
        await append(broker, stream, numbered(range(10)))
        for name, count in ((f"{pipe}.new", 3 if ahead else 7), (f"{pipe}.old", 7 if ahead else 3)):
            async with broker.consumer(name, [stream], start="earliest", on_revoke=ignore_revoke) as consumer:
                batches = await read(consumer, 10)
                last = [offset for batch in batches for offset in batch.offsets][count - 1]
                await consumer.commit({TopicPartition(stream, batches[0].partition): last})
        pipes = _renamed(pipe, [stream])
        assert await hand_over_positions(broker.admin, pipes, {f"{pipe}/new": f"{pipe}/third"}) == {
            f"{pipe}/new": f"{pipe}/old"
        }
        assert await hand_over_positions(broker.admin, pipes, {f"{pipe}/new": f"{pipe}/third"}) == {}
        async with broker.consumer(f"{pipe}.new", [stream], start="latest", on_revoke=ignore_revoke) as consumer:
            expected = list(range(7 if ahead else 3, 10))
            assert numbers_of(await read(consumer, len(expected))) == expected
