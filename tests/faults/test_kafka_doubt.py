"""Row 22 of the fault matrix: a follower frozen while batches of equal size are sent, doubted, refused and repeated."""

import asyncio
import random
from pathlib import Path

from services.core.jvm.kafka import KafkaCluster
from tests.faults import quick_ingest
from tests.faults.conftest import Report
from tests.faults.doubt import open_doubt
from tests.faults.doubt_oracle import judge


async def test_what_was_in_doubt_takes_nobodys_place(
    kafka_cluster: KafkaCluster, tmp_path: Path, report: Report
) -> None:
    """If it fails, a 200 is a lost event: Kafka takes a new batch for the repeat of one that it has."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    async with open_doubt(kafka_cluster, tmp_path, seed, quick_ingest.__name__) as trial:
        async with trial.load(), asyncio.TaskGroup() as group:
            group.create_task(trial.freeze(await trial.follower(0), 9.0))
            await asyncio.sleep(2.0)  # in doubt by now
            trial.hang_up("ingest-1")
        await trial.stop_ingest()
        verdict = await judge(trial)
    print(verdict.row.text())
    assert not verdict.complaints, verdict.complaints[:10]
    report(verdict.row)
