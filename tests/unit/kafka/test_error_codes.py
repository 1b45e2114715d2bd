"""What Kafka's error codes mean for a sender, and that nobody creates topics by asking for them."""

import asyncio

import aiokafka.client
import pytest
from aiokafka import errors as kafka
from aiokafka.protocol.metadata import MetadataRequest_v5

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
from services.core.broker.kafka.error_codes import bounded, classify, classify_produce, find_cause, raise_for


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (3, Unavailable),  # UNKNOWN_TOPIC_OR_PARTITION
        (5, Unavailable),  # LEADER_NOT_AVAILABLE
        (19, Unavailable),  # NOT_ENOUGH_REPLICAS
        (45, Unavailable),  # OUT_OF_ORDER_SEQUENCE_NUMBER
        (46, Unavailable),  # DUPLICATE_SEQUENCE_NUMBER: the number is taken, this batch is not there
        (47, Unavailable),  # INVALID_PRODUCER_EPOCH
        (49, Unavailable),  # INVALID_PRODUCER_ID_MAPPING
        (90, Unavailable),  # PRODUCER_FENCED
        (100, Unavailable),  # UNKNOWN_TOPIC_ID
        (89, Throttled),  # THROTTLING_QUOTA_EXCEEDED
        (10, RecordTooLarge),  # MESSAGE_TOO_LARGE
        (32, RecordRefused),  # INVALID_TIMESTAMP
        (87, RecordRefused),  # INVALID_RECORD: in a compacted topic one without a key
        (2, BrokerError),  # CORRUPT_MESSAGE: perhaps altered on the way
        (29, NotAllowed),  # TOPIC_AUTHORIZATION_FAILED
        (31, NotAllowed),  # CLUSTER_AUTHORIZATION_FAILED
        (17, BrokerError),  # INVALID_TOPIC_EXCEPTION
        (21, BrokerError),  # INVALID_REQUIRED_ACKS
        (43, BrokerError),  # UNSUPPORTED_FOR_MESSAGE_FORMAT
        (53, NotAllowed),  # TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        (76, BrokerError),  # UNSUPPORTED_COMPRESSION_TYPE
        (6, OutcomeUnknown),  # NOT_LEADER_OR_FOLLOWER: also after the old leader wrote
        (7, OutcomeUnknown),  # REQUEST_TIMED_OUT
        (20, OutcomeUnknown),  # NOT_ENOUGH_REPLICAS_AFTER_APPEND
        (56, OutcomeUnknown),  # KAFKA_STORAGE_ERROR
        (12345, OutcomeUnknown),  # a future version's
    ],
)
def test_produce_codes(code: int, kind: type[BrokerError]) -> None:
    """If it fails, "not stored" is said of records that may be there, or a retry is given up or made in vain."""
    assert type(classify_produce(code, "t[0]")) is kind


def test_other_requests() -> None:
    """If it fails, operators see the wrong kind of error."""
    assert type(classify(kafka.UnknownTopicOrPartitionError(), "x")) is UnknownTopic
    assert type(classify(kafka.TopicAlreadyExistsError(), "x")) is TopicExists
    assert type(classify(kafka.NodeNotReadyError(), "x")) is Unavailable
    assert type(classify(kafka.InvalidPartitionsError(), "x")) is BrokerError
    with pytest.raises(Throttled):
        raise_for(89, "create topic")
    raise_for(0, "nothing")


def test_a_missing_right_is_named() -> None:
    """If it fails, an operator hears that something is not allowed, but not which ACL is missing on what."""
    for error in (
        classify_produce(29, "a.b[0]"),
        classify(kafka.TopicAuthorizationFailedError(), "x", "Write on topic a.b"),
    ):
        assert "our user lacks Write on topic a.b. Try: an ACL" in str(error)
        assert error.retriable, "it heals when the right is granted"
    rights = "Read on group g", "Read on topic t"
    with pytest.raises(NotAllowed, match="lacks Read on group g"):
        raise_for(30, "commit of group g in t[0]", *rights)
    ended = kafka.KafkaError("Unexpected error during coordination")
    ended.__cause__ = kafka.GroupAuthorizationFailedError("g")
    assert "lacks Read on group g" in str(classify(find_cause(ended), "poll", *rights))


async def test_bounded_ends() -> None:
    """If it fails, a silent broker makes a caller wait for ever."""
    with pytest.raises(Unavailable, match="ask"):
        async with bounded("ask", 0.01):
            await asyncio.Event().wait()


def test_metadata_requests_create_nothing() -> None:
    """If it fails, a consumer of a deleted topic creates it again, empty, on clusters that allow it."""
    request = aiokafka.client.MetadataRequest(["t"]).prepare({3: (0, 5)})
    assert isinstance(request, MetadataRequest_v5)
    assert request.allow_auto_topic_creation is False
