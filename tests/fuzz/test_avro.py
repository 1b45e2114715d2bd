"""Some rounds of tests/fuzz/schemas.py. The seed is the day: all runs of a day do the same, and every day does something else."""

import random
from datetime import UTC, datetime

from tests.fuzz import schemas

TEXTS, REQUESTS = 1000, 400


def _rng() -> random.Random:
    seed = datetime.now(UTC).date().toordinal()
    print(f"seed {seed}")
    return random.Random(seed)


def test_damaged_texts_are_read_or_refused() -> None:
    """Broken: a text from outside ends in an exception that nobody expects, and a service answers 500."""
    schemas.texts(_rng(), TEXTS)


async def test_damaged_requests_are_answered() -> None:
    """Broken: a client of the registry reads 500 for its own mistake, and repeats the request for ever."""
    await schemas.requests(_rng(), REQUESTS)
