"""Which events of a topic a destination gets.

When a transform has several outputs, the transform has evaluated the filters and named the outputs in a header of each record
(`event.OUTPUTS`). So a filter costs expel one look at the last header of an event, and each destination still has one position
in one topic.

A tombstone of a compacted stream says that a key is gone. Only another compacted stream gets it: no body has a form for it.
"""

from collections.abc import Collection
from typing import NamedTuple

from services.core.broker.record import Batch, Record
from services.core.event import ID, OUTPUTS
from services.core.pipe_file.pipes import Destination, Pipe

_MAX_REMEMBERED = 10_000
"""Different values of the header whose answer is remembered. 32 outputs can be combined in more ways."""


class Chosen(NamedTuple):
    """mine: the events of the destination, without the header; None: there is none. filtered: all other records."""

    mine: Batch | None
    filtered: Batch | None


class OutputFilter:
    """Of one destination. names: of its output, with the former one. None: it gets every event."""

    def __init__(self, names: Collection[str] | None) -> None:
        self._names = None if names is None else frozenset(name.encode() for name in names)
        self._known: dict[bytes, bool] = {}

    @classmethod
    def of(cls, pipe: Pipe, destination: Destination) -> "OutputFilter | None":
        """None when the pipe's transform has only one output, which has no header."""
        outputs = {} if pipe.transform is None else pipe.transform.outputs
        if not outputs:
            return None
        if destination.output is None:
            return cls(None)
        former = outputs[destination.output].renamed_from
        return cls({destination.output} if former is None else {destination.output, former})

    def choose(self, batch: Batch) -> Chosen:
        """Not for a batch with damage. An event without the header, from before the transform had outputs, is in each of them."""
        offsets: list[int] = []
        records: list[Record] = []
        other_offsets: list[int] = []
        other_records: list[Record] = []
        for offset, record in zip(batch.offsets, batch.records, strict=True):
            headers = record.headers
            if not headers or headers[-1][0] != OUTPUTS:
                offsets.append(offset)
                records.append(record)
            elif self._is_mine(headers[-1][1]):
                offsets.append(offset)
                records.append(Record(record.key, record.value, record.timestamp, headers[:-1]))
            else:
                other_offsets.append(offset)
                other_records.append(record)
        return Chosen(_batch(batch, offsets, records), _batch(batch, other_offsets, other_records))

    def _is_mine(self, outputs: bytes) -> bool:
        """outputs: the header's value."""
        if self._names is None:
            return True
        known = self._known.get(outputs)
        if known is None:
            known = not self._names.isdisjoint(outputs.split(b","))
            if len(self._known) < _MAX_REMEMBERED:
                self._known[outputs] = known
        return known


def split_tombstones(batch: Batch, *, of_others: bool = False, taken: bool = False) -> Chosen:
    """Filtered are tombstones: records with a key and an event id, and without a value; in a topic of others, all without a
    value. Not for a batch with damage.

    taken: the destination takes tombstones. Then only those are filtered that delete nothing: they have no key.
    """
    gone = [
        index
        for index, record in enumerate(batch.records)
        if record.value is None
        and not (taken and record.key)
        and (of_others or (record.key is not None and record.header(ID)))
    ]
    if not gone:
        return Chosen(batch, None)
    offsets = {batch.offsets[index] for index in gone}
    return Chosen(batch.without(offsets), _batch(batch, sorted(offsets), [batch.records[index] for index in gone]))


def _batch(batch: Batch, offsets: list[int], records: list[Record]) -> Batch | None:
    return Batch(batch.topic, batch.partition, offsets, records) if offsets else None
