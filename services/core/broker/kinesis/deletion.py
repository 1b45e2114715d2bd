"""Deletes a stream, and no other one that has its name by now."""

import asyncio
import time
from typing import Any

from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.kinesis.aws import Timing, bounded
from services.core.broker.kinesis.incarnation import Incarnations
from services.core.broker.kinesis.streams import PAUSE_S, status_of
from services.core.clock import boot_seconds

_SURE_S = 2.0
"""A description that took no longer is always young enough to delete by it."""
_DESCRIPTIONS = 3


async def delete_stream(
    kinesis: Any, incarnations: Incarnations, topic: str, incarnation: str | None, timing: Timing
) -> None:
    """As `Admin.delete_topic`: returns when the stream is gone. After a lost answer a repeat deletes the same stream or none."""
    if incarnation is not None:
        await _require(incarnations, topic, incarnation, timing)
    async with bounded(f"delete {topic}", timing.request):
        await kinesis.delete_stream(StreamName=topic, EnforceConsumerDeletion=True)
    deadline = time.monotonic() + timing.settle
    while await status_of(kinesis, topic, timing) is not None:
        if time.monotonic() > deadline:
            raise Unavailable(f"{topic} is still being deleted after {timing.settle:g} s")
        await asyncio.sleep(PAUSE_S)


async def _require(incarnations: Incarnations, topic: str, incarnation: str, timing: Timing) -> None:
    """Returns just after the service has said that the stream of this name is this one. Raises UnknownTopic when it is another
    one; Unavailable when no answer was young enough.

    Kinesis does not compare and delete in one request. So an answer counts only if it took no longer than `_SURE_S` or, on a slow
    day, than twice the one before; never longer than a request may take. Whoever was frozen meanwhile, if only for seconds, asks
    again. Until another stream of this name can be deleted, the former one must be DELETING until it is gone, and the new one
    CREATING until it is ACTIVE. AWS names no time for that. It is safe if that takes longer than a request may.
    """
    limit, took = _SURE_S, 0.0
    for _ in range(_DESCRIPTIONS):
        began = boot_seconds()
        if (await incarnations.find(topic, max_age=0.0)).name != incarnation:
            raise UnknownTopic(f"stream {topic} was created again since: it is another one")
        took = boot_seconds() - began
        if took <= limit:
            return
        limit = min(max(limit, 2 * took), timing.request)
    raise Unavailable(
        f"{topic} was not deleted: it took {took:.1f} s to find out which stream it is, so another one may have its name by now. "
        "Try: the same again, on a machine that is less busy"
    )
