"""What a member knows of each partition that it owns."""

from services.core.broker.record import Record, TopicPartition


class Owned:
    """One owned partition. position: the next offset to return. rest: records read but not returned yet, from position.

    epoch: of the lease. incarnation: of the topic when it was taken. processed_next: behind the last committed offset.
    revoking: being drained, nothing more is returned. retry_at: after an error, when to read again (boot ms).
    """

    __slots__ = (
        "epoch",
        "incarnation",
        "paused",
        "position",
        "processed_next",
        "rest",
        "retry_at",
        "revoking",
        "source",
    )

    def __init__(self, source: TopicPartition, epoch: int, incarnation: bytes, position: int) -> None:
        self.source, self.epoch, self.incarnation = source, epoch, incarnation
        self.position = self.processed_next = position
        self.rest: list[Record] = []
        self.revoking = self.paused = False
        self.retry_at = 0

    @property
    def is_readable(self) -> bool:
        """Whether poll may return its records."""
        return not (self.revoking or self.paused)
