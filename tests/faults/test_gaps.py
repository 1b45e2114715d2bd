"""What was removed before it was read: row 16 of the fault matrix. Loud, counted exactly, never skipped in silence."""

import asyncio
import signal
from pathlib import Path

from aiokafka.admin import RecordsToDelete
from aiokafka.structs import TopicPartition as KafkaPartition

from services.core.broker.contract import TopicSpec
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.retention import remove_before
from services.core.broker.log.topic_store import TopicStore
from tests.faults.conftest import Report
from tests.faults.fleet import wait_until
from tests.faults.trial import PARTITIONS, Trial, open_trial
from tests.support.kafka import open_admin
from tests.support.oracle import Fate


async def test_retention_passed_a_consumer(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, events that expired before they were delivered vanish without a word, or stop all others, too."""
    async with open_trial("16 retention passed a consumer", url, tmp_path) as trial:
        await trial.start_ingest()
        expel = await trial.start_expel()
        async with trial.load():
            await asyncio.sleep(1)
        await trial.wait_no_lag()
        expel.send(signal.SIGTERM)
        assert await expel.wait_end() == 0
        async with trial.load():
            await asyncio.sleep(2)
        victim, committed = 0, await trial.committed()
        lag = await trial.broker.admin.group_lag(trial.group, trial.stream)
        removed = lag[victim].records // 2
        await expire(trial, victim, committed[victim] + 1 + removed)
        await expel.start()
        gap = {"group": trial.group, "topic": trial.stream}
        await wait_until(lambda: expel.metric("penstock_broker_gap_records_total", **gap))
        assert await expel.metric("penstock_broker_gap_records_total", **gap) == removed
        assert await expel.metric("penstock_expel_lane_up", pipe=trial.pipe) == 0
        assert "records_missing" in expel.log.read_text()
        await wait_until(lambda: lags_only_in(trial, victim))
        expel.send(signal.SIGTERM)
        assert await expel.wait_end() == 0
        assert (await trial.committed()).get(victim) == committed[victim], "it was moved on without anybody's decision"
        await trial.broker.admin.set_committed(trial.group, trial.stream, {victim: committed[victim] + removed})
        await expel.start()
        await trial.settle()
        trial.evidence["gap"] = removed
        report(await trial.judge(removed=removed))


async def test_topic_recreated(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a stream that was deleted and created again is read from the old position: its first events are skipped."""
    async with open_trial("16 topic recreated while all run", url, tmp_path) as trial:
        await trial.start_ingest()
        expel = await trial.start_expel()
        async with trial.load():
            await asyncio.sleep(1.5)
        await trial.wait_no_lag()
        before = trial.ledger.count(Fate.OBLIGED)
        await trial.broker.admin.delete_topic(trial.stream)
        await wait_until(lambda: _is_gone(trial))
        await trial.broker.admin.create_topic(TopicSpec(trial.stream, PARTITIONS))
        async with trial.load():
            await wait_until(lambda: trial.ledger.count(Fate.OBLIGED) > before + 300)
        number = await trial.sender.insist_on_one()

        async def goes_on_or_is_loud() -> bool:
            if trial.ledger.arrived(number):
                return True
            return await expel.metric("penstock_expel_lane_up", pipe=trial.pipe) == 0

        await wait_until(goes_on_or_is_loud)
        if not trial.ledger.arrived(number):
            assert "records_missing" in expel.log.read_text()
            expel.send(signal.SIGTERM)
            assert await expel.wait_end() == 0
            held = await trial.broker.reader.describe(trial.stream)
            starts = {partition: one.start - 1 for partition, one in held.items()}
            await trial.broker.admin.set_committed(trial.group, trial.stream, starts)
            await expel.start()
        await trial.settle()
        trial.evidence["recreated"] = 1
        report(await trial.judge(strikes=2))


async def lags_only_in(trial: Trial, victim: int) -> bool:
    """Whether the group has settled everything in all other partitions."""
    lag = await trial.broker.admin.group_lag(trial.group, trial.stream)
    return not any(one.records for partition, one in lag.items() if partition != victim)


async def expire(trial: Trial, partition: int, before: int) -> None:
    """What retention does, at a given offset."""
    scheme, _, place = trial.url.partition("://")
    if scheme == "log":
        await asyncio.to_thread(_cut, DataFolder(Path(place)), trial.stream, partition, before)
        return
    async with open_admin(place) as admin:
        await admin.delete_records({KafkaPartition(trial.stream, partition): RecordsToDelete(before)})


async def _is_gone(trial: Trial) -> bool:
    return trial.stream not in await trial.broker.admin.topics()


def _cut(folder: DataFolder, topic: str, partition: int, before: int) -> None:
    store = TopicStore.open(folder, topic)
    try:
        remove_before(store, partition, before)
    finally:
        store.close()
