"""The columns of a frame on its way, as Spark DDL: **raw**, a record as it was read, and **out**, a record to be
written, both as Spark's Kafka connector has them, but for the offset, which is a text; between them the **view** that a
transform sees. Imported by Spark's Python workers: nothing but text.
"""

HEADERS = "ARRAY<STRUCT<key: STRING, value: BINARY>>"
RAW = f"key BINARY, value BINARY, topic STRING, partition INT, offset STRING, timestamp TIMESTAMP, headers {HEADERS}"
ORIGINS_READ = "_penstock_origin"
"""A column more of raw records, when they are read with their origins: a text, with spaces between several. Where our own code
reads, the first row of some hundred has those of all, behind `#` and how many records these are, and the others null; else each
row has its own."""
RAW_NAMES = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
OUT = f"key BINARY, value BINARY, timestamp TIMESTAMP, headers {HEADERS}"
EVENT_TYPE = (
    "STRUCT<id: STRING, key: BINARY, time: TIMESTAMP, arrival: TIMESTAMP, type: STRING, source: STRING, "
    f"headers: {HEADERS}, topic: STRING, partition: INT, offset: STRING>"
)
"""The identity of an event, which a transform returns as it got it. topic, partition, offset: where it was read; the
offset is decimal digits with zeros in front, since those of Kinesis do not fit into 64 bits."""
READ = "read"
STAMPED_EVENT_TYPE = f"{EVENT_TYPE[:-1]}, {READ}: BIGINT>"
"""In real-time mode: also when the event was read, in ms since the epoch."""
EVENT = "event"
"""The view's column of that type."""
VALUE = "value"
"""The view's column with the payload's text."""
EVENT_TIME = "event_time"
"""The view's column with the event's time, when the pipe has a watermark over it."""
