"""Where a group begins in topics that are kept for it."""

from services.core.broker.contract import start_in
from services.core.pipe_file import topic_names


def test_our_own_topics_are_read_from_the_earliest() -> None:
    """If it fails, a destination with `start: latest` skips what was parked or retried for it, and nobody ever sends it."""
    for topic in (
        topic_names.retry_topic("a"),
        topic_names.parked_topic("a"),
        topic_names.RETRY_IN,
        topic_names.delay_topic(4),
        topic_names.CONTROL,
    ):
        assert start_in(topic, "latest") == "earliest"


def test_streams_and_outputs_begin_as_told() -> None:
    """If it fails, a new destination with `start: latest` gets all that was ever stored."""
    for topic in ("orders", topic_names.output_topic("a"), "penstock", "retry", "parked"):
        assert start_in(topic, "latest") == "latest"
