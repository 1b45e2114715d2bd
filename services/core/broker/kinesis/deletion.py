"""Deletes a stream: by its incarnation, so that a newer one of the same name stays, or by its name alone."""

import asyncio
import time
from typing import Any

from services.core.broker.errors import Unavailable, UnknownTopic
from services.core.broker.kinesis.aws import Timing, bounded
from services.core.broker.kinesis.incarnation import Incarnations
from services.core.broker.kinesis.streams import PAUSE_S, status_of
from services.core.clock import boot_seconds

_FRESH_S = 2.0
"""A description that took no longer is always young enough to delete by it."""
_ATTEMPTS = 3


async def delete_stream(
    kinesis: Any, incarnations: Incarnations, topic: str, incarnation: str | None, timing: Timing
) -> None:
    """As `Admin.delete_topic`: returns when the stream is gone. With an incarnation, a repeat after a lost answer deletes the
    same stream or none."""
    if incarnation is not None:
        await _require_incarnation(incarnations, topic, incarnation, timing)
    async with bounded(f"delete {topic}", timing.request):
        await kinesis.delete_stream(StreamName=topic, EnforceConsumerDeletion=True)
    deadline = time.monotonic() + timing.settle
    while await status_of(kinesis, topic, timing) is not None:
        if time.monotonic() > deadline:
            raise Unavailable(f"{topic} is still being deleted after {timing.settle:g} s")
        await asyncio.sleep(PAUSE_S)


async def _require_incarnation(incarnations: Incarnations, topic: str, incarnation: str, timing: Timing) -> None:
    """Returns just after the service has said that the stream of this name is this one. Raises UnknownTopic when it is another
    one; Unavailable when no answer was young enough.

    Kinesis cannot compare and delete in one request, so the comparison must be recent. An answer counts if it took at most
    `_FRESH_S`, or at most twice as long as the answer before it, and never longer than a request may take. If this process was
    frozen meanwhile, it asks again. A risk remains: the stream is deleted and created again within that time. It must pass
    through DELETING and CREATING. AWS names no duration for that; we assume that it takes longer than a request may.
    """
    limit, took = _FRESH_S, 0.0
    for _ in range(_ATTEMPTS):
        began = boot_seconds()
        if (await incarnations.find(topic, max_age=0.0)).name != incarnation:
            raise UnknownTopic(f"stream {topic} was created again: the stream that was to be deleted is gone")
        took = boot_seconds() - began
        if took <= limit:
            return
        limit = min(max(limit, 2 * took), timing.request)
    raise Unavailable(
        f"{topic} was not deleted: it took {took:.1f} s to learn which stream has this name. Another stream may have it now. "
        "Try: the same again, on a machine that is less busy"
    )
