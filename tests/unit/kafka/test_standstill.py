"""A process that stood still is in doubt until its group has answered, in simulated time."""

from services.core.broker.kafka.standstill import Standstill


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_in_doubt_after_a_long_standstill_until_settled() -> None:
    """If it fails, a process that wakes up delivers what another member delivered, or never delivers again."""
    clock = Clock()
    standstill = Standstill(5.0, clock)
    for _ in range(10):
        clock.now += 4.0
        assert not standstill.is_in_doubt()
    clock.now += 5.1
    assert standstill.is_in_doubt()
    clock.now += 0.1
    assert standstill.is_in_doubt()
    assert [standstill.is_news() for _ in range(2)] == [True, False]
    standstill.settle()
    assert not standstill.is_in_doubt()
    assert standstill.is_news()
