"""How fast a shard is read."""

from services.core.broker.kinesis.read_pace import ReadPace, ReadPaces


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


async def _wait(pace: ReadPace) -> float:
    """How long the next read has to wait. Nobody sleeps: the turn is taken by looking at what it would add."""
    before = pace.waited
    await pace.turn()
    return pace.waited - before


async def test_reads_of_all_groups_share_the_limit() -> None:
    """If it fails, two groups of one process throttle each other for ever."""
    clock = _Clock()
    pace = ReadPace(clock)
    waits = [round(await _wait(pace), 3) for _ in range(3)]
    assert waits == [0, 0.2, 0.4]
    paces = ReadPaces()
    assert paces.of("t", 1) is paces.of("t", 1)
    assert paces.of("t", 1) is not paces.of("t", 2)


async def test_large_answers_are_paid_for() -> None:
    """If it fails, a reader that catches up takes more than the shard gives, and is throttled all the time."""
    clock = _Clock()
    pace = ReadPace(clock)
    pace.read(1_000_000)
    assert round(await _wait(pace), 3) == 0.5


def test_a_throttle_slows_down_and_time_without_one_speeds_up() -> None:
    """If it fails, processes that share a shard storm it with reads that are refused, or crawl for ever after one throttle."""
    pace = ReadPace(_Clock())
    for _ in range(20):
        pace.throttle()
    assert pace.interval == 5.0
    assert pace.throttles == 20
    for _ in range(100):
        pace.read(0)
    assert pace.interval == 0.2
