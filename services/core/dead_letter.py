"""Dead letters: what could not be handled, kept with its reason. One stream per pipe, written by expel and by Spark.

The record keeps its key, value and headers; these headers are added in front (a redrive takes them off). Its timestamp is
when the letter was written: Kafka's retention counts from it, and an event that waited long would be deleted at once. The
event's own time is a header.
"""

import re

from services.core import retry_state
from services.core.broker.record import Record, TopicPartition
from services.core.event import MAX_MILLIS_DIGITS

PREFIX = "penstock_dead_"
REASON = PREFIX + "reason"
"""A stable word, e.g. `http_404`, `window_over`, `bad_record`, `schema_mismatch`, `transform_error`.

`damaged_batch`: the value is no event but what a broker has stored of several; it cannot be redriven."""
DETAIL = PREFIX + "detail"
"""For a person; bounded to `MAX_DETAIL` bytes; never a secret."""
NODE = PREFIX + "node"
"""Which node gave up: `transform` or `expel`."""
PIPE = PREFIX + "pipe"
DESTINATION = PREFIX + "destination"
"""Empty when the node is not one of a destination."""
VERSION = PREFIX + "version"
"""Which definition of the pipe was in force (`pipes.pipe_version`); missing where the node does not know it."""
ATTEMPTS = PREFIX + "attempts"
FIRST_FAILURE = PREFIX + "first_failure"
"""Milliseconds since the epoch of the first failed attempt."""
SOURCE = PREFIX + "source"
"""Where the original record lies: `topic:partition:offset`."""
TIME = PREFIX + "time"
"""The event's own time, ms. Letters of before lack it: their timestamp is that time."""

_MILLIS = re.compile(rb"-?[0-9]{1,%d}" % MAX_MILLIS_DIGITS)

MAX_DETAIL = 1024


def make_dead_letter(
    record: Record,
    *,
    reason: str,
    detail: str,
    node: str,
    pipe: str,
    version: str = "",
    destination: str = "",
    attempts: int = 0,
    first_failure: int,
    source: TopicPartition,
    offset: int,
    now_ms: int,
) -> Record:
    """The record as it goes to the pipe's dead letters at `now_ms`. first_failure in ms.

    Headers of an earlier dead letter or retry are replaced.
    """
    kept = tuple(header for header in record.headers if not header[0].startswith((PREFIX, retry_state.PREFIX)))
    added = (
        (REASON, reason.encode()),
        (DETAIL, detail.encode(errors="replace")[:MAX_DETAIL]),
        (NODE, node.encode()),
        (PIPE, pipe.encode()),
        *(((VERSION, version.encode()),) if version else ()),
        (DESTINATION, destination.encode()),
        (ATTEMPTS, str(attempts).encode()),
        (FIRST_FAILURE, str(first_failure).encode()),
        (SOURCE, f"{source.topic}:{source.partition}:{offset}".encode()),
        (TIME, b"%d" % record.timestamp),
    )
    return Record(record.key, record.value, now_ms, added + kept)


def event_time(record: Record) -> int:
    """The time of the event in this letter, ms."""
    time = record.header(TIME)
    return int(time) if time is not None and _MILLIS.fullmatch(time) else record.timestamp


def strip(record: Record) -> Record:
    """The original record again, for a redrive."""
    kept = tuple(header for header in record.headers if not header[0].startswith(PREFIX))
    return Record(record.key, record.value, event_time(record), kept)
