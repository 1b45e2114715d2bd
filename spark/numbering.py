"""Origins for events that a transform makes: the same ones, in all, when a batch is computed again.

A task numbers its rows. How rows are shared among tasks follows from the batch's offsets and the session's settings, so the
second time each task has as many as the first time, whatever their order.
"""

from typing import NamedTuple

from pyspark.sql import Column
from pyspark.sql import functions as f

from services.core.ledger.report import MAX_NUMBER

_ROWS = 1 << 20
_BATCHES = MAX_NUMBER // _ROWS
_TASKS = 1 << 16


class Numbering(NamedTuple):
    """Of one batch. incarnation, first: as origins have them. at_ms: the time of the batch, which is when its events arrived."""

    incarnation: str
    first: int
    at_ms: int

    def origin(self) -> Column:
        """The packed origin of a row. A task's rows beyond the room for them go to another partition of the incarnation."""
        row = f.monotonically_increasing_id().bitwiseAND((1 << 33) - 1)
        partition = f.spark_partition_id() + f.shiftright(row, _ROWS.bit_length() - 1) * _TASKS
        number = f.lit(self.first) + row.bitwiseAND(_ROWS - 1)
        return f.concat_ws(":", f.lit(self.incarnation), partition.cast("string"), number.cast("string"))


def number_batch(query_id: str, batch: int, at_ms: int, mark: str = "") -> Numbering:
    """query_id: of the checkpoint, [a-z0-9]. mark: of a part of a batch, [a-z0-9]: its rows are numbered by themselves.

    Every so many batches an incarnation ends before its numbers grow too large.
    """
    return Numbering(f"{query_id}{batch // _BATCHES:08x}{mark}", batch % _BATCHES * _ROWS, at_ms)
