"""What one stream's requests add up to between two looks: plain numbers on the hot path, handed to the metrics now and then."""

from collections import Counter
from collections.abc import Sequence

from services.core import metrics
from services.core.ledger.report import Node

NODE: Node = "ingest"
_HAND_OVER_AT = 20_000


class Tally:
    """Counts of one stream. Call `flush` at least once a second; it hands over by itself when much has gathered."""

    def __init__(self, stream: str) -> None:
        self._stream = stream
        self._accepted = self._payload_bytes = 0
        self._statuses: Counter[int] = Counter()
        self._refused: Counter[str] = Counter()
        self._lags_in: list[int] = []
        self._lags_out: list[int] = []
        self._took: list[int] = []
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
        self._took.append(took)
        if len(self._lags_in) > _HAND_OVER_AT:
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
        self._ingest_time.observe(self._took)
        self._accepted = self._payload_bytes = 0
        for gathered in (self._statuses, self._refused, self._lags_in, self._lags_out, self._took):
            gathered.clear()
