"""The columns of a frame on its way, as Spark DDL: **raw**, a record as it was read, and **out**, a record to be
written, both as Spark's Kafka connector has them, for every broker; between them the **view** that a transform sees.
Imported by Spark's Python workers: nothing but text.
"""

HEADERS = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
RAW = f"key BINARY, value BINARY, topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, headers {HEADERS}"
RAW_NAMES = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
OUT = f"key BINARY, value BINARY, timestamp TIMESTAMP, headers {HEADERS}"
EVENT_TYPE = (
    "STRUCT<id: STRING, key: BINARY, time: TIMESTAMP, arrival: TIMESTAMP, type: STRING, source: STRING, "
    f"headers: {HEADERS}, topic: STRING, partition: INT, offset: BIGINT>"
)
"""The identity of an event, which a transform returns as it got it. topic, partition, offset: where it was read."""
EVENT = "event"
"""The view's column of that type."""
VALUE = "value"
"""The view's column with the payload's text."""
EVENT_TIME = "event_time"
"""The view's column with the event's time, when the pipe has a watermark over it."""
