"""Everything that can go wrong on the broker layer.

    BrokerError
    ├── Unavailable          nothing was stored; the same call may succeed later (`retriable`)
    │   ├── Throttled        … and the broker asks to slow down
    │   ├── StorageFull      … because the disk is full; heals by itself when there is room again
    │   ├── AccessRefused    … because a login or a certificate is not accepted; heals by itself when that is corrected
    │   │   └── NotAllowed   … because the cluster gives our user no right to it; heals by itself when it does
    │   └── GroupHasMembers  … because members of the group live: it can be moved only without them
    ├── OutcomeUnknown       it may have been stored: a time-out after the request left (`retriable`: ids make it safe)
    ├── RecordTooLarge       this record can never be stored
    ├── RecordRefused        this record alone is refused, as long as nobody changes the topic or its settings
    ├── UnknownTopic         no such topic; topics are never created by accident
    ├── TopicExists
    ├── Overloaded           our own bounded queue is full; nothing was sent
    ├── NotOwner             a commit for a partition that this member no longer owns: refused
    ├── OffsetOutOfRange     the position is before the first stored record, or behind the end
    │   └── PositionLost     … because the broker has lost the group's committed offset
    ├── DataDamaged          stored records are missing or altered; names their offsets
    ├── UnsafeTopic          a topic's settings break the promise of durability, or make every write fail
    ├── HomeChanged          a topic that this member reads has moved to another broker; it must join again
    ├── BadDataFolder        the log's folder cannot keep the promise (network file system)
    ├── NewerFormat          a newer Penstock stored it in a format that this one does not read
    └── BrokerClosed         used after close, or closed while waiting

Backends classify errors and never retry; `producer.Producer` alone retries, and only errors that are `retriable`.
"""

from collections.abc import Sequence
from typing import ClassVar


class BrokerError(Exception):
    """Base of all broker errors. `retriable`: the same call may succeed later without anybody changing anything."""

    retriable: ClassVar[bool] = False


class Unavailable(BrokerError):
    """The broker could not handle the request and stored nothing of it."""

    retriable: ClassVar[bool] = True


class Throttled(Unavailable):
    """The broker refused because of its rate limits and stored nothing. `retry_after`: seconds it asked for, or None."""

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class StorageFull(Unavailable):
    """The disk is full; nothing was stored. Try: free space or a shorter retention. Appends go on by themselves."""


class AccessRefused(Unavailable):
    """The broker does not accept our login or certificate, or we do not accept its certificate. No request was sent."""


class NotAllowed(AccessRefused):
    """The broker knows our user, and gives it no right to this. The text names the missing right. Nothing was stored."""


class GroupHasMembers(Unavailable):
    """The group was not moved, because it has members. Try: stop them first."""


class OutcomeUnknown(BrokerError):
    """No answer in time after the request left: the records may or may not be stored. Sending again may duplicate."""

    retriable: ClassVar[bool] = True


class RecordTooLarge(BrokerError):
    """One record is larger than the broker's limit."""


class RecordRefused(BrokerError):
    """The broker does not accept this record in this topic: its time, or that it has no key. Nothing of it was stored."""


class UnknownTopic(BrokerError):
    """The topic does not exist. Try: declare it under `streams:` in the pipe file."""


class TopicExists(BrokerError):
    """A topic of this name exists already."""


class Overloaded(BrokerError):
    """The producer's bounded queue is full; nothing of this call was queued or sent."""


class NotOwner(BrokerError):
    """A commit was refused for these partitions: this member no longer owns them. The others were committed."""

    def __init__(self, partitions: frozenset[tuple[str, int]]) -> None:
        names = ", ".join(f"{topic}[{partition}]" for topic, partition in sorted(partitions))
        super().__init__(f"commit refused: {names} no longer owned by this member")
        self.partitions = partitions


class OffsetOutOfRange(BrokerError):
    """The next offset to read is outside of the stored range `[start, end)`.

    `poll` raises it each time, until an operator decides: no position is reset silently. missing: the number of lost records;
    1 stands for any number when offsets are not contiguous.
    """

    def __init__(
        self, topic: str, partition: int, wanted: int, start: int, end: int, *, contiguous: bool = True
    ) -> None:
        self.missing = max(0, start - wanted if contiguous else int(start > wanted))
        count = self.missing if contiguous or not self.missing else "an unknown number of"
        super().__init__(
            f"{topic}[{partition}]: offset {wanted} is outside of the stored range {start} to {end}; "
            f"{count} records are gone. Try: penstock group reset, as in 'When a partition stops' in docs/operating.md"
        )
        self.topic, self.partition, self.wanted, self.start, self.end = topic, partition, wanted, start, end


class PositionLost(OffsetOutOfRange):
    """The group has read this partition before, and the broker has lost its offset. Beginning again would skip events or
    deliver all of them again. `poll` raises it until an operator sets the group's offset. missing is 0: no record is lost."""

    def __init__(self, group: str, topic: str, partition: int, start: int, end: int) -> None:
        super().__init__(topic, partition, start, start, end)
        BrokerError.__init__(
            self,
            f"{topic}[{partition}]: group {group} has read here before, but Kafka no longer has its offset: Kafka keeps the "
            f"offsets of a group without members for offsets.retention.minutes. Stored: {start} to {end}. Try: penstock group "
            "skip or reset, as in 'When a partition stops' in docs/operating.md",
        )


class DataDamaged(BrokerError):
    """Stored records are missing or altered. `ranges`: (partition, first offset, last offset) of the unreadable records."""

    def __init__(self, topic: str, ranges: tuple[tuple[int, int, int], ...], detail: str) -> None:
        names = ", ".join(f"[{partition}] offsets {first} to {last}" for partition, first, last in ranges)
        super().__init__(f"{topic}: damaged: {detail}" + (f": {names}" if names else ""))
        self.topic, self.ranges, self.detail = topic, ranges, detail


class UnsafeTopic(BrokerError):
    """The settings of topics allow the loss of acknowledged records, or refuse all. `problems`: (topic, key, text)."""

    def __init__(self, problems: Sequence[tuple[str, str, str]]) -> None:
        super().__init__("\n".join(f"topic {topic}: {key}: {text}" for topic, key, text in problems))
        self.problems = tuple(problems)


class HomeChanged(BrokerError):
    """A topic moves, or has moved, to another broker of the fleet: this membership ends. The next one is where the topic is."""


class BadDataFolder(BrokerError):
    """The log's data folder cannot be used. Try: a folder on a local disk that this user may write."""


class NewerFormat(BrokerError):
    """Stored data has a format that this version does not read (`version.newer_format`). Nothing was read or written."""


class BrokerClosed(BrokerError):
    """The broker, producer or consumer was closed."""
