"""What a Kafka error means in the words of `errors`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiokafka import errors as kafka

from services.core.broker.errors import (
    BrokerError,
    OutcomeUnknown,
    RecordTooLarge,
    Throttled,
    TopicExists,
    Unavailable,
    UnknownTopic,
)

UNKNOWN_TOPIC = kafka.UnknownTopicOrPartitionError.errno
TOO_LARGE = frozenset({kafka.MessageSizeTooLargeError.errno, kafka.RecordListTooLargeError.errno})
THROTTLING_QUOTA_EXCEEDED = 89
INVALID_RECORD = 87

PRODUCER_STATE_LOST = frozenset(
    error.errno
    for error in (
        kafka.OutOfOrderSequenceNumber,
        kafka.InvalidProducerEpoch,
        kafka.UnknownProducerId,
        kafka.InvalidProducerIdMapping,
        kafka.DuplicateSequenceNumber,
    )
)
"""The node does not go on with our numbering. A batch that was sent for the first time is not stored, and needs a new producer
id. Of a batch in doubt this says nothing: the node may have been replaced as leader without hearing of it."""

DUPLICATE_SEQUENCE = kafka.DuplicateSequenceNumber.errno
"""The broker has had a batch of this number, too long ago to know its offset."""

STALE_LEADER = frozenset(
    {
        UNKNOWN_TOPIC,
        kafka.LeaderNotAvailableError.errno,
        kafka.NotLeaderForPartitionError.errno,
        kafka.OutOfOrderSequenceNumber.errno,
    }
)
"""Another node may lead the partition."""

BAD_RECORD = frozenset({kafka.InvalidTimestampError.errno, kafka.CorruptRecordException.errno, INVALID_RECORD})
"""One record of the batch is the reason for refusing all of it, and the answer does not say which."""

_NOT_STORED = frozenset(
    {
        UNKNOWN_TOPIC,
        kafka.LeaderNotAvailableError.errno,
        kafka.NotEnoughReplicasError.errno,
    }
)


def name_of(code: int) -> str:
    """The protocol's name of an error code, for messages."""
    error = kafka.kafka_errors.get(code)
    return getattr(error, "message", None) or f"error {code}"


def classify_produce(code: int, where: str) -> BrokerError:
    """What a produce error code says about the batch.

    Only what the broker checks before it writes is "not stored". NOT_LEADER, REQUEST_TIMED_OUT and
    NOT_ENOUGH_REPLICAS_AFTER_APPEND also come when the leader had written already: unknown. This is about the attempt that
    was answered; of earlier ones it says nothing.
    """
    text = f"{where}: Kafka answered {name_of(code)}"
    if code in TOO_LARGE:
        return RecordTooLarge(f"{text}. Try: raise max.message.bytes of the topic, or send smaller events")
    if code == THROTTLING_QUOTA_EXCEEDED:
        return Throttled(text)
    if code in _NOT_STORED or code in PRODUCER_STATE_LOST:
        return Unavailable(text)
    error = kafka.for_code(code)
    if code in BAD_RECORD or issubclass(
        error, kafka.TopicAuthorizationFailedError | kafka.ClusterAuthorizationFailedError
    ):
        return BrokerError(text)
    return OutcomeUnknown(text)


def classify(error: kafka.KafkaError, what: str) -> BrokerError:
    """For everything but produce: such requests can simply be made again."""
    text = f"{what}: {error}"
    if isinstance(error, kafka.UnknownTopicOrPartitionError):
        return UnknownTopic(text)
    if isinstance(error, kafka.TopicAlreadyExistsError):
        return TopicExists(text)
    if isinstance(error, kafka.KafkaTimeoutError | kafka.KafkaConnectionError) or error.retriable:
        return Unavailable(text)
    return BrokerError(text)


def raise_for(code: int, what: str) -> None:
    """Raise what a response's error code stands for; 0 is none."""
    if code == THROTTLING_QUOTA_EXCEEDED:
        raise Throttled(f"{what}: Kafka's quota for such requests is used up")
    if code:
        raise classify(kafka.for_code(code)(), what)


def raise_for_leader(code: int, what: str) -> None:
    """As raise_for; a leader that does not know a partition that others know has only just become one."""
    if code == UNKNOWN_TOPIC:
        raise Unavailable(f"{what}: its leader has not heard of it yet")
    raise_for(code, what)


@asynccontextmanager
async def bounded(what: str, seconds: float) -> AsyncIterator[None]:
    """Bound the block, and turn what aiokafka raises in it into our errors. Not for produce requests."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"{what}: no answer from Kafka within {seconds:g} s") from error
    except kafka.KafkaError as error:
        raise classify(error, what) from error
