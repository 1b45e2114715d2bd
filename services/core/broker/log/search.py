"""Finding rows: by halves over the columns that never decrease, and past what is damaged."""

import apsw

from services.core.broker.log.faults import FAULTS, is_damage
from services.core.broker.log.frames import MAX_OFFSET, Row, place, read_row
from services.core.broker.log.store import COLUMNS, Head


def first_row_from(connection: apsw.Connection, partition: int, head: Head, column: str, least: int) -> int:
    """Offset of the first row whose `column` (top_ts, stored_ms or total) is at least this; head.next when none is."""
    low, high = head.start, head.next
    while low < high:
        middle = (low + high) // 2
        row = connection.execute(
            f"SELECT pos, count, {column} FROM batches WHERE pos BETWEEN ? AND ? ORDER BY pos DESC LIMIT 1",  # noqa: S608
            (place(partition, 0), place(partition, middle)),
        ).fetchone()
        pos, count, value = row or (0, 0, None)
        if type(value) is int and value >= least:
            high = min(middle, pos & MAX_OFFSET)
        else:
            low = max(middle + 1, (pos & MAX_OFFSET) + count if type(count) is int else 0)
    return low


def first_row_since(connection: apsw.Connection, partition: int, head: Head, timestamp: int) -> Row | None:
    """The first row that holds a record of this timestamp or newer."""
    offset = first_row_from(connection, partition, head, "top_ts", timestamp)
    row = connection.execute(
        f"SELECT {COLUMNS} FROM batches WHERE pos BETWEEN ? AND ? AND max_ts >= ? ORDER BY pos LIMIT 1",  # noqa: S608
        (place(partition, offset), place(partition, MAX_OFFSET), timestamp),
    ).fetchone()
    return None if row is None else Row(*row)


def next_intact(connection: apsw.Connection, partition: int, offset: int, end: int) -> int:
    """Where reading can go on behind a damaged place at `offset`: the first intact row behind it, else `end`."""
    while offset < end:
        try:
            row = row_behind(connection, partition, offset)
        except FAULTS as error:
            if not is_damage(error):
                raise
            offset = _step_over(connection, partition, offset, end)
            continue
        if row is None:
            return end
        if read_row(row) is not None:
            return row.first
        offset = row.first
    return end


def row_behind(connection: apsw.Connection, partition: int, offset: int) -> Row | None:
    """The next row of the partition that begins behind `offset`. Raises SQLite's errors, also for rows out of order."""
    row = connection.execute(
        f"SELECT {COLUMNS} FROM batches WHERE pos > ? AND pos <= ? ORDER BY pos LIMIT 1",  # noqa: S608
        (place(partition, offset), place(partition, MAX_OFFSET)),
    ).fetchone()
    if row is not None and not place(partition, offset) < row[0] <= place(partition, MAX_OFFSET):
        raise apsw.CorruptError("a row lies where it does not belong")
    return None if row is None else Row(*row)


def _step_over(connection: apsw.Connection, partition: int, offset: int, end: int) -> int:
    """The least offset behind which SQLite can read a row again: doubling steps, then halves between the last two."""
    fails, step = offset, 1
    while not _is_readable(connection, partition, offset + step):
        fails = offset + step
        step *= 2
        if offset + step >= end:
            return end
    works = offset + step
    while works - fails > 1:
        middle = (fails + works) // 2
        if _is_readable(connection, partition, middle):
            works = middle
        else:
            fails = middle
    return works


def _is_readable(connection: apsw.Connection, partition: int, offset: int) -> bool:
    try:
        row_behind(connection, partition, offset)
    except FAULTS as error:
        if not is_damage(error):
            raise
        return False
    return True
