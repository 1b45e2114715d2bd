"""State of your own, with timers: the sessions of each user. A session ends when its user was silent for GAP_MS.

The state of a user is a list of open sessions. A click makes a session of its own, and joins those that it is close to. A timer
by event time closes a session. By then the watermark has passed: no click can join it any more.
"""

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as f
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

GAP_MS = 30 * 60 * 1000


class Sessions(StatefulProcessor):
    """Returns each session once, when it has ended."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state. Spark calls it in each task, before the rows."""
        self._handle = handle
        self._open = handle.getListState("open", "first BIGINT, last BIGINT, clicks BIGINT")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """The clicks of one user in a batch, in any order."""
        spans = [tuple(span) for span in self._open.get()] + [(row.at, row.at, 1) for row in rows]
        merged: list[tuple[int, int, int]] = []
        for first, last, clicks in sorted(spans):
            if merged and first - merged[-1][1] <= GAP_MS:
                before = merged.pop()
                merged.append((before[0], max(before[1], last), before[2] + clicks))
            else:
                merged.append((first, last, clicks))
        self._open.put(merged)
        for time in {last + GAP_MS for _, last, _ in merged} - set(self._handle.listTimers()):
            self._handle.registerTimer(time)
        return iter(())

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        """Close the session that ends now. There is none when a later click has prolonged it."""
        now = expiredTimerInfo.getExpiryTimeInMs()
        spans = [tuple(span) for span in self._open.get()]
        still_open = [span for span in spans if span[1] + GAP_MS > now]
        if still_open:
            self._open.put(still_open)
        else:
            self._open.clear()
        for first, last, clicks in spans:
            if last + GAP_MS <= now:
                yield Row(user=key[0], first=first, last=last, clicks=clicks)


def close_sessions(clicks: DataFrame) -> DataFrame:
    """New events. The id is made from the user and the start of the session: it is the same when a batch is computed again."""
    ended = (
        clicks.select("user", "event_time", f.unix_millis("event_time").alias("at"))
        .groupBy("user")
        .transformWithState(
            Sessions(),
            outputStructType="user STRING, first BIGINT, last BIGINT, clicks BIGINT",
            outputMode="Append",
            timeMode="EventTime",
        )
    )
    start, end = f.timestamp_millis("first"), f.timestamp_millis("last")
    return ended.select(
        f.concat_ws(" ", "user", start).alias("id"),
        f.col("user").alias("key"),
        end.alias("time"),
        "user",
        start.alias("start"),
        end.alias("end"),
        "clicks",
    )
