"""The story of an event is found on every backend."""

import time
from contextlib import suppress

from pyroaring import BitMap

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import TopicExists
from services.core.broker.record import Record, TopicPartition
from services.core.event import ARRIVAL, ID, ORIGIN, Origin
from services.core.ledger.report import TELEMETRY, OriginSet, Report, pack_numbers
from services.core.pipe_file.pipes import PipeFile
from services.core.story.find import find_story, make_scope
from services.core.story.search import Limits
from services.core.undelivered.dead_letter import make_dead_letter
from tests.contract.harness import Harness
from tests.contract.traffic import append, ignore_revoke, read

_LONG_MS = 100 * 365 * 86_400_000
LIMITS = Limits(seconds=300, records=1_000_000, bytes=100_000_000, linger=300)


async def test_a_story_is_found(harness: Harness) -> None:
    """Broken: on this backend `penstock event` finds nothing, or says that a delivered event waits.

    The four events have one id: a search takes seconds on Kinesis.
    """
    async with harness.open() as broker:
        stream, pipe = (harness.fresh_name(hint).replace(".", "-") for hint in ("topic", "pipe"))
        hook = {"url": "https://example.org/"}
        pipes = PipeFile.model_validate(
            {
                "streams": {stream: {}},
                "pipes": {pipe: {"sources": [stream], "destinations": [{"name": "new", "webhook": hook}]}},
            }
        )
        for topic in (stream, f"{pipe}.dead", TELEMETRY):
            with suppress(TopicExists):
                await broker.admin.create_topic(TopicSpec(topic, 1, retention_ms=_LONG_MS))
        now = time.time_ns() // 1_000_000
        events = [
            Record(
                b"k",
                b"{}",
                now,
                (
                    (ID, pipe.encode()),
                    (ARRIVAL, b"%d" % now),
                    (ORIGIN, Origin(pipe.replace("-", ""), 0, number).pack()),
                ),
            )
            for number in range(4)
        ]
        offsets = [(await append(broker, stream, [event])).last for event in events]
        told = OriginSet("delivered", pipe.replace("-", ""), 0, None, pack_numbers(BitMap([0])))
        report = Report(node="expel", instance="one", pipe=pipe, destination="new", at_ms=now, sets=(told,))
        await append(broker, TELEMETRY, [Record(b"expel/one", report.encode(), now)])
        letter = make_dead_letter(
            events[1],
            reason="http_404",
            detail="",
            node="expel",
            pipe=pipe,
            destination="new",
            attempts=1,
            first_failure=now,
            source=TopicPartition(stream, 0),
            offset=offsets[1],
            now_ms=now,
        )
        await append(broker, f"{pipe}.dead", [letter])
        async with broker.consumer(f"{pipe}.new", [stream], start="earliest", on_revoke=ignore_revoke) as consumer:
            await read(consumer, 4)  # joining waits until a new cluster has groups
            await consumer.commit({TopicPartition(stream, 0): offsets[2]})

        scope = make_scope(pipes, pipe, now + 1000)
        found = (await find_story(broker, pipes, pipe, scope, LIMITS)).events
        assert [(event.stream, event.offset) for event in found] == [(stream, str(offset)) for offset in offsets]
        states = [event.pipes[0].destinations[0].state for event in found]
        assert states == ["delivered", "dead", "unknown", "not_read"]
