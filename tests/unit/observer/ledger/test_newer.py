"""An observer that is older than the services that report to it: nothing that they settled is missing."""

import msgspec

from services.core import metrics
from services.core.broker.contract import Broker
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.ledger.report import TELEMETRY, Report
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
        await broker.appender.append(TELEMETRY, 0, records, timeout=30)
        observer = Observer(broker, producer)
        observer.now = FINAL_MS
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
