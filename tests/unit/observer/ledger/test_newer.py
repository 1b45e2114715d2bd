"""An observer that is older than the services that report to it: nothing that they settled is missing."""

from datetime import timedelta

import msgspec
import pytest

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.ledger.report import TELEMETRY, Decoded, Report, decode_known
from services.observer import follower
from services.observer.ledger.finality import NEWER_REPORTS
from tests.unit.observer.ledger.following import FINAL_MS, Observer, alive, report
from tests.unit.observer.ledger.stories import accept, tell


def of_the_future(told: Report) -> bytes:
    """With an outcome that this version does not know."""
    return told.encode().replace(b"skipped", b"expired")


async def test_an_outcome_of_a_newer_version_is_no_loss(broker: Broker) -> None:
    """Broken: during an upgrade in the wrong order, or on the way back, the observer raises alarms about events that arrived."""
    before = metrics.NOT_UNDERSTOOD.labels("report", "outcome")._value.get()
    expired = tell("expel", "late", "skipped", [7, 8], destination="ops")
    strange = msgspec.msgpack.encode([1, "archiver", "x", "late", None, FINAL_MS])
    async with Producer(broker.appender) as producer:
        await report(broker, accept(range(10)), tell("transform", "late", "passed", range(10)))
        await report(broker, tell("expel", "late", "delivered", range(7), destination="ops"))
        records = [Record(b"k", value, FINAL_MS) for value in (of_the_future(expired), strange)]
        await broker.appender.append(TELEMETRY, 0, records, timeout=600)
        observer = Observer(broker, producer, FINAL_MS)
        async with observer.running():
            await observer.caught_up()
            await report(broker, *alive(FINAL_MS))
            await observer.until(lambda: len(observer.final) == 1)
            row, newer = observer.row(), observer.follower.newer
    assert (row.missing, row.steps[-1].outcomes["unknown"], row.steps[-1].outcomes["delivered"]) == (1, 2, 7)
    assert metrics.NOT_UNDERSTOOD.labels("report", "outcome")._value.get() == before + 1
    ((state, text),) = newer.as_reasons("late", FINAL_MS)
    assert state == "degraded"
    assert "1 with an unknown node, 1 with an unknown outcome" in text
    assert newer.as_reasons("late", FINAL_MS + 3_600_000) == []


def of_version_2(told: Report) -> bytes:
    """In a format of which this version understands nothing."""
    return msgspec.msgpack.encode([2, *msgspec.msgpack.decode(told.encode())[1:]])


def decode_version_2(value: bytes | None) -> Decoded:
    """As a version that knows both formats."""
    assert value is not None
    return decode_known(msgspec.msgpack.encode([1, *msgspec.msgpack.decode(value)[1:]]))


async def test_what_a_report_of_a_newer_format_may_have_settled_is_not_lost(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: of two instances of expel one is newer, and everything that it delivered counts as lost; or the observer that is
    upgraded then does not read its reports any more."""
    monkeypatch.setattr(follower, "_LAGS_BACK", timedelta())  # nothing is read again for the lags
    settled = tell("expel", "late", "delivered", [7, 8, 9], destination="ops")
    async with Producer(broker.appender) as producer:
        await report(broker, accept(range(10)), tell("transform", "late", "passed", range(10)))
        await report(broker, tell("expel", "late", "delivered", range(7), destination="ops"))
        observer = Observer(broker, producer, FINAL_MS - 60_000)
        async with observer.running():
            await observer.caught_up()
            await broker.appender.append(TELEMETRY, 0, [Record(b"k", of_version_2(settled), FINAL_MS)], timeout=600)
            await observer.listen_for(60_000)
            await report(broker, *alive(observer.now))
            await observer.listen_for(20_000)
            assert (observer.row().why_open, observer.row().lost, observer.final) == (NEWER_REPORTS, 0, [])
        again = Observer(broker, producer, observer.now)
        async with again.running():
            await again.caught_up()
            await again.listen_for(20_000)
            assert (again.row().why_open, again.row().lost, again.final) == (NEWER_REPORTS, 0, [])
        monkeypatch.setattr(follower, "decode_known", decode_version_2)
        upgraded = Observer(broker, producer, again.now)
        async with upgraded.running():
            await upgraded.caught_up()
            await upgraded.listen_for(20_000)
            await report(broker, *alive(upgraded.now))
            await upgraded.until(lambda: len(upgraded.final) == 1)
            assert (upgraded.row().why_open, upgraded.row().missing) == (None, 0)
