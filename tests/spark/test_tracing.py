"""The trace context that a client gave, through a transform to the webhook."""

import asyncio

import orjson
import pytest

from services.core.event import TRACEPARENT
from tests.spark.log_pipeline import LogPipeline, event
from tests.unit.expel.receiver import Received, open_receiver
from tests.unit.expel.test_webhook import deliver, open_sender

PYTHON = """
def doubled(s):
    return s.selectExpr("event", "delay * 2 AS delay")
"""
TRANSFORMS = {"sql": "SELECT event, delay * 2 AS delay FROM s", "python": "traced.py:doubled"}


def trace_of(number: int) -> str:
    return f"00-{number:032x}-{number:016x}-01"


@pytest.mark.parametrize("kind", list(TRANSFORMS))
def test_trace_context_reaches_the_webhook(pipeline: LogPipeline, kind: str) -> None:
    """If this fails, a trace ends at the transform, and who looks for a slow event cannot follow it."""
    (pipeline.folder / "traced.py").write_text(PYTHON)
    numbers = range(1, 6)
    pipeline.send(event(n, orjson.dumps({"delay": n}), **{TRACEPARENT: trace_of(n).encode()}) for n in numbers)
    pipeline.run(pipeline.pipe(columns="delay INT", **{kind: TRANSFORMS[kind]}), len(numbers))

    stored = pipeline.out

    async def receive() -> list[Received]:
        async with open_receiver() as receiver, open_sender(receiver.url) as sender:
            for record in stored:
                assert await sender.send(deliver(sender, [record])) is None
            return receiver.requests

    found = {one["data"]["delay"]: request for request in asyncio.run(receive()) for one in request.events}  # type: ignore[index]
    assert {n: found[2 * n].headers[TRACEPARENT] for n in numbers} == {n: trace_of(n) for n in numbers}
    assert {n: found[2 * n].events[0][TRACEPARENT] for n in numbers} == {n: trace_of(n) for n in numbers}
