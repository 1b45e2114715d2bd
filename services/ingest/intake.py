"""One stream as this process feeds it: from the events of a request to records by partition, column by column, and its counts.

Everything here is plain computation, done at once for a whole request or a slice of it.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import cast

import msgspec

from services.core import metrics
from services.core.broker.partitioner import choose_partition
from services.core.broker.record import Record
from services.core.ledger.report import Node
from services.core.pipes import Stream
from services.core.problem_type import ProblemType
from services.ingest import problems
from services.ingest.event_fields import (
    Column,
    Faults,
    IdMaker,
    Reader,
    field_reader,
    prefer,
    read_ids,
    read_keys,
    read_times,
)
from services.ingest.json_events import Items
from services.ingest.problems import Refusal, Refused
from services.ingest.records import Columns, Numbers, Origins, make_records, more_headers
from services.ingest.stream_ledger import StreamLedger

NODE: Node = "ingest"
_FLUSH_AT = 20_000


class Tally:
    """Counts of one stream. Call `flush` at least once a second; it hands over by itself when much has gathered."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._accepted = self._payload_bytes = 0
        self._statuses: Counter[int] = Counter()
        self._refused: Counter[str] = Counter()
        self._lags_in: list[int] = []
        self._lags_out: list[int] = []
        self._durations: list[int] = []
        self._accepted_total = metrics.INGEST_ACCEPTED.labels(stream)
        self._bytes_total = metrics.INGEST_BYTES.labels(stream)
        self._lag_in = metrics.LAG_IN.labels(stream, NODE)
        self._lag_out = metrics.LAG_OUT.labels(stream, NODE)
        self._ingest_time = metrics.INGEST_TIME.labels(stream)

    def accepted(self, times: Sequence[int], payload_bytes: int, arrival: int, now: int) -> None:
        """Events with these event times were stored. All times in ms."""
        took = now - arrival
        lags = [arrival - time for time in times]
        self._accepted += len(lags)
        self._payload_bytes += payload_bytes
        self._lags_in += lags
        self._lags_out += [lag + took for lag in lags]
        self._durations.append(took)
        if len(self._lags_in) > _FLUSH_AT:
            self.flush()

    def refused(self, reasons: Sequence[str]) -> None:
        """Events were refused for these reasons."""
        self._refused.update(reasons)

    def answered(self, status: int) -> None:
        """A request was answered."""
        self._statuses[status] += 1

    def flush(self) -> None:
        """Hand everything over to the metrics."""
        self._accepted_total.inc(self._accepted)
        self._bytes_total.inc(self._payload_bytes)
        for status, count in self._statuses.items():
            metrics.INGEST_REQUESTS.labels(self._stream, str(status)).inc(count)
        for reason, count in self._refused.items():
            metrics.INGEST_REFUSED.labels(self._stream, reason).inc(count)
        self._lag_in.observe(self._lags_in)
        self._lag_out.observe(self._lags_out)
        self._ingest_time.observe(self._durations)
        self._accepted = self._payload_bytes = 0
        for gathered in (self._statuses, self._refused, self._lags_in, self._lags_out, self._durations):
            gathered.clear()


KEYLESS_MS = 25
"""Longer than an append takes, so that few are under way at once; far shorter than anybody notices."""


class Prepared(msgspec.Struct, frozen=True):
    """Records by partition, ready to send, and what to answer for them.

    numbers: per partition, those of its records. rows: per partition, which row of the request's columns each record was.
    all_rows: those of every part. indexes: where each row stood in the request. values, ids, times (ms): by row. refused: events
    that will not be sent.
    """

    parts: dict[int, list[Record]]
    numbers: dict[int, Numbers]
    rows: dict[int, Sequence[int]]
    all_rows: Sequence[int]
    indexes: Sequence[int]
    values: list[bytes]
    ids: list[bytes]
    times: list[int]
    refused: list[Refusal]


def max_age_ms(stream: Stream) -> int:
    """How old an accepted event may be where retention counts from the event time: half of it stays for the delivery."""
    return round(stream.retention * 500)


class Intake:
    """One stream as this process feeds it. `partitions` is 0 until the broker has answered (see `probe`).

    max_age_ms: events older than that are refused, because a broker that counts retention from the event time would drop
    them soon after it acknowledged them.
    """

    def __init__(
        self, name: str, stream: Stream, rotate: Callable[[str, int], int], *, max_age_ms: int | None = None
    ) -> None:
        self.name = name
        self.partitions = 0
        self.tally = Tally(name)
        self.origins = Origins()
        self.ledger: StreamLedger | None = None
        """The reports of the numbers of `origins`; None when the ledger is off."""
        self.broker_failure: tuple[float, str] | None = None
        """When (monotonic seconds) and why a request last stored nothing at all because of the broker; None since one did."""
        self._ids = IdMaker()
        self._rotate = rotate
        self._max_age_ms = max_age_ms
        self._id_field = field_reader(stream.id) if stream.id else None
        self._key_field = field_reader(stream.key) if stream.key else None
        self._time_field = field_reader(stream.time) if stream.time else None
        self._keyless, self._keyless_since = 0, -KEYLESS_MS

    def prepare(self, items: Items, arrival: int, traceparent: str | None) -> Prepared:
        """Turn the events into records. `arrival` in ms. Raises Refused when a malformed id spoils the whole request."""
        columns, faults = self._columns(items, arrival, traceparent)
        return self._finish(items, columns, faults, arrival)

    async def prepare_slices(self, slices: Iterable[Items], arrival: int, traceparent: str | None) -> Prepared:
        """As `prepare`, for a request that is read in slices: others get their turn behind each. Raises Refused, as they do."""
        whole, faults = Items([], [], []), dict[int, tuple[ProblemType, str]]()
        columns: Columns | None = None
        indexes: list[int] = []
        for items in slices:
            more, found = self._columns(items, arrival, traceparent)
            faults.update({len(indexes) + row: fault for row, fault in found.items()})
            indexes += items.indexes
            whole = Items([], [], indexes, None, whole.refused + items.refused, items.by_line)
            columns = more if columns is None else columns.join(more)
            del items
            await asyncio.sleep(0)
        return self._finish(whole, columns or Columns([], [], None, [], None), faults, arrival)

    def _finish(self, items: Items, columns: Columns, faults: Faults, arrival: int) -> Prepared:
        count, refused = len(columns.ids), items.refused
        rows: Sequence[int] = range(count)
        if faults:
            if not items.by_line and any(kind is problems.BAD_ID_CHARACTERS for kind, _ in faults.values()):
                raise Refused(problems.BAD_ID_CHARACTERS, "Control characters are not allowed in an id.")
            refused = refused + [Refusal(items.indexes[row], *fault) for row, fault in sorted(faults.items())]
            rows = [row for row in rows if row not in faults]
        split = self._split(rows, columns.keys, arrival) if rows else {}
        numbers = {partition: self.origins.reserve(partition, len(chosen)) for partition, chosen in split.items()}
        parts = {
            partition: make_records(chosen, columns, arrival, numbers[partition]) for partition, chosen in split.items()
        }
        return Prepared(parts, numbers, split, rows, items.indexes, columns.values, columns.ids, columns.times, refused)

    def _columns(self, items: Items, arrival: int, traceparent: str | None) -> tuple[Columns, Faults]:
        """Every row's id, key, time and further headers, and which rows have a fault."""
        count = len(items.values)
        faults: Faults = {}
        found: list[bytes | None] = []
        keys: list[bytes | None] | None = None
        times = [arrival] * count
        if (column := _column(items, self._id_field, "id")) is not None:
            found, wrong = read_ids(column)
            faults.update(wrong)
        if (column := _column(items, self._key_field, "partitionkey")) is not None:
            keys, wrong = read_keys(column)
            faults.update(wrong)
        if (column := _column(items, self._time_field, "time")) is not None:
            times, wrong = read_times(column, arrival, 0 if self._max_age_ms is None else arrival - self._max_age_ms)
            faults.update(wrong)
        more = more_headers(items.attributes, count, traceparent)
        return Columns(items.values, self._fill(found, count, arrival), keys, times, more), faults

    def _fill(self, found: list[bytes | None], count: int, arrival: int) -> list[bytes]:
        """The ids given, and new ones where there is none."""
        if not found:
            return self._ids.make(count, arrival)
        if None not in found:
            return cast("list[bytes]", found)
        made = self._ids.make(count, arrival)
        return [one if one is not None else other for one, other in zip(found, made, strict=True)]

    def _split(self, rows: Sequence[int], keys: list[bytes | None] | None, arrival: int) -> dict[int, Sequence[int]]:
        """Rows by partition."""
        if keys is None:
            return {self._keyless_partition(arrival): rows}
        partitions = self.partitions
        keyless = self._keyless_partition(arrival) if None in keys else -1
        parts: dict[int, list[int]] = {}
        for row in rows:
            key = keys[row]
            partition = keyless if key is None else choose_partition(key, partitions)
            part = parts.get(partition)
            if part is None:
                parts[partition] = [row]
            else:
                part.append(row)
        return dict(parts)

    def _keyless_partition(self, arrival: int) -> int:
        """One partition for a while, then the next: what arrives while an append is under way becomes one batch, not one each."""
        if not 0 <= arrival - self._keyless_since < KEYLESS_MS:
            self._keyless, self._keyless_since = self._rotate(self.name, self.partitions), arrival
        return self._keyless


def _column(items: Items, field: Reader | None, name: str) -> Column | None:
    """The stream's own field of the payload, its gaps filled from the CloudEvents attribute."""
    own = field(items.documents) if field is not None else None
    if items.attributes is None:
        return own
    return prefer(own, [attributes.get(name) for attributes in items.attributes])
