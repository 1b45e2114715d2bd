"""Where a group begins in topics that are kept for it."""

from services.core import pipes
from services.core.broker.contract import start_in


def test_our_own_topics_are_read_from_the_earliest() -> None:
    """If it fails, a destination with `start: latest` skips what was parked or retried for it, and nobody ever sends it."""
    for topic in (pipes.retry_topic("a"), pipes.parked_topic("a"), pipes.RETRY_IN, pipes.delay_topic(4), pipes.CONTROL):
        assert start_in(topic, "latest") == "earliest"


def test_streams_and_outputs_begin_as_told() -> None:
    """If it fails, a new destination with `start: latest` gets all that was ever stored."""
    for topic in ("orders", pipes.output_topic("a"), "penstock", "retry", "parked"):
        assert start_in(topic, "latest") == "latest"
