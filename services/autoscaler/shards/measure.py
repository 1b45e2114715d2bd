"""From counters to the figures of one stream."""

from collections.abc import Iterator, Sequence

from services.autoscaler.counters import Window
from services.autoscaler.shards.figures import StreamFigures
from services.autoscaler.shards.layout import shard_loads
from services.core.broker.resharding import ShardCapacity, StreamShards

_BYTES, _ENTRIES = "penstock_broker_partition_bytes_total", "penstock_broker_partition_entries_total"
_THROTTLES, _WAITS = "penstock_broker_shard_throttles_total", "penstock_broker_shard_wait_seconds_total"

_WAITING = 0.5
"""Entries that waited at a time, on average: a shard that held up more is full."""

_BUSY, _REFUSED = 0.5, 0.05
"""A shard with less load that refused a smaller share of its entries is full only if it was in the window before, too: one
refusal of an almost empty shard is the service's hiccup."""


def measure(
    topic: str, shards: StreamShards, windows: Sequence[Window], capacity: ShardCapacity, covered: float, room: int
) -> StreamFigures:
    """The load of each slot over the windows (not empty, newest last), and which shards are full in the newest.

    Full: it held entries up, and was busy, refused many, or held some up in the window before, too.
    """
    seconds = sum(window.seconds for window in windows)
    newest = windows[-1]
    taken = _per_slot(topic, _BYTES, shards.partitions, windows)
    entries = _per_slot(topic, _ENTRIES, shards.partitions, windows)
    slots = tuple(
        max(size / capacity.bytes, count / capacity.entries) / seconds
        for size, count in zip(taken, entries, strict=True)
    )
    held_up = [_held_up(topic, window) for window in windows]
    again = held_up[-1].intersection(*held_up[-2:-1]) if len(windows) > 1 else frozenset()
    refused = dict(_per_shard(topic, _THROTTLES, newest))
    loads = shard_loads(shards.layout, slots)
    counts = shard_loads(shards.layout, _per_slot(topic, _ENTRIES, shards.partitions, [newest]))
    full = frozenset(
        at
        for at, number in enumerate(map(str, shards.numbers))
        if number in held_up[-1]
        and (number in again or loads[at] > _BUSY or refused.get(number, 0.0) > _REFUSED * counts[at])
    )
    return StreamFigures(
        shards.layout, slots, full, covered, not shards.is_active, room, any(window.silent for window in windows)
    )


def _held_up(topic: str, window: Window) -> frozenset[str]:
    """Shards that refused anything, or let too much wait."""
    waits = {shard for shard, value in _per_shard(topic, _WAITS, window) if value > _WAITING * window.seconds}
    return frozenset(waits.union(shard for shard, value in _per_shard(topic, _THROTTLES, window) if value > 0))


def _per_shard(topic: str, metric: str, window: Window) -> Iterator[tuple[str, float]]:
    for labels, value in window.of(metric, topic=topic):
        yield labels["shard"], value


def _per_slot(topic: str, metric: str, partitions: int, windows: Sequence[Window]) -> list[float]:
    found = [0.0] * partitions
    for window in windows:
        for labels, value in window.of(metric, topic=topic):
            if int(labels["partition"]) < partitions:
                found[int(labels["partition"])] += value
    return found
