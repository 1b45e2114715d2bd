"""What a member knows of the log it reads: epochs, rolled-back transactions, what it may keep; and what its commits say."""

from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from aiokafka.consumer.fetcher import Fetcher
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.structs import TopicPartition as KafkaPartition
from structlog.testing import capture_logs

from services.core.broker.kafka import aiokafka_internals as module
from services.core.broker.kafka.aiokafka_internals import AHEAD_BYTES, POLL_BYTES, BoundedFetcher, FetchBudget
from services.core.broker.kafka.log_truncation import EpochHistory
from services.core.broker.kafka.offsets import CommitMetadata
from services.core.broker.kafka.record_batch import drop_aborted, end_of, epochs_of, readable_rows
from services.core.broker.kafka.topic_settings import warn_of_short_offsets

_ID = "11111111-2222-3333-4444-555555555555"


@pytest.mark.parametrize(
    "note", [CommitMetadata(), CommitMetadata(4), CommitMetadata(4, _ID), CommitMetadata(1, _ID, 0)]
)
def test_a_note_is_read_as_it_was_written(note: CommitMetadata) -> None:
    """If it fails, the next owner of a partition takes a good commit for none, or a stale one for good."""
    assert CommitMetadata.parse(str(note)) == note


@pytest.mark.parametrize(
    "text", ["", "partitions=", "partitions=x;epoch=-", "metadata of somebody else", ";;=;", "epoch=²"]
)
def test_notes_of_others_say_nothing(text: str) -> None:
    """If it fails, a commit by an administrator's tool stops a member, or moves it."""
    assert CommitMetadata.parse(text) == CommitMetadata()


def _batch(base: int, count: int, *, epoch: int = 0, producer: int = -1) -> bytearray:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=producer >= 0,
        producer_id=producer,
        producer_epoch=0,
        base_sequence=0,
        batch_size=10_000,
    )
    for number in range(count):
        builder.append(number, timestamp=5, key=None, value=b"v", headers=[])
    data = bytearray(builder.build())
    data[0:8] = base.to_bytes(8)
    data[12:16] = epoch.to_bytes(4)
    return data


def test_what_was_rolled_back_is_left_out() -> None:
    """If it fails, an operator is shown events that their producer took back, or misses those of another producer."""
    data = bytes(_batch(0, 2, producer=7) + _batch(2, 1, producer=8) + _batch(3, 2, producer=7) + _batch(5, 1))
    assert [row.offset for row in readable_rows(drop_aborted(data, [(7, 3)]), 0)] == [0, 1, 2, 5]
    assert [row.offset for row in readable_rows(drop_aborted(data, [(7, 0)]), 0)] == [2, 5]
    assert drop_aborted(data, []) == data
    assert end_of(data[:-1], 0) == 5
    assert end_of(data, 3) == 6
    assert end_of(b"", 3) == 3


def test_epochs_are_those_of_the_leaders_that_wrote() -> None:
    """If it fails, a log that was cut off is not noticed, or a sound one is read again at each election."""
    data = bytes(_batch(10, 2, epoch=3) + _batch(12, 2, epoch=3) + _batch(14, 1, epoch=5))
    assert list(epochs_of(data)) == [(10, 3), (12, 3), (14, 5)]
    history = EpochHistory([(9, 3)])
    for first, epoch in epochs_of(data):
        history.record(first, epoch)
    assert [history.find(offset) for offset in (8, 9, 13, 14, 100)] == [None, 3, 3, 5, 5]
    assert history.between(11, 20) == [(11, 3), (14, 5)]
    history.record(12, 6)
    assert history.between(9, 14) == [(9, 3), (12, 6)]


class Fetched:
    """What a fetcher keeps of a partition."""

    def __init__(self, size: int) -> None:
        self._partition_records: Any = SimpleNamespace(_records=SimpleNamespace(size_in_bytes=lambda: size))


@pytest.fixture
def make_fetcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fetcher that never ran, with so many bytes waiting for each of its partitions."""
    monkeypatch.setattr(module, "FetchResult", Fetched)
    requests = [(node, FetchRequest(1, 1, 1, 1, [("t", [(node, 0, 1)])])) for node in (1, 2)]

    def asked(*_: object) -> tuple[list[Any], dict[str, str], float, bool, list[str]]:
        return requests, {}, 0.1, False, []

    monkeypatch.setattr(Fetcher, "_get_actions_per_node", asked)

    def make(budget: FetchBudget, *sizes: int) -> BoundedFetcher:
        fetcher = BoundedFetcher.__new__(BoundedFetcher)
        fetcher._budget, fetcher._in_flight, fetcher._turn = budget, set(), 0
        fetcher.find_id = lambda _source: UUID(int=1)
        fetcher._records = {KafkaPartition("t", number): Fetched(size) for number, size in enumerate(sizes)}
        return fetcher

    return make


def _asks(fetcher: BoundedFetcher) -> int:
    return len(fetcher._get_actions_per_node(None)[0])


def test_a_member_reads_ahead_only_while_little_waits(make_fetcher: Any) -> None:
    """If it fails, a member that nobody polls keeps a megabyte for each of its partitions."""
    budget = FetchBudget()
    assert _asks(make_fetcher(budget)) == 2
    assert _asks(make_fetcher(budget, AHEAD_BYTES - 1)) == 2
    assert _asks(make_fetcher(budget, 10, AHEAD_BYTES - 10)) == 0


def test_all_members_of_a_process_share_a_budget(make_fetcher: Any) -> None:
    """If it fails, a process with a hundred slow destinations is ended by the kernel, or one of them is never read for."""
    budget = FetchBudget(1000)
    full, other, empty = make_fetcher(budget, 900), make_fetcher(budget, 99), make_fetcher(budget)
    assert [_asks(each) for each in (full, other, empty)] == [2, 2, 2]
    other._records[KafkaPartition("t", 9)] = Fetched(1)
    assert [_asks(each) for each in (other, full, empty)] == [0, 0, 1]
    empty._in_flight.add(1)
    assert _asks(empty) == 0
    budget.leave(full)
    assert _asks(empty) == 2


def test_every_node_has_its_turn_when_the_budget_is_spent(make_fetcher: Any) -> None:
    """If it fails, a member asks one node that has nothing for it, for ever, while its events lie on another."""
    fetcher = make_fetcher(FetchBudget(0))
    asked = [fetcher._get_actions_per_node(None)[0] for _ in range(4)]
    assert sorted([node for node, _ in requests] for requests in asked) == [[1], [1], [2], [2]]


def test_a_poll_takes_what_came_first(make_fetcher: Any) -> None:
    """If it fails, one poll brings more than a sender has room for, or a partition waits behind the others for ever."""
    fetcher = make_fetcher(FetchBudget(), POLL_BYTES - 1, 1, 5)
    assert fetcher._came_first() == [KafkaPartition("t", 0), KafkaPartition("t", 1)]


def test_offsets_that_are_kept_too_short_are_warned_of() -> None:
    """If it fails, nobody hears that a fleet which is away for a week stops when it comes back, until it does."""
    with capture_logs() as logs:
        warn_of_short_offsets(7 * 1440, {"short": 86_400_000, "week": 7 * 86_400_000, "parked": -1})
    assert logs == []
    with capture_logs() as logs:
        warn_of_short_offsets(7 * 1440, {"month": 30 * 86_400_000, "longer": 31 * 86_400_000})
    (said,) = logs
    assert (said["log_level"], said["longest_kept_topic"], said["offsets_kept_hours"]) == ("warning", "longer", 168)
    assert "offsets.retention.minutes of at least 44640" in said["hint"]
