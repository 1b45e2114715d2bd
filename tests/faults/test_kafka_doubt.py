"""Row 22 of the fault matrix: a follower frozen while batches of equal size are sent, doubted, refused and repeated."""

import random

from services.core.jvm.kafka import KafkaCluster
from tests.faults.conftest import Report
from tests.faults.doubt import QUICK, QUICK_TIMING, open_doubt


async def test_what_was_in_doubt_takes_nobodys_place(kafka_cluster: KafkaCluster, report: Report) -> None:
    """If it fails, a 200 is a lost event: Kafka takes a new batch for the repeat of one that it has."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    async with open_doubt(kafka_cluster, seed, QUICK_TIMING, QUICK) as trial:
        async with trial.load():
            for partition in (0, 1):
                await trial.freeze(await trial.follower(partition), 11.0)
        row = await trial.judge()
    print(row.text())
    assert not trial.complaints, trial.complaints[:10]
    report(row)
