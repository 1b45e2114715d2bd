"""Gathers, for the next report, which delivered events had failed attempts before. Only such events cost anything here."""

from collections.abc import Iterable, Sequence

from pyroaring import BitMap

from services.core.broker.record import Record
from services.core.event import ORIGIN, Origin
from services.core.ledger.report import MAX_NUMBER, FailureSet, pack_numbers
from services.core.undelivered.failed_attempts import FailedAttempt, pack_attempts

_EXACT = 50
"""Sets of one report with their times in ms. In further ones the times are full seconds, so that many requests share one."""
_MAX_BYTES = 64 * 1024
"""Of the failures in one report. With more, the report says that they are not recorded."""
_Key = tuple[bytes, str, int]


class Failures:
    """Of one destination, since its last report. Not thread-safe."""

    def __init__(self) -> None:
        self._found: dict[_Key, BitMap] | None = {}
        self._bytes = 0

    def add(self, attempts: Sequence[FailedAttempt], records: Iterable[Record]) -> None:
        """These records were delivered after these attempts. Records without a valid origin are left out."""
        if self._found is None:
            return
        if len(self._found) >= _EXACT:
            attempts = [FailedAttempt(at_ms // 1000 * 1000, reason) for at_ms, reason in attempts]
        packed = pack_attempts(attempts)
        for record in records:
            origin = Origin.read(record.header(ORIGIN))
            if origin is not None and 0 <= origin.sequence < MAX_NUMBER:
                self._numbers((packed, origin.incarnation, origin.partition)).add(origin.sequence)
        self._check()

    def merge(self, later: "Failures") -> None:
        """Add everything of `later`, which must not be used afterwards."""
        if self._found is None or later._found is None:
            self._found = None
            return
        for key, numbers in later._found.items():
            mine = self._numbers(key)
            mine |= numbers
        self._check()

    def pack(self) -> tuple[FailureSet, ...] | None:
        """As in `Report.failures`."""
        if self._found is None:
            return None
        return tuple(FailureSet(key[0].decode(), key[1], key[2], pack_numbers(one)) for key, one in self._found.items())

    def _numbers(self, key: _Key) -> BitMap:
        assert self._found is not None
        if key not in self._found:
            self._bytes += len(key[0]) + 50
            self._found[key] = BitMap()
        return self._found[key]

    def _check(self) -> None:
        if self._bytes > _MAX_BYTES:
            self._found = None
