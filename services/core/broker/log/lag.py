"""How far a reader is behind: in records, and by the age of the oldest that it has not processed."""

from collections.abc import Mapping

from services.core.broker.contract import Lag
from services.core.broker.log.reader import TopicReader


def lag_behind(reader: TopicReader, nexts: Mapping[int, int], now_ms: int) -> dict[int, Lag]:
    """The lag of a reader whose next unprocessed offset per partition is given. Records gone by retention count too."""
    found = {}
    heads = reader.heads()
    for partition, offset in nexts.items():
        if partition >= len(heads):
            continue
        records = max(0, heads[partition].next - offset)
        oldest = reader.timestamp_at(partition, max(offset, heads[partition].start)) if records else None
        found[partition] = Lag(records, 0 if oldest is None else max(0, now_ms - oldest))
    return found
