"""What a batch read of topics takes: given ranges, or the topics as they are now, or between two dates."""

import json
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from services.core.broker.contract import PartitionRange, Start
from spark.place import Span


def wanted_ranges(
    options: Mapping[str, str],
    ends: Callable[[str], Mapping[int, PartitionRange]],
    offsets_at: Callable[[str, Start], Mapping[int, int]],
) -> Iterator[Span]:
    """From the options: `ranges`, JSON `[[topic, partition, start, end], …]`; or `topics`, with `since` and `until`, ISO dates
    with a time zone (from the first record that is not older, up to the first that is not older). ends, offsets_at: of a topic.
    """
    if given := options.get("ranges"):
        yield from (Span(*item) for item in json.loads(given))
        return

    def at(topic: str, option: str) -> Mapping[int, int]:
        text = options.get(option)
        return offsets_at(topic, datetime.fromisoformat(text)) if text else {}

    for topic in options["topics"].split(","):
        starts, stops = at(topic, "since"), at(topic, "until")
        for partition, held in ends(topic).items():
            start = starts.get(partition, held.start) if starts else held.start
            yield Span(topic, partition, start, stops.get(partition, held.end) if stops else held.end)
