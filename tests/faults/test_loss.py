"""The whole way, on each broker: what a node loses is in the table, exactly, at that node, and named. What came twice or late
hides none of it.

`make soak ARGS=--fidelity` does the same at every node with 100,000 events.
"""

import random
from pathlib import Path

import pytest

from services.core.ledger.report import Node
from tests.faults.lossy import Trial
from tests.support.kafka import unique_name

EVENTS, LOST = 3_000, 23


@pytest.mark.parametrize(
    ("url", "node"),
    [("log", "ingest"), ("log", "expel"), ("log", "retrier"), pytest.param("kafka", "expel", marks=pytest.mark.kafka)],
    indirect=["url"],
)
async def test_exactly_what_a_node_loses_is_missing_there_and_named(url: str, tmp_path: Path, node: Node) -> None:
    """Broken: a duplicate hides a loss, a crash, a rewind or a retry invents one, another node is blamed, or nobody can say
    which events are gone."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    verdict = await Trial(tmp_path, url, unique_name("lossy"), node, EVENTS, LOST, seed).run()
    assert verdict.refused >= EVENTS // 50
    assert not verdict.complaints()
