"""The whole way, on each broker: what is lost is in the table, exactly, and named; what came twice hides none of it.

`make soak ARGS=--fidelity` does the same with 100,000 events.
"""

import random
from pathlib import Path

from tests.faults.lossy import lose_some
from tests.support.kafka import unique_name

EVENTS, LOST = 5_100, 23


async def test_exactly_what_is_lost_is_missing_and_named(url: str, tmp_path: Path) -> None:
    """Broken: a duplicate hides a loss, a crash or a rewind invents one, or nobody can say which events are gone."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    verdict = await lose_some(tmp_path, url, unique_name("lossy"), EVENTS, LOST, seed)
    assert not verdict.complaints()
