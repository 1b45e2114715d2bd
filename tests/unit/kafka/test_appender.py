"""What the Kafka appender says of an append, by what the broker answered."""

import itertools
import struct
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from services.core.broker.contract import Appended
from services.core.broker.errors import BrokerError, OutcomeUnknown, RecordTooLarge, Unavailable
from services.core.broker.kafka import appender as appender_module
from services.core.broker.kafka.appender import KafkaAppender
from services.core.broker.kafka.cluster import Cluster
from services.core.broker.kafka.node_sender import PendingBatch
from services.core.broker.kafka.record_batch import Identity
from services.core.broker.kafka.topic_settings import TopicLimits
from services.core.broker.record import Record

RECORDS = [Record(b"k", b"%0200d" % number, 1) for number in range(6)]
UNKNOWN_TOPIC, NOT_LEADER, REQUEST_TIMED_OUT, MESSAGE_TOO_LARGE = 3, 6, 7, 10
NOT_ENOUGH_REPLICAS, NOT_ENOUGH_REPLICAS_AFTER_APPEND, UNAUTHORIZED = 19, 20, 29
INVALID_TIMESTAMP, OUT_OF_ORDER, DUPLICATE, UNKNOWN_PRODUCER = 32, 45, 46, 59
IDENTITY = struct.Struct(">qhii").unpack_from
"""Producer id, epoch, first sequence number and count of records; they begin at byte 43 of a batch."""

SILENCE = 12345


class AnsweringSender:
    """Answers each batch with the next code, or none; offsets count batches of three records."""

    def __init__(self, codes: list[int]) -> None:
        self.codes, self.batches = codes, list[tuple[int, int, int]]()

    def add(self, batch: PendingBatch, _timeout: float) -> None:
        batch.sent = True
        identity, _, first, count = IDENTITY(batch.data, 43)
        if (code := self.codes.pop(0)) != SILENCE:
            batch.answer.set_result((code, 3 * len(self.batches)))
        self.batches.append((identity, first, count))


def answering(codes: list[int]) -> Callable[[int], AnsweringSender]:
    sender = AnsweringSender(codes)
    return lambda _node: sender


@pytest.fixture
def appender(monkeypatch: pytest.MonkeyPatch) -> KafkaAppender:
    """Its topic takes batches of three of RECORDS."""

    class Limits:
        max_batch_bytes = 800

        async def find(self, _topic: str, *, max_age: float = 0) -> SimpleNamespace:
            return SimpleNamespace(max_batch_bytes=self.max_batch_bytes)

        def forget(self, _topic: str) -> None:
            self.max_batch_bytes = 400

    identities = itertools.count(7)

    async def identify(*_args: object, **_kwargs: object) -> Identity:
        return Identity(next(identities), 0)

    async def leader(_target: object) -> int:
        return 1

    made = KafkaAppender(cast("Cluster", None), cast("TopicLimits", Limits()))
    monkeypatch.setattr(made, "_identify", identify)
    monkeypatch.setattr(made, "_leader", leader)
    return made


@pytest.mark.parametrize("code", [NOT_LEADER, REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS_AFTER_APPEND])
async def test_what_the_leader_may_have_written_is_unknown(
    appender: KafkaAppender, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """If it fails, a client is told "not stored" of events that arrive after the outage."""
    monkeypatch.setattr(appender, "_sender", answering([code]))
    await append_in_doubt(appender)


async def test_a_later_batch_in_doubt_leaves_the_first_stored_and_the_third_untried(
    appender: KafkaAppender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, one answer of three stands for batches that it was not given for."""
    monkeypatch.setattr(appender, "_sender", answering([0, REQUEST_TIMED_OUT]))
    more = [*RECORDS, *[Record(b"k", b"%0200d" % number, 1) for number in range(6, 9)]]
    appended = await appender.append("s", 0, more, timeout=5.0)
    assert (appended.first, appended.last) == (0, 2)
    kinds: dict[int, type[Exception]] = {index: type(error) for index, error in appended.failed}
    assert kinds == dict.fromkeys(range(3, 6), OutcomeUnknown) | dict.fromkeys(range(6, 9), Unavailable)


async def test_what_is_refused_before_it_is_written_is_not_stored(
    appender: KafkaAppender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, every refusal leaves clients in doubt, and they send everything twice."""
    monkeypatch.setattr(appender, "_sender", answering([NOT_ENOUGH_REPLICAS]))
    with pytest.raises(BrokerError) as caught:
        await appender.append("s", 0, RECORDS[:3], timeout=5.0)
    assert not isinstance(caught.value, OutcomeUnknown)


OTHERS = [Record(b"k", b"%0200d" % number, 1) for number in range(6)]


@pytest.fixture
def sender(appender: KafkaAppender, monkeypatch: pytest.MonkeyPatch) -> AnsweringSender:
    """Of every node. A test fills in the codes."""
    made = AnsweringSender([])
    monkeypatch.setattr(appender, "_sender", lambda _node: made)
    return made


async def append_in_doubt(appender: KafkaAppender, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(OutcomeUnknown):
            await appender.append("s", 0, RECORDS[:3], timeout=5.0)


async def test_a_refused_repeat_frees_no_number(appender: KafkaAppender, sender: AnsweringSender) -> None:
    """If it fails, a 200 is a lost event: the next batch of equal size goes out under the number of one that Kafka has."""
    sender.codes = [REQUEST_TIMED_OUT, NOT_ENOUGH_REPLICAS, 0]
    await append_in_doubt(appender, 2)
    await appender.append("s", 0, OTHERS[:3], timeout=5.0)
    assert sender.batches == [(7, 0, 3), (7, 0, 3), (8, 0, 3)]


@pytest.mark.parametrize(
    "code",
    [
        *(UNKNOWN_TOPIC, NOT_LEADER, REQUEST_TIMED_OUT, MESSAGE_TOO_LARGE, NOT_ENOUGH_REPLICAS, UNAUTHORIZED),
        *(NOT_ENOUGH_REPLICAS_AFTER_APPEND, INVALID_TIMESTAMP, 2, 5, 18, 42, 56, 87, 89, -1),
        *(
            OUT_OF_ORDER,
            UNKNOWN_PRODUCER,
            47,
            49,
            90,
        ),  # of a node that was replaced as leader, and answers from its old log
    ],
)
async def test_a_batch_in_doubt_goes_out_unchanged_until_it_is_stored(
    appender: KafkaAppender, sender: AnsweringSender, code: int
) -> None:
    """If it fails, a batch that Kafka may have is cut, numbered anew or called refused, whatever answer came in between."""
    sender.codes = [NOT_ENOUGH_REPLICAS_AFTER_APPEND, code, code, 0, 0]
    await append_in_doubt(appender, 3)
    appended = await appender.append("s", 0, RECORDS[:3], timeout=5.0)
    assert (appended.first, appended.last, appended.failed) == (9, 11, ())
    await appender.append("s", 0, OTHERS[:1], timeout=5.0)
    assert sender.batches == [(7, 0, 3)] * 4 + [(7, 3, 1)]


@pytest.mark.parametrize("code", [OUT_OF_ORDER, UNKNOWN_PRODUCER, 47, 49, 90, MESSAGE_TOO_LARGE, INVALID_TIMESTAMP])
async def test_a_refusal_that_lasts_ends_the_old_number(
    appender: KafkaAppender, sender: AnsweringSender, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """If it fails, a partition stands still until a restart: the writer of dead letters sends the same records for ever."""
    sender.codes = [REQUEST_TIMED_OUT, code, code, 0]
    for longest in (60.0, 60.0, -1.0):
        monkeypatch.setattr(appender_module, "LONGEST_DOUBT_S", longest)
        with pytest.raises(OutcomeUnknown):
            await appender.append("s", 0, RECORDS[:3], timeout=5.0)
    assert (await appender.append("s", 0, RECORDS[:3], timeout=5.0)).first == 9
    assert sender.batches == [(7, 0, 3)] * 3 + [(8, 0, 3)]


@pytest.mark.parametrize("code", [NOT_ENOUGH_REPLICAS, NOT_LEADER, REQUEST_TIMED_OUT])
async def test_an_outage_does_not_end_the_old_number(
    appender: KafkaAppender, sender: AnsweringSender, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """If it fails, each outage of more than a minute stores batches twice."""
    monkeypatch.setattr(appender_module, "LONGEST_DOUBT_S", -1.0)
    sender.codes = [REQUEST_TIMED_OUT, code, 0]
    await append_in_doubt(appender, 2)
    await appender.append("s", 0, RECORDS[:3], timeout=5.0)
    assert sender.batches == [(7, 0, 3)] * 3


@pytest.mark.parametrize("code", [OUT_OF_ORDER, UNKNOWN_PRODUCER, 47, 49, 90, DUPLICATE])
async def test_a_new_batch_that_is_refused_for_its_number_goes_out_under_a_new_producer_id(
    appender: KafkaAppender, sender: AnsweringSender, code: int
) -> None:
    """If it fails, a partition stands still once Kafka forgot its producer, or another batch's number stands for this one."""
    sender.codes = [code, 0]
    with pytest.raises(Unavailable):
        await appender.append("s", 0, RECORDS[:3], timeout=5.0)
    assert (await appender.append("s", 0, RECORDS[:3], timeout=5.0)).first == 3
    assert sender.batches == [(7, 0, 3), (8, 0, 3)]


async def test_a_duplicate_of_a_batch_in_doubt_is_stored(appender: KafkaAppender, sender: AnsweringSender) -> None:
    """If it fails, what Kafka says that it has is answered "unknown"."""
    sender.codes = [REQUEST_TIMED_OUT, DUPLICATE]
    with pytest.raises(OutcomeUnknown):
        await appender.append("s", 0, OTHERS[:3], timeout=5.0)
    assert await appender.append("s", 0, OTHERS[:3], timeout=5.0) == Appended(-1, -1)


async def test_the_end_of_a_batch_in_doubt_brings_its_beginning_along(
    appender: KafkaAppender, sender: AnsweringSender
) -> None:
    """If it fails, events are doubled because others of their batch ran out of time first."""
    sender.codes = [REQUEST_TIMED_OUT, 0, 0]
    await append_in_doubt(appender)
    appended = await appender.append("s", 0, [*RECORDS[1:3], *OTHERS[:2]], timeout=5.0)
    assert (appended.first, appended.last) == (4, 7)
    assert sender.batches == [(7, 0, 3), (7, 0, 3), (7, 3, 2)]


async def test_silence_after_doubt_and_before_it(appender: KafkaAppender, sender: AnsweringSender) -> None:
    """If it fails, a time-out forgets what the attempt before it left in doubt, or calls refused what had left."""
    sender.codes = [SILENCE, SILENCE, 0]
    for _ in range(2):
        with pytest.raises(OutcomeUnknown):
            await appender.append("s", 0, RECORDS[:3], timeout=0.01)
    await appender.append("s", 0, RECORDS[:3], timeout=5.0)
    assert sender.batches == [(7, 0, 3)] * 3


async def test_an_attempt_that_never_left_settles_no_doubt(
    appender: KafkaAppender, sender: AnsweringSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it fails, a partition without a leader makes "not stored" of a batch that the last leader may have written."""
    sender.codes = [REQUEST_TIMED_OUT, 0]
    await append_in_doubt(appender)

    async def away(_target: object) -> int:
        raise Unavailable("no leader")

    with monkeypatch.context() as while_away:
        while_away.setattr(appender, "_leader", away)
        appended = await appender.append("s", 0, [*RECORDS[:3], *OTHERS[:1]], timeout=5.0)
    kinds: list[type[Exception]] = [type(error) for _, error in appended.failed]
    assert kinds == [OutcomeUnknown] * 3 + [Unavailable]
    await appender.append("s", 0, RECORDS[:3], timeout=5.0)
    assert sender.batches == [(7, 0, 3)] * 2


async def test_a_limit_that_was_lowered_cuts_no_batch_in_doubt(
    appender: KafkaAppender, sender: AnsweringSender
) -> None:
    """If it fails, part of a batch goes out under the number of the whole, and Kafka refuses all that follows."""
    sender.codes = [REQUEST_TIMED_OUT, MESSAGE_TOO_LARGE, 0, 0, 0]
    await append_in_doubt(appender)
    appender._limits.forget("s")
    await append_in_doubt(appender)
    await appender.append("s", 0, RECORDS[:3], timeout=5.0)
    await appender.append("s", 0, OTHERS[:2], timeout=5.0)
    assert sender.batches == [(7, 0, 3)] * 3 + [(7, 3, 1), (7, 4, 1)]


async def test_a_record_that_was_refused_for_its_size_is_too_large(
    appender: KafkaAppender, sender: AnsweringSender
) -> None:
    """If it fails, the check before sending is gone: one record after another is sent in vain."""
    with pytest.raises(RecordTooLarge):
        await appender.append("s", 0, [Record(b"k", b"x" * 900, 1)], timeout=5.0)
    assert sender.batches == []
