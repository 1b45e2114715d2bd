"""Kafka's errors as ours (`errors`)."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from aiokafka import errors as kafka

from services.core.broker.errors import (
    BrokerError,
    NotAllowed,
    OutcomeUnknown,
    RecordRefused,
    RecordTooLarge,
    Throttled,
    TopicExists,
    Unavailable,
    UnknownTopic,
)

UNKNOWN_TOPIC = kafka.UnknownTopicOrPartitionError.errno
COORDINATOR_NOT_AVAILABLE = kafka.GroupCoordinatorNotAvailableError.errno
CORRUPT = kafka.CorruptRecordException.errno
"""Of a fetch: the node cannot find its way through its own log, because the length of a batch is altered."""
TOO_LARGE = frozenset({kafka.MessageSizeTooLargeError.errno, kafka.RecordListTooLargeError.errno})
THROTTLING_QUOTA_EXCEEDED = 89
INVALID_RECORD = 87
PRODUCER_FENCED = 90
UNKNOWN_TOPIC_ID = 100
UNSUPPORTED_COMPRESSION = 76
_NAMES = {
    74: "FENCED_LEADER_EPOCH",
    UNSUPPORTED_COMPRESSION: "UNSUPPORTED_COMPRESSION_TYPE",
    INVALID_RECORD: "INVALID_RECORD",
    THROTTLING_QUOTA_EXCEEDED: "THROTTLING_QUOTA_EXCEEDED",
    PRODUCER_FENCED: "PRODUCER_FENCED",
    UNKNOWN_TOPIC_ID: "UNKNOWN_TOPIC_ID",
    120: "TRANSACTION_ABORTABLE",
}
"""Of codes that a produce answer can carry and aiokafka does not know."""

PRODUCER_STATE_LOST = frozenset(
    {
        kafka.OutOfOrderSequenceNumber.errno,
        kafka.InvalidProducerEpoch.errno,
        kafka.UnknownProducerId.errno,
        kafka.InvalidProducerIdMapping.errno,
        kafka.DuplicateSequenceNumber.errno,
        PRODUCER_FENCED,
    }
)
"""The node refuses our sequence number, or our producer id. A batch that was sent for the first time is not stored, and needs a
new producer id. About a batch in doubt this says nothing: the node may not know yet that another one leads the partition."""

DUPLICATE_SEQUENCE = kafka.DuplicateSequenceNumber.errno
"""The broker has stored a batch of this number, too long ago to know its offset."""

STALE_LEADER = frozenset(
    {
        UNKNOWN_TOPIC,
        kafka.LeaderNotAvailableError.errno,
        kafka.NotLeaderForPartitionError.errno,
        kafka.OutOfOrderSequenceNumber.errno,
        kafka.KafkaStorageError.errno,
        UNKNOWN_TOPIC_ID,
    }
)
"""Another node may lead the partition."""

FENCED = frozenset(
    {
        kafka.IllegalGenerationError.errno,
        kafka.UnknownMemberIdError.errno,
        kafka.RebalanceInProgressError.errno,
    }
)
"""A commit was refused: it is not from a member of the group's present generation."""

BAD_RECORD = frozenset({kafka.InvalidTimestampError.errno, kafka.CorruptRecordException.errno, INVALID_RECORD})
"""The whole batch was refused because of one record. The answer does not name it."""

_NOT_STORED = frozenset(
    {
        UNKNOWN_TOPIC,
        kafka.LeaderNotAvailableError.errno,
        kafka.NotEnoughReplicasError.errno,
        UNKNOWN_TOPIC_ID,
    }
)

_REFUSED = BAD_RECORD | {
    kafka.InvalidTopicError.errno,
    kafka.InvalidRequiredAcksError.errno,
    kafka.UnsupportedForMessageFormatError.errno,
    UNSUPPORTED_COMPRESSION,
}
"""Checked before anything is written. The same batch is refused until somebody changes something."""


NOT_ALLOWED = {
    kafka.TopicAuthorizationFailedError.errno: "topic",
    kafka.GroupAuthorizationFailedError.errno: "group",
    kafka.ClusterAuthorizationFailedError.errno: "cluster",
    kafka.TransactionalIdAuthorizationFailed.errno: "transactional id",
}
"""Kinds of resources, by the code that says that our user lacks a right to one."""


def not_allowed(code: int, what: str, rights: Sequence[str]) -> NotAllowed:
    """rights: those that the request needs, as `Read on topic NAME`. The text names the ones for the resource of this code."""
    kind = NOT_ALLOWED[code]
    missing = [right for right in rights if f" on {kind}" in right.replace("on the", "on")] or [
        f"a right on the {kind}"
    ]
    return NotAllowed(f"{what}: our user lacks {' or '.join(missing)}. Try: an ACL for it, as in docs/kafka.md")


def name_of(code: int) -> str:
    """The protocol's name of an error code, for messages."""
    error = kafka.kafka_errors.get(code)
    return getattr(error, "message", None) or _NAMES.get(code) or f"error {code}"


def classify_produce(code: int, where: str) -> BrokerError:
    """The outcome of one attempt to store a batch. It says nothing about earlier attempts.

    Only errors that the broker checks before it writes mean "not stored". NOT_LEADER, REQUEST_TIMED_OUT and
    NOT_ENOUGH_REPLICAS_AFTER_APPEND are also answered after the leader has written: then the outcome is unknown.
    """
    text = f"{where}: Kafka answered {name_of(code)}"
    if code in TOO_LARGE:
        return RecordTooLarge(f"{text}. Try: raise max.message.bytes of the topic, or send smaller events")
    if code == THROTTLING_QUOTA_EXCEEDED:
        return Throttled(text)
    if code in NOT_ALLOWED:
        return not_allowed(code, where, [f"Write on topic {where.rpartition('[')[0]}"])
    if code in _NOT_STORED or code in PRODUCER_STATE_LOST:
        return Unavailable(text)
    if code == kafka.UnsupportedForMessageFormatError.errno:
        text += ". Try: message.format.version of the topic 0.11 or later"
    if code in BAD_RECORD and code != kafka.CorruptRecordException.errno:  # bytes may be altered on the way, once
        return RecordRefused(text)
    if code in _REFUSED:
        return BrokerError(text)
    return OutcomeUnknown(text)


def classify(error: kafka.KafkaError, what: str, *rights: str) -> BrokerError:
    """The error of any request but produce. Such requests can be repeated. rights: as for `not_allowed`."""
    text = f"{what}: {error}"
    if (code := getattr(error, "errno", -1)) in NOT_ALLOWED:
        return not_allowed(code, what, rights)
    if isinstance(error, kafka.UnknownTopicOrPartitionError):
        return UnknownTopic(text)
    if isinstance(error, kafka.TopicAlreadyExistsError):
        return TopicExists(text)
    if isinstance(error, kafka.KafkaTimeoutError | kafka.KafkaConnectionError) or error.retriable:
        return Unavailable(text)
    return BrokerError(text)


def find_cause(error: kafka.KafkaError) -> kafka.KafkaError:
    """The lack of a right in which it has its cause: aiokafka's tasks end with another error. Else the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, kafka.KafkaError) and getattr(cause, "errno", None) in NOT_ALLOWED:
            return cause
        cause = cause.__cause__
    return error


def raise_for(code: int, what: str, *rights: str) -> None:
    """Raise the error of this code; 0 is none. rights: as for `not_allowed`."""
    if code == THROTTLING_QUOTA_EXCEEDED:
        raise Throttled(f"{what}: Kafka's quota for such requests is used up")
    if code:
        raise classify(kafka.for_code(code)(), what, *rights)


def raise_for_leader(code: int, what: str, *rights: str) -> None:
    """As `raise_for`, for a partition that other nodes know: a leader that does not know it became leader just now."""
    if code == UNKNOWN_TOPIC:
        raise Unavailable(f"{what}: its leader does not know it yet")
    raise_for(code, what, *rights)


@asynccontextmanager
async def bounded(what: str, seconds: float, *rights: str) -> AsyncIterator[None]:
    """Limit the time of the block, and translate aiokafka's errors into ours. Not for produce requests. rights: as for
    `not_allowed`."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Unavailable(f"{what}: no answer from Kafka within {seconds:g} s") from error
    except kafka.KafkaError as error:
        raise classify(error, what, *rights) from error
