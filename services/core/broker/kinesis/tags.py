"""A stream's tags."""

from typing import Any

from services.core.broker.kinesis.faults import bounded
from services.core.broker.kinesis.timing import Timing

_MOST = 50
"""A stream has no more tags, and an answer holds as many. Without this limit it may hold fewer."""


async def read_tags(kinesis: Any, topic: str, timing: Timing) -> dict[str, str]:
    """All of them. Raises BrokerError kinds."""
    async with bounded(f"list tags of {topic}", timing.request):
        answer = await kinesis.list_tags_for_stream(StreamName=topic, Limit=_MOST)
    return {tag["Key"]: tag.get("Value", "") for tag in answer["Tags"]}
