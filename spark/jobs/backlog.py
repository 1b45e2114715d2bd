"""How many records a pipe has not done: asked beside its query, so that it is known, and grows, while the query is down."""

from collections.abc import Sequence

from pyspark.sql import SparkSession

from spark.brokers.endpoint import Endpoint
from spark.checkpoint import Checkpoint

Backlog = dict[tuple[str, int], int]
"""Records by topic and partition."""


def measure_backlog(
    session: SparkSession, endpoint: Endpoint, checkpoint: Checkpoint, topics: Sequence[str]
) -> Backlog:
    """From what the last finished batch ended with to the present ends. Blocking. Raises what reading either raises."""
    position = checkpoint.done_up_to(endpoint.parse_position)
    return {
        (topic, partition): max(0, end - max(start, position.get((topic, partition), start)))
        for topic, partition, start, end in endpoint.held(session, topics)
    }
