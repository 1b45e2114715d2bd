"""Waiting until a stream can be used, and changed again."""

import asyncio
import time
from typing import Any

from services.core.broker.errors import Throttled, Unavailable, UnknownTopic
from services.core.broker.kinesis.faults import bounded
from services.core.broker.kinesis.timing import Timing

PAUSE_S = 0.05


async def status_of(kinesis: Any, topic: str, timing: Timing) -> str | None:
    """The stream's status: ACTIVE, UPDATING and so on; None: there is none."""
    try:
        async with bounded(f"describe {topic}", timing.request):
            answer = await kinesis.describe_stream_summary(StreamName=topic)
    except UnknownTopic:
        return None
    return str(answer["StreamDescriptionSummary"]["StreamStatus"])


async def settle(kinesis: Any, topic: str, timing: Timing) -> None:
    """Until the stream is ACTIVE. Asks again when it is throttled or away. Raises Unavailable after `Timing.settle` seconds."""
    deadline = time.monotonic() + timing.settle
    pause = PAUSE_S
    while (status := await _status_or_why_not(kinesis, topic, timing)) != "ACTIVE":
        if time.monotonic() > deadline:
            raise Unavailable(f"{topic} is still {status} after {timing.settle:g} s")
        await asyncio.sleep(pause)
        pause = min(1.0, 2 * pause)


async def _status_or_why_not(kinesis: Any, topic: str, timing: Timing) -> str | None:
    try:
        return await status_of(kinesis, topic, timing)
    except (Throttled, Unavailable) as error:
        return f"of unknown status ({error})"
