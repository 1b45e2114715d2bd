"""From records to sets of origins: an append per event on the hot path, the reading of origins in bulk.

The origins of a batch mostly come from one incarnation and partition. Then taking that prefix off, reading the numbers and
putting them into a set are one call each; adding and reading take 0.2 us an event in all. Other batches are read one by one
(0.5 us).
"""

import re
from collections.abc import Sequence

import orjson

from services.core import metrics
from services.core.broker.record import Record
from services.core.event import ORIGIN
from services.core.ledger.report import MAX_NUMBER, Node, Outcome
from services.core.ledger.sets import SetKey, Sets

_PLACE = 2
"""Where ingest puts the origin among a record's headers; elsewhere it is searched for."""
_FOLD_AT = 20_000
"""Origins that wait to be read at most."""
_ORIGIN = re.compile(rb"([a-z0-9]{1,64}):(\d{1,9}):(\d{1,10})")
_DIGITS_AND_COMMAS = b"0123456789,"


class Accumulator:
    """What one node settled of one pipe. Not thread-safe.

    Records without an origin, or with one that cannot be read, were written by others: they are outside the ledger and
    counted, nothing else.
    """

    def __init__(self, node: Node, pipe: str) -> None:
        self._waiting: dict[Outcome, list[list[bytes]]] = {}
        self._count = 0
        self._sets = Sets()
        self._missing = metrics.LEDGER_OUTSIDE.labels(node, pipe, "no_origin")
        self._malformed = metrics.LEDGER_OUTSIDE.labels(node, pipe, "bad_origin")

    def add(self, outcome: Outcome, records: Sequence[Record]) -> None:
        """These records were settled so."""
        try:
            found = [value for name, value in [record.headers[_PLACE] for record in records] if name == ORIGIN]
        except IndexError:
            found = []
        if len(found) < len(records):
            found = [origin for record in records if (origin := record.header(ORIGIN)) is not None]
            self._missing.inc(len(records) - len(found))
        if found:
            self._waiting.setdefault(outcome, []).append(found)
            self._count += len(found)
        if self._count > _FOLD_AT:
            self._fold_all()

    def drain(self) -> Sets:
        """Everything since the last call."""
        self._fold_all()
        sets, self._sets = self._sets, Sets()
        return sets

    def _fold_all(self) -> None:
        for outcome in self._waiting:
            self._fold(outcome)
        self._count = 0

    def _fold(self, outcome: Outcome) -> None:
        """Batches that begin alike together: partitions alternate from batch to batch, seldom within one."""
        waiting = self._waiting[outcome]
        alike: dict[bytes, list[bytes]] = {}
        for batch in waiting:
            alike.setdefault(batch[0].rpartition(b":")[0], []).extend(batch)
        for origins in alike.values():
            if not self._fold_uniform(outcome, origins):
                self._fold_each(outcome, origins)
        waiting.clear()

    def _fold_uniform(self, outcome: Outcome, origins: list[bytes]) -> bool:
        """Read all at once; False, with nothing done, when they differ in more than their numbers or something is odd."""
        first = _ORIGIN.fullmatch(origins[0])
        if first is None:
            return False
        prefix = origins[0][: first.start(3)]
        numbers = (b"," + b",".join(origins)).replace(b"," + prefix, b",")[1:]
        if numbers.translate(None, _DIGITS_AND_COMMAS):
            return False
        try:
            read = orjson.loads(b"[" + numbers + b"]")
        except orjson.JSONDecodeError:  # a leading zero, or nothing at all
            return False
        if len(read) != len(origins) or max(read) >= MAX_NUMBER:
            return False
        self._sets.add(SetKey(outcome, first[1].decode(), int(first[2])), read)
        return True

    def _fold_each(self, outcome: Outcome, origins: list[bytes]) -> None:
        found: dict[tuple[bytes, bytes], list[int]] = {}
        malformed = 0
        for origin in origins:
            match = _ORIGIN.fullmatch(origin)
            if match is None or (number := int(match[3])) >= MAX_NUMBER:
                malformed += 1
            else:
                found.setdefault((match[1], match[2]), []).append(number)
        self._malformed.inc(malformed)
        for (incarnation, partition), numbers in found.items():
            self._sets.add(SetKey(outcome, incarnation.decode(), int(partition)), numbers)
