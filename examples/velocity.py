"""State of your own, with TTL: an alert, at once, when a card has more than MOST payments within WITHIN_MS.

The state of a card is a list of its newest payments. Spark forgets a list that did not change for FORGET_MS, by the clock and
not by the time of the events: that must be longer than the transform may stand still.
"""

from collections.abc import Iterator
from typing import Any

from pyspark.sql import DataFrame, Row
from pyspark.sql import functions as f
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

MOST = 3
WITHIN_MS = 10 * 60 * 1000
FORGET_MS = 24 * 60 * 60 * 1000


class Velocity(StatefulProcessor):
    """Returns each payment that is one too many."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Declare the state. Spark calls it in each task, before the rows."""
        self._recent = handle.getListState("recent", "at BIGINT, amount DOUBLE", ttlDurationMs=FORGET_MS)

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        """The payments of one card in a batch. They come in any order, in another one when the batch is computed again."""
        recent = [tuple(payment) for payment in self._recent.get()]
        for row in sorted(rows, key=lambda row: (row.at, row.payment)):
            recent = [payment for payment in recent if payment[0] > row.at - WITHIN_MS]
            recent.append((row.at, row.amount))
            if len(recent) > MOST:
                total = sum(amount for _, amount in recent)
                yield Row(payment=row.payment, card=key[0], at=row.at, payments=len(recent), total=total)
        self._recent.put(recent)


def find_fast_cards(payments: DataFrame) -> DataFrame:
    """New events. The id is made from that of the payment: it is the same when a batch is computed again."""
    found = (
        payments.select(f.col("event.id").alias("payment"), "card", "amount", f.unix_millis("event.time").alias("at"))
        .groupBy("card")
        .transformWithState(
            Velocity(),
            outputStructType="payment STRING, card STRING, at BIGINT, payments INT, total DOUBLE",
            outputMode="Append",
            timeMode="ProcessingTime",
        )
    )
    return found.select(
        f.concat(f.lit("velocity-"), "payment").alias("id"),
        f.col("card").alias("key"),
        f.timestamp_millis("at").alias("time"),
        "card",
        "payment",
        "payments",
        "total",
    )
