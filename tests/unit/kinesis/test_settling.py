"""Waiting for a stream that changes."""

from typing import Any

import pytest
from botocore.exceptions import ClientError

from services.core.broker.errors import Unavailable
from services.core.broker.kinesis import streams
from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.streams import settle


class _Busy:
    """Refuses so many looks, then says what it is told."""

    def __init__(self, refusals: int, status: str = "ACTIVE") -> None:
        self.refusals, self.status = refusals, status

    async def describe_stream_summary(self, **_asked: Any) -> dict[str, Any]:
        if self.refusals > 0:
            self.refusals -= 1
            raise ClientError(
                {"Error": {"Code": "LimitExceededException", "Message": "slower"}}, "DescribeStreamSummary"
            )
        return {"StreamDescriptionSummary": {"StreamStatus": self.status}}


async def test_a_refused_look_does_not_end_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an update that was accepted counts as refused because a look at it was, and is made twice."""
    monkeypatch.setattr(streams, "PAUSE_S", 0.0)
    busy = _Busy(3)
    await settle(busy, "t", Timing())
    assert busy.refusals == 0


async def test_the_wait_ends_with_the_last_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: it waits for ever; or nobody says what for."""
    monkeypatch.setattr(streams, "PAUSE_S", 0.0)
    with pytest.raises(Unavailable, match="slower"):
        await settle(_Busy(10**9), "t", Timing(settle=0.01))
