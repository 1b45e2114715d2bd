"""The service's clock, as far as its answers tell it: by it a `latest` group begins, and what expired is found."""

from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import format_datetime
from typing import Any

import pytest
from botocore.exceptions import ClientError

from services.core.broker.errors import Unavailable
from services.core.broker.kinesis import incarnation as module
from services.core.broker.kinesis.aws import Timing
from services.core.broker.kinesis.incarnation import Incarnations, ServiceClock

_STARTED = 1_700_000_000.0


class _Service:
    """The client of an account whose clock goes its own way. Each answer takes a third of a second. throttles: so many first."""

    def __init__(self) -> None:
        self.now, self.asked, self.throttles, self.is_dated = _STARTED + 0.9, 0, 0, True

    async def describe_stream_summary(self, **_asked: Any) -> dict[str, Any]:
        self.asked += 1
        self.now += 1 / 3
        if self.throttles:
            self.throttles -= 1
            raise ClientError({"Error": {"Code": "LimitExceededException", "Message": ""}}, "DescribeStreamSummary")
        date = format_datetime(datetime.fromtimestamp(int(self.now), UTC), usegmt=True)
        summary = {
            "StreamARN": "arn:aws:kinesis:eu-west-1:1:stream/t",
            "StreamName": "t",
            "StreamCreationTimestamp": datetime.fromtimestamp(_STARTED, UTC),
            "RetentionPeriodHours": 24,
        }
        headers = {"date": date} if self.is_dated else {}
        return {"StreamDescriptionSummary": summary, "ResponseMetadata": {"HTTPHeaders": headers}}


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ASK_AGAIN_SECONDS", 0.0)
    monkeypatch.setattr(module, "_HOSTS_APART_SECONDS", 0.0)


@pytest.mark.parametrize("throttles", [0, 2])
async def test_a_group_begins_at_a_second_that_begins_while_it_joins(throttles: int) -> None:
    """If it fails, a machine whose clock is ahead never reads what comes first; or a new group gets what was there before."""
    service = _Service()
    service.throttles = throttles
    before = service.now
    begin = await Incarnations(service, Timing()).next_second("t")
    assert before * 1000 < begin <= service.now * 1000
    assert begin % 1000 == 0


async def test_times_are_the_services_and_never_ahead_of_it() -> None:
    """If it fails, what expired unread is passed over where this machine's clock is behind, or a quiet stream stops where it is
    ahead."""
    service, here = _Service(), 50.0
    incarnations = Incarnations(service, Timing())
    incarnations.clock = clock = ServiceClock(lambda: here)
    assert (await incarnations.find("t")).made_ms == _STARTED * 1000
    assert service.now - 1 < clock.now_ms() / 1000 <= service.now
    here += 3600
    assert service.now + 3599 < clock.now_ms() / 1000 <= service.now + 3600, "goes on with this machine's steady clock"


async def test_answers_without_a_date_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a group behind a proxy that drops the header waits for ever, or begins by a clock that may be wrong."""
    monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.05)
    service = _Service()
    service.is_dated = False
    with pytest.raises(Unavailable, match="Try: an endpoint"):
        await Incarnations(service, Timing()).next_second("t")


def test_the_newest_answer_counts() -> None:
    """If it fails, a clock that drifts, or was set, is believed for as long as the process lives."""
    here = 0.0
    clock = ServiceClock(lambda: here)

    def answer(second: int) -> Mapping[str, Any]:
        date = format_datetime(datetime.fromtimestamp(second, UTC), usegmt=True)
        return {"ResponseMetadata": {"HTTPHeaders": {"date": date}}}

    assert clock.observe({}) is None
    for second in (1_700_000_000, 1_600_000_000):
        assert clock.observe(answer(second)) == second * 1000
        assert clock.now_ms() == second * 1000
