"""The offsets up to which ingest has reported: where to read after an incarnation died, and where a minute is stored."""

from services.core.event import is_of_topic
from services.core.ledger.minute import MINUTE_MS
from services.core.ledger.report import Report
from services.observer.ledger.origins import SequenceKey

KEEP_MINUTES = 24 * 60


class ReportedOffsets:
    """Offsets by stream and partition. Grows with partitions and minutes of a day. Order and repetition do not matter.

    by_partition: each record is read from the partition to which it was written. Otherwise any shard may have it, and the
    offset to begin at is the lowest known one of all shards: offsets rise along a shard and its children.
    """

    def __init__(self, *, by_partition: bool = True) -> None:
        self._by_partition = by_partition
        self.reported: dict[str, dict[SequenceKey, int]] = {}
        """By stream: everything stored up to this offset has been reported."""
        self.marks: dict[str, dict[int, dict[int, int]]] = {}
        """By stream, partition and minute of the wall clock: an offset that existed in that minute."""
        self.runs: dict[tuple[str, str], set[str]] = {}
        """By stream and ingest instance: its incarnations."""

    def record(self, report: Report) -> None:
        """Keep the offsets of a report of ingest; other reports have none."""
        if report.node != "ingest":
            return
        reported = self.reported.setdefault(report.pipe, {})
        marks = self.marks.setdefault(report.pipe, {})
        minute = report.at_ms // MINUTE_MS
        names = {one.incarnation for one in report.sets} | {one.incarnation for one in report.reaches}
        if names := {name for name in names if not is_of_topic(name)}:  # readers of topics of others are never missed
            self.runs.setdefault((report.pipe, report.instance), set()).update(names)
        for reach in report.reaches:
            run, offset = SequenceKey(reach.incarnation, reach.partition), int(reach.offset)
            reported[run] = max(reported.get(run, -1), offset)
            by_minute = marks.setdefault(reach.partition, {})
            by_minute[minute] = max(by_minute.get(minute, -1), offset)

    def start(self, stream: str, run: SequenceKey, at_ms: int) -> int | None:
        """The offset at which to look for records that `run` wrote there after its last report, made at `at_ms`.

        None: nothing is known of the partition, so read it from its beginning.
        """
        every = self.reported.get(stream, {})
        if self._by_partition:
            reported = every.get(run)
        else:
            reported = min(
                (offset for one, offset in every.items() if one.incarnation == run.incarnation), default=None
            )
        return reported + 1 if reported is not None else self.before(stream, run.partition, at_ms // MINUTE_MS)

    def before(self, stream: str, partition: int, minute: int) -> int | None:
        """The highest known offset that existed before this minute of the wall clock; None when none is known."""
        every = self.marks.get(stream, {})
        chosen = [every.get(partition, {})] if self._by_partition else list(every.values())
        found = [
            max((offset + 1 for known, offset in marks.items() if known < minute), default=None) for marks in chosen
        ]
        return None if None in found else min((one for one in found if one is not None), default=None)

    def after(self, stream: str, partition: int, minute: int) -> int | None:
        """The lowest known offset above everything that was stored in this minute or before; None when none is known.

        None as well where it would compare offsets of several shards.
        """
        if not self._by_partition:
            return None
        marks = self.marks.get(stream, {}).get(partition, {})
        return min((offset + 1 for known, offset in marks.items() if known > minute), default=None)

    def forget(self, incarnation: str) -> None:
        for reported in self.reported.values():
            for run in [run for run in reported if run.incarnation == incarnation]:
                del reported[run]
        for runs in self.runs.values():
            runs.discard(incarnation)
        self.runs = {key: runs for key, runs in self.runs.items() if runs}

    def forget_marks(self, now: int) -> None:
        """Drop marks older than a day, except the newest of each partition."""
        oldest = now // MINUTE_MS - KEEP_MINUTES
        for partitions in self.marks.values():
            for partition, marks in partitions.items():
                if len(marks) > KEEP_MINUTES:
                    newest = max(marks)
                    partitions[partition] = {
                        minute: offset for minute, offset in marks.items() if minute >= oldest or minute == newest
                    }
