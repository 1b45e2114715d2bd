"""What the client is told when the broker fails: never a 2xx for an event that may be lost, always what to do next."""

import asyncio
from typing import cast

import orjson
import pytest

from services.core.broker.contract import Broker
from services.core.broker.errors import (
    BrokerError,
    OutcomeUnknown,
    RecordTooLarge,
    StorageFull,
    Throttled,
    Unavailable,
    UnknownTopic,
)
from services.core.broker.producer import Producer
from services.core.pipe_file.topic_names import CONTROL
from services.ingest.probe import Probe
from tests.contract.traffic import until
from tests.unit.ingest.service import Service, running


async def fail(service: Service, error: Exception, times: int = 1000) -> None:
    """The next appends raise this."""
    service.appender.errors = [error] * times


@pytest.mark.parametrize(
    ("error", "status", "problem", "outcome"),
    [
        (Unavailable("away"), 503, "broker-unavailable", "not stored"),
        (Throttled("slow down", retry_after=7.0), 429, "stream-full", "not stored"),
        (OutcomeUnknown("no answer"), 503, "outcome-unknown", "unknown"),
        (StorageFull("disk full"), 507, "storage-full", "not stored"),
        (UnknownTopic("plain"), 503, "stream-not-ready", "not stored"),
        (BrokerError("odd"), 503, "broker-unavailable", "not stored"),
    ],
)
async def test_nothing_stored_is_503_or_507(
    service: Service, error: Exception, status: int, problem: str, outcome: str
) -> None:
    """The client must send again, with the same ids; it is told whether a duplicate is possible."""
    await fail(service, error)
    reply = await service.post(b"[{},{}]")
    assert (reply.status, reply.problem, reply.json()["outcome"]) == (status, problem, outcome)
    assert "same ids" in reply.json()["detail"]
    assert int(reply.headers["retry-after"]) >= (7 if isinstance(error, Throttled) else 2)


async def test_an_unexpected_error_leaves_the_outcome_unknown(service: Service) -> None:
    """A bug in an appender must not turn into a 2xx or into a claim."""
    await fail(service, ZeroDivisionError())
    reply = await service.post(b"{}")
    assert (reply.status, reply.problem) == (503, "outcome-unknown")


async def test_once_uncertain_stays_uncertain(service: Service) -> None:
    """First no answer, then refused: the first attempt may still have been stored."""
    service.appender.errors = [OutcomeUnknown("no answer"), *[Unavailable("away")] * 1000]
    reply = await service.post(b"{}")
    assert (reply.status, reply.json()["outcome"]) == (503, "unknown")


async def test_some_partitions_failed_is_207_with_each_failed_event(service: Service) -> None:
    """The stored ones are acknowledged, the others named and may be sent again."""
    rows = [{"id": f"{n}", "customer": {"id": f"c-{n}"}} for n in range(20)]
    await fail(service, RecordTooLarge("no"), times=1)
    reply = await service.post(orjson.dumps(rows), "orders")
    assert reply.status == 207
    document = reply.json()
    stored = {record.value for record in service.stored("orders")}
    failed = {item["index"] for item in document["refused"]}
    assert stored == {orjson.dumps(row) for number, row in enumerate(rows) if number not in failed}
    assert document["accepted"] == len(stored) == 20 - len(failed)
    assert failed
    assert {(item["reason"], item["retry"]) for item in document["refused"]} == {("event-too-large", False)}


async def test_207_tells_when_a_full_partition_has_room(service: Service) -> None:
    """If it fails, a client whose hot key fills one partition sends again at once, and again."""
    rows = [{"id": f"{n}", "customer": {"id": f"c-{n}"}} for n in range(20)]
    service.appender.errors = [Throttled("slow down", retry_after=17.0)]
    reply = await service.post(orjson.dumps(rows), "orders")
    assert reply.status == 207
    assert int(reply.headers["retry-after"]) in (17, 18)
    service.appender.errors = [RecordTooLarge("no")]
    reply = await service.post(orjson.dumps(rows), "orders")
    assert reply.status == 207
    assert "retry-after" not in reply.headers, "waiting does not help"


async def test_refused_and_unknown_together_are_told_apart(service: Service) -> None:
    """A bad event must not be sent again, an uncertain one must."""
    rows = [{"at": "bad"}, *({"customer": {"id": f"c-{n}"}} for n in range(20))]
    service.appender.errors = [ZeroDivisionError()]
    reply = await service.post(orjson.dumps(rows), "orders")
    assert reply.status == 207
    refused = reply.json()["refused"]
    assert [item["index"] for item in refused] == sorted(item["index"] for item in refused)
    assert (refused[0]["reason"], refused[0]["retry"]) == ("bad-time", False)
    assert {(item["reason"], item["retry"]) for item in refused[1:]} == {("outcome-unknown", True)}


async def test_a_record_over_the_brokers_limit_is_its_item_refused(service: Service) -> None:
    """Sending it again would never help."""
    await fail(service, RecordTooLarge("no"))
    reply = await service.post(b"{}")
    assert (reply.status, reply.problem) == (422, "nothing-accepted")
    assert reply.json()["refused"][0]["reason"] == "event-too-large"


async def test_a_full_queue_is_503_at_once() -> None:
    """While the broker is away memory must not grow: beyond the bound nothing is queued."""
    async with running(max_pending=5000) as service:
        service.appender.gate.clear()
        waiting = asyncio.create_task(service.post(b"[" + b",".join([b'{"a":"%b"}' % (b"x" * 1000)] * 5) + b"]"))
        while not service.appender.waiting:
            await asyncio.sleep(0.01)
        reply = await service.post(b"{}")
        assert (reply.status, reply.problem) == (503, "overloaded")
        assert int(reply.headers["retry-after"]) >= 1
        service.appender.gate.set()
        assert (await waiting).status == 200


async def test_a_stream_that_the_broker_lacks_is_503(service: Service) -> None:
    """Declared in the pipe file, not yet created: wait, not 404."""
    service.intakes["plain"].partitions = 0
    reply = await service.post(b"{}")
    assert (reply.status, reply.problem) == (503, "stream-not-ready")
    assert int(reply.headers["retry-after"]) >= 1


async def test_a_client_that_leaves_before_the_answer_changes_nothing(service: Service) -> None:
    """Its events are on their way: they are stored, and the service goes on."""
    service.appender.gate.clear()
    leaving = asyncio.create_task(service.post(b'{"from":"a leaver"}'))
    while not service.appender.waiting:
        await asyncio.sleep(0.01)
    leaving.cancel()
    await asyncio.wait((leaving,))
    service.appender.gate.set()
    assert (await service.post(b"{}")).status == 200
    async with asyncio.timeout(600):
        while b'{"from":"a leaver"}' not in service.values():
            await asyncio.sleep(0.01)


async def test_failed_requests_make_unready_and_stored_ones_ready_again(service: Service) -> None:
    """A broker without a quorum may still call itself healthy; what it stores is what counts."""
    probe = Probe(cast("Broker", None), Producer(service.appender), service.intakes.values())
    probe._reason = None
    assert probe.reason is None
    await fail(service, Unavailable("away"))
    assert (await service.post(b"{}")).status == 503
    assert "plain could not be stored" in str(probe.reason)
    service.appender.errors = []
    assert (await service.post(b"{}")).status == 200
    assert probe.reason is None
    await fail(service, RecordTooLarge("no"), times=1)
    assert (await service.post(b"{}")).status == 422
    assert probe.reason is None


async def test_a_mark_that_cannot_be_written_makes_nothing_unready(service: Service) -> None:
    """Broken: one client with keys takes every ingest out of the balancer, and with it all traffic without keys."""
    probe = Probe(cast("Broker", None), Producer(service.appender), service.intakes.values())
    probe._reason = None
    service.appender.create(CONTROL, 1)
    await fail(service, BrokerError("not authorized"))
    assert (await service.post(b'{"customer": {"id": "c"}}', "orders")).status == 503
    assert probe.reason is None
    service.appender.errors.clear()
    assert (await service.post(b"{}", "orders")).status == 200


async def test_a_stream_is_marked_before_its_first_event_with_a_key(service: Service) -> None:
    """Broken: after a crash between both, the autoscaler moves the keys of a stream that counts as one without keys."""
    service.appender.create(CONTROL, 1)
    assert (await service.post(b'[{"id": "1"}]', "orders")).status == 200
    assert service.stored(CONTROL) == [], "none of its events has a key"
    keyed = b'[{"id": "2"}, {"id": "3", "customer": {"id": "c"}}]'
    await fail(service, Unavailable("away"))
    reply = await service.post(keyed, "orders")
    assert (reply.status, reply.problem) == (503, "broker-unavailable")
    assert "could not record that this stream has keys. Nothing was stored" in reply.json()["detail"]
    service.appender.errors.clear()
    assert (len(service.stored("orders")), service.stored(CONTROL)) == (1, [])
    service.appender.gate.clear()
    first, second = (asyncio.create_task(service.post(keyed, "orders")) for _ in range(2))
    await until(lambda: service.appender.waiting == 1, "only the mark is under way")
    service.appender.gate.set()
    assert [(await reply).status for reply in (first, second)] == [200, 200]
    assert [record.key for record in service.stored(CONTROL)] == [b"keys:orders"]
    assert len(service.stored("orders")) == 5
