"""The follower on a real embedded log: restarts, snapshots, recovery, and each final row told once."""

import asyncio

import msgspec
import pytest
import zstandard
from prometheus_client import REGISTRY

from services.core import metrics
from services.core.broker.contract import Broker, PartitionRange, TopicSpec
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.ledger.report import SNAPSHOTS, TELEMETRY, LagSet, Report, SparkFigures
from services.observer import snapshot_log
from services.observer.alarms import MAX_UNSENT, Alarm
from services.observer.follower import Follower
from services.observer.ledger.flow import Flow, PipeFlow, Step
from services.observer.ledger.table import Table
from services.observer.payload_fields import Drift
from services.observer.planned import PlannedWindows, Window
from services.observer.snapshot import FollowerState
from services.observer.watch import Watch
from tests.unit.observer.ledger.following import DEADLINE_S, FINAL_MS, OPS, Observer, alive, losing, report
from tests.unit.observer.ledger.snapshots import dump_v1, records_v1
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, PLAIN, START_MS, beat, hear, tell

pytestmark = pytest.mark.usefixtures("quick")


async def test_a_restart_knows_what_was_and_tells_no_minute_twice(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after a restart of the observer an old loss is an alarm again, or its minutes are unknown."""
    monkeypatch.setattr(snapshot_log, "RECORD_BYTES", 64)  # so that a snapshot has many records
    monkeypatch.setattr(snapshot_log, "PIECE_BYTES", 40)
    async with Producer(broker.appender) as producer:
        await report(broker, *losing(2))
        await broker.appender.append(TELEMETRY, 0, [Record(b"k", b"no report", START_MS)], timeout=600)
        first = Observer(broker, producer, FINAL_MS)
        async with first.running():
            await first.caught_up()
            await report(broker, *alive(FINAL_MS))
            await first.until(lambda: len(first.final) == 1)
            assert (first.final[0].missing, first.final[0].accepted) == (2, 10)
            await first.follower.announce(Window("deploy", None, START_MS, FINAL_MS, "ci"))
        second = Observer(broker, producer, FINAL_MS + 1000)
        async with second.running():
            await second.caught_up()
            assert second.row().missing == 2
            await report(broker, tell("expel", "late", "delivered", [8], destination="ops", at_ms=second.now))
            await second.until(lambda: second.row().late == 1)
            assert [window.kind for window in second.follower.planned.all()] == ["deploy"]
        assert second.final == []


async def test_a_window_counts_for_the_new_name_of_its_pipe(broker: Broker) -> None:
    """Broken: a deploy that gives a pipe another name was announced, and raises the alarms that it should have excused."""
    async with Producer(broker.appender) as producer:
        first = Observer(broker, producer)
        await first.follower._start()
        await first.follower.announce(Window("deploy", "late", START_MS, FINAL_MS, "ci"))
        pipe = PipeFlow(("flights",), transforms=False, destinations={"ops": None})
        renamed = Flow({"later": pipe, "other": pipe}, {("late", "ops"): ("later", "ops")})
        second = Follower(renamed, broker.reader, producer, lambda _turn: None, now_ms=lambda: START_MS)
        await second._start()
    covered = {name: second.planned.covers(name, START_MS, FINAL_MS, loss=True) for name in ("later", "late", "other")}
    assert covered == {"later": first.follower.planned.all()[0], "late": None, "other": None}


async def test_a_stop_while_it_catches_up_moves_its_position_no_further_back(broker: Broker) -> None:
    """Broken: two restarts in a row, and instances that ended an hour ago report again, at a time at which they were gone."""
    async with Producer(broker.appender) as producer:
        await report(broker, *losing(2), *alive(FINAL_MS))
        first = Observer(broker, producer, FINAL_MS)
        async with first.running():
            await first.caught_up()
        second = Observer(broker, producer, FINAL_MS + 1000)
        await second.follower._start()
        await second.follower.keep()
        for one in (first, second):
            assert one.follower._state().offset == len(losing(2)) + len(alive(FINAL_MS))
        found = await snapshot_log.SnapshotLog(broker.reader, producer, lambda: second.now).load(lambda: Table(PLAIN))
        assert found is not None
        assert found[1].offset == first.follower._state().offset


async def test_a_snapshot_is_all_that_is_needed(broker: Broker) -> None:
    """Broken: once the reports are gone by retention, a restart forgets what waits for another attempt."""
    async with Producer(broker.appender) as producer:
        await report(broker, *losing(2), tell("expel", "late", "parked", [9], destination="ops"))
        first = Observer(broker, producer, FINAL_MS)
        async with first.running():
            await first.caught_up()
            await report(broker, *alive(FINAL_MS))
            await first.until(lambda: len(first.final) == 1)
        await broker.admin.delete_topic(TELEMETRY)
        await broker.admin.create_topic(TopicSpec(TELEMETRY, 1))
        second = Observer(broker, producer, FINAL_MS + 1000)
        async with second.running():
            await second.caught_up()
            assert second.row() == first.row()
            assert second.row().waiting == 1


async def test_what_a_dead_ingest_did_not_tell_is_told_for_it_durably(broker: Broker) -> None:
    """Broken: after a kill -9 of ingest its minutes stay open for ever."""
    async with Producer(broker.appender) as producer:
        silent = losing(0)
        await report(broker, *silent)
        observer = Observer(broker, producer, FINAL_MS)
        async with observer.running():
            await observer.caught_up()
            await report(broker, *alive(FINAL_MS)[1:])
            await observer.listen_for(20_000)
            assert observer.final == [], "it may have spoken while the observer was away, and speak again"
            await observer.listen_for(20_000)
            await observer.until(lambda: len(observer.final) == 1)
        end = (await broker.reader.describe(TELEMETRY))[0].end
        assert end > len(silent) + 2, "what it said in ingest's name stands in the topic"


async def test_lags_are_merged_and_a_report_that_comes_twice_counts_once(broker: Broker) -> None:
    """Broken: percentiles of a minute are those of one instance, or of a repeated second."""
    async with Producer(broker.appender) as producer:
        lag = LagSet("e2e", MINUTE, 3, 30, {100: 2, 200: 1})
        one = Report(node="expel", instance="one", pipe="late", destination="ops", at_ms=START_MS, lags=(lag,))
        two = Report(node="expel", instance="two", pipe="late", destination="ops", at_ms=START_MS, lags=(lag,))
        await report(broker, one, one, two)
        observer = Observer(broker, producer)
        async with observer.running():
            await observer.caught_up()
        ((_, histogram),) = observer.follower.lags.kinds(MINUTE).items()
        assert (histogram.count, histogram.total_ms) == (6, 60)


async def test_what_a_transform_says_of_its_spark_is_kept(broker: Broker) -> None:
    """Broken: a transform reports its batches, and the page shows nothing of it."""
    async with Producer(broker.appender) as producer:
        said = msgspec.structs.replace(
            beat("transform", "late", at_ms=START_MS), spark=SparkFigures(10.0, 500, 20, 4_000, 900, real_time=True)
        )
        await report(broker, said)
        observer = Observer(broker, producer)
        async with observer.running():
            await observer.caught_up()
        shown = observer.follower.transforms.view("late", START_MS, lambda: None, None)
        assert shown is not None
        assert (shown.per_second, shown.batch_ms, shown.longest_ms, shown.real_time) == (50, 200, 900, True)


async def test_an_alarm_that_was_not_told_is_told_after_a_restart(broker: Broker) -> None:
    """Broken: a loss is found while the alarm's receiver is away, the observer is restarted, and nobody is ever told."""
    async with Producer(broker.appender) as producer:
        first, second = Observer(broker, producer), Observer(broker, producer)
        async with first.running():
            await first.caught_up()
            for number in range(MAX_UNSENT + 1):
                assert first.follower.untold.add(Alarm(f"loss-{number}", {"type": "penstock.loss"})) == (
                    number < MAX_UNSENT
                )
            first.follower.untold.remove(first.follower.untold.all()[0])
        async with second.running():
            await second.caught_up()
            assert second.follower.untold.all() == first.follower.untold.all()
            assert await second.follower.untold.first() == Alarm("loss-1", {"type": "penstock.loss"})


async def test_reports_that_went_by_retention_are_counted(broker: Broker) -> None:
    """Broken: after a long stop of the observer minutes show loss that was none, and nothing says why."""
    async with Producer(broker.appender) as producer:
        first, second = Observer(broker, producer), Observer(broker, producer)
        await report(broker, *losing(0))
        async with first.running():
            await first.caught_up()
        await report(broker, *alive(START_MS), *alive(START_MS + 1))
        describe = broker.reader.describe

        async def trimmed(topic: str) -> dict[int, PartitionRange]:
            held = await describe(topic)
            return {p: PartitionRange(5, one.end) for p, one in held.items()} if topic == TELEMETRY else held

        second.follower._reader.describe = trimmed  # type: ignore[method-assign]
        before = REGISTRY.get_sample_value("penstock_ledger_reports_gone_total") or 0.0
        async with second.running():
            await second.caught_up()
        assert (REGISTRY.get_sample_value("penstock_ledger_reports_gone_total") or 0.0) - before == 2


async def test_a_long_search_holds_up_nothing_else(broker: Broker) -> None:
    """Broken: while the observer reads an hour of a stream for an ingest that died, no minute becomes final, no alarm is raised
    and no report is read."""
    async with Producer(broker.appender) as producer:
        reading, read = asyncio.Event(), broker.reader.read

        async def hang(topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
            if topic == "flights":
                reading.set()
                await asyncio.Event().wait()
            return await read(topic, partition, offset, max_records=max_records)

        observer = Observer(broker, producer, FINAL_MS)
        observer.follower._recovery_reader.read = hang  # type: ignore[method-assign]
        await broker.appender.append("flights", 0, [Record(None, b"{}", START_MS)], timeout=600)
        stranger = tell("expel", "late", "delivered", [1], destination="ops", incarnation="b")
        await report(broker, stranger, *losing(2))
        async with observer.running():
            await asyncio.wait_for(reading.wait(), DEADLINE_S)
            await report(broker, *alive(FINAL_MS))
            await observer.until(lambda: len(observer.final) == 1)


async def test_a_restart_knows_which_fields_drift(broker: Broker) -> None:
    """Broken: each restart of the observer raises the alarm of a drift again."""
    drift = Drift(Step("ingest", "flights"), "delay", "nulls", "delay: null in 61%, 2% before")
    told = metrics.LEDGER_DRIFTS.labels("late")._value.get
    async with Producer(broker.appender) as producer:
        before, watch = told(), Watch(0.01, None, lambda pipe: [])
        for number in range(2):
            observer = Observer(broker, producer)
            observer.now += number * MINUTE_MS
            watch.follower = observer.follower
            async with observer.running():
                await observer.caught_up()
                watch.on_drifts("late", [drift], observer.now)
        assert told() - before == 1


async def test_a_snapshot_of_before_is_read(broker: Broker) -> None:
    """Broken: whoever updates the observer loses its table, or it takes everybody for dead."""
    table = Table(PLAIN)
    for one in (*losing(2), *alive(START_MS)):
        hear(table, one)
    state = msgspec.msgpack.decode(zstandard.decompress(dump_v1(table, FollowerState(PlannedWindows(), 0))))
    del state[21:]
    for _, _, _, words in state[12]:
        for word in words.values():
            del word["heard_ms"], word["made_ms"]
    old = zstandard.compress(msgspec.msgpack.encode(state))
    await broker.appender.append(SNAPSHOTS, 0, records_v1(old, "old"), timeout=600)
    async with Producer(broker.appender) as producer:
        observer = Observer(broker, producer, FINAL_MS)
        async with observer.running():
            await observer.caught_up()
            assert (observer.row().missing, observer.row().accepted) == (2, 10)
            assert observer.follower.table.liveness.alive(OPS, observer.now)
            assert observer.final == []
