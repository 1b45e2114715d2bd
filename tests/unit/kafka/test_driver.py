"""What the Kafka driver says of an append, by what the broker answered."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from services.core.broker.errors import BrokerError, OutcomeUnknown, Unavailable
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.driver import KafkaDriver
from services.core.broker.kafka.limits import TopicLimits
from services.core.broker.kafka.node_lane import Parcel
from services.core.broker.kafka.packing import Identity
from services.core.broker.record import Record

RECORDS = [Record(b"k", b"%0200d" % number, 1) for number in range(6)]
NOT_LEADER, REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND = 6, 7, 19, 20


class AnsweringLane:
    """Answers each parcel with the next code; offsets count batches of three records."""

    def __init__(self, codes: list[int]) -> None:
        self.codes, self.sent = codes, 0

    def add(self, parcel: Parcel, _timeout: float) -> None:
        parcel.sent = True
        parcel.answer.set_result((self.codes.pop(0), 3 * self.sent))
        self.sent += 1


def answering(codes: list[int]) -> Callable[[int], AnsweringLane]:
    lane = AnsweringLane(codes)
    return lambda _node: lane


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> KafkaDriver:
    """Its topic takes batches of three of RECORDS."""

    class Limits:
        async def of(self, _topic: str) -> SimpleNamespace:
            return SimpleNamespace(max_batch_bytes=800)

    async def identify(*_args: object, **_kwargs: object) -> Identity:
        return Identity(7, 0)

    async def leader(_line: object) -> int:
        return 1

    made = KafkaDriver(cast("Cluster", None), cast("TopicLimits", Limits()))
    monkeypatch.setattr(made, "_identify", identify)
    monkeypatch.setattr(made, "_leader", leader)
    return made


@pytest.mark.parametrize("code", [NOT_LEADER, REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS_AFTER_APPEND])
async def test_what_the_leader_may_have_written_is_unknown(
    driver: KafkaDriver, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """If it fails, a client is told "not stored" of events that arrive after the outage."""
    monkeypatch.setattr(driver, "_lane", answering([code]))
    with pytest.raises(OutcomeUnknown):
        await driver.append("s", 0, RECORDS[:3], timeout=5.0)


async def test_a_later_batch_in_doubt_leaves_the_first_stored_and_the_third_untried(
    driver: KafkaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, one answer of three stands for batches that it was not given for."""
    monkeypatch.setattr(driver, "_lane", answering([0, REQUEST_TIMED_OUT]))
    more = [*RECORDS, *[Record(b"k", b"%0200d" % number, 1) for number in range(6, 9)]]
    appended = await driver.append("s", 0, more, timeout=5.0)
    assert (appended.first, appended.last) == (0, 2)
    kinds: dict[int, type[Exception]] = {index: type(error) for index, error in appended.failed}
    assert kinds == dict.fromkeys(range(3, 6), OutcomeUnknown) | dict.fromkeys(range(6, 9), Unavailable)


async def test_what_is_refused_before_it_is_written_is_not_stored(
    driver: KafkaDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, every refusal leaves clients in doubt, and they send everything twice."""
    monkeypatch.setattr(driver, "_lane", answering([NOT_ENOUGH_REPLICAS]))
    with pytest.raises(BrokerError) as caught:
        await driver.append("s", 0, RECORDS[:3], timeout=5.0)
    assert not isinstance(caught.value, OutcomeUnknown)
