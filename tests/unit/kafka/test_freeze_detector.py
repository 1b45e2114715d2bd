"""A process that stood still is in doubt until its group has answered, in simulated time."""

import time

import pytest

from services.core.broker.kafka.consumer import FreezeDetector
from tests.support.clock import Clock


def test_in_doubt_after_a_long_standstill_until_settled() -> None:
    """If it fails, a process that wakes up delivers what another member delivered, or never delivers again."""
    clock = Clock()
    freeze_detector = FreezeDetector(5.0, clock)
    for _ in range(10):
        clock.now += 4.0
        assert not freeze_detector.has_frozen()
    clock.now += 5.1
    assert freeze_detector.has_frozen()
    clock.now += 0.1
    assert freeze_detector.has_frozen()
    assert [freeze_detector.is_first_report() for _ in range(2)] == [True, False]
    freeze_detector.reset()
    assert not freeze_detector.has_frozen()
    assert freeze_detector.is_first_report()


def test_a_machine_that_was_suspended_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a laptop that is opened again, or a virtual machine that goes on, delivers what it had fetched once more."""
    freeze_detector, real, asleep = FreezeDetector(5.0), time.clock_gettime, 0.0
    monkeypatch.setattr(time, "clock_gettime", lambda clock: real(clock) + asleep * (clock == time.CLOCK_BOOTTIME))
    assert not freeze_detector.has_frozen()
    asleep = 3600.0  # meanwhile CLOCK_MONOTONIC stood still
    assert freeze_detector.has_frozen()
