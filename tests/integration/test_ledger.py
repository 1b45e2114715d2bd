"""What ingest and expel tell adds up when they are killed: nothing is told that is not so, and what is not told can be found."""

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import orjson

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.record import Record
from services.core.event import ORIGIN, Origin
from services.core.ledger.report import TELEMETRY, Report, decode_report, unpack_numbers
from services.core.pipe_file.pipes import load_pipes
from services.core.provision import ensure_topics
from tests.integration.expel_process import Expel, hook, kill_at_end
from tests.integration.ingest_process import Ingest, log_url, running
from tests.support.pacing import Pace
from tests.unit.expel.receiver import DEADLINE, open_receiver

STREAM = "plain"
REQUEST = 20
EACH = 400
"""Events that are acknowledged between two kills."""


@dataclass
class Reported:
    """The union of all reports."""

    reports: list[Report]

    def origins(self, node: str, *outcomes: str) -> set[Origin]:
        return {
            Origin(one.incarnation, one.partition, number)
            for report in self.reports
            if report.node == node
            for one in report.sets
            if one.outcome in outcomes
            for number in unpack_numbers(one.numbers)
        }

    def reaches(self) -> dict[tuple[str, int], int]:
        """The newest per incarnation and partition."""
        return {
            (reach.incarnation, reach.partition): int(reach.offset)
            for report in self.reports
            for reach in report.reaches
        }


async def read(broker: Broker, topic: str, partition: int) -> AsyncIterator[tuple[int, Record]]:
    """Everything, with offsets."""
    offset = 0
    while (batch := await broker.reader.read(topic, partition, offset, max_records=1000)) is not None:
        for found in zip(batch.offsets, batch.records, strict=True):
            yield found
        offset = batch.offsets[-1] + 1


async def read_told(broker: Broker) -> Reported:
    return Reported([decode_report(record.value) async for _, record in read(broker, TELEMETRY, 0)])


async def read_stored(broker: Broker) -> dict[Origin, tuple[int, int]]:
    """Partition and offset of each event of the stream."""
    stored: dict[Origin, tuple[int, int]] = {}
    for partition in await broker.reader.describe(STREAM):
        async for offset, record in read(broker, STREAM, partition):
            stored[Origin.unpack(record.header(ORIGIN) or b"")] = (partition, offset)
    return stored


async def check_ingest(broker: Broker) -> None:
    """Every event is told, or lies behind what its incarnation says it told; what is told as accepted is there."""
    stored, told = await read_stored(broker), await read_told(broker)
    accepted, reaches = told.origins("ingest", "accepted"), told.reaches()
    assert accepted <= stored.keys()
    for origin in stored.keys() - accepted - told.origins("ingest", "refused"):
        partition, offset = stored[origin]
        reach = reaches.get((origin.incarnation, partition), -1)  # none: it was killed before its first report
        assert offset > reach, f"{origin} at {offset} would never be found"


async def check_expel(broker: Broker, group: str, received: set[Origin]) -> None:
    """What is committed is told; what is told was received."""
    committed = await broker.admin.committed(group, STREAM)
    stored, told = await read_stored(broker), (await read_told(broker)).origins("expel", "delivered")
    behind = {origin for origin, (partition, offset) in stored.items() if offset <= committed.get(partition, -1)}
    assert behind <= told, f"{len(behind - told)} events are committed and not told"
    assert told <= received


async def post(ingest: Ingest) -> None:
    """So many events, acknowledged."""
    for _ in range(EACH // REQUEST):
        body = orjson.dumps([{"n": n} for n in range(REQUEST)])
        assert (await ingest.post(body, STREAM)).status == 200


async def count_told(broker: Broker) -> int:
    """Events that ingests told to have accepted."""
    return len((await read_told(broker)).origins("ingest", "accepted"))


async def wait_told(broker: Broker, count: int) -> None:
    """Until they told of so many."""
    async with asyncio.timeout(DEADLINE):
        pace = Pace()
        while await count_told(broker) < count:
            await pace.rest()


async def test_reports_add_up_after_kills(tmp_path: Path) -> None:
    """Broken: after a crash the observer cries of losses that never were, or a real one is hidden."""
    (tmp_path / "expel").mkdir()
    async with open_receiver() as receiver, LogBroker.open(str(tmp_path / "log")) as broker:
        quick = hook("hook", receiver.url, batch={"max_wait": "20ms", "max_events": 10})
        expel = Expel(tmp_path / "expel", broker, log_url(tmp_path), [quick], stream=STREAM)
        await ensure_topics(broker.admin, await asyncio.to_thread(load_pipes, expel.write_pipes()))
        await broker.admin.create_topic(TopicSpec("orders"))  # ingest serves it, too

        async def received() -> set[Origin]:
            """By the ids, which are the stream's."""
            by_id = {}
            for partition in await broker.reader.describe(STREAM):
                async for _, record in read(broker, STREAM, partition):
                    by_id[(record.header("ce_id") or b"").decode()] = Origin.unpack(record.header(ORIGIN) or b"")
            return {by_id[one] for one in {*receiver.accepted}}

        async with kill_at_end(expel):
            for number in range(3):
                await expel.start()
                async with running(tmp_path) as ingest:
                    await ingest.until_ready()
                    before = await count_told(broker)
                    await post(ingest)
                    if number:  # the first one dies before it has told anything, the others between two reports
                        await wait_told(broker, before + EACH)
                        await post(ingest)
                    enough = (2 * number + 1) * EACH - EACH // 2
                    await receiver.wait_for(lambda seen, enough=enough: len({*seen.accepted}) >= enough)  # type: ignore[misc]
                    await expel.stop(signal.SIGKILL)
                    await ingest.end(signal.SIGKILL)
                await check_ingest(broker)
                await check_expel(broker, "late.hook", await received())
            await expel.start()
            async with running(tmp_path) as ingest:
                await ingest.until_ready()
                assert (await ingest.post(b"{}", STREAM)).status == 200
                assert await ingest.end() == 0
            await expel.wait_no_lag("hook")
            assert await expel.stop() == 0
        told, stored = await read_told(broker), await read_stored(broker)
        assert told.origins("expel", "delivered") == stored.keys() == await received()
        assert {report.node for report in told.reports if report.closed} == {"ingest", "expel"}
        await check_ingest(broker)
