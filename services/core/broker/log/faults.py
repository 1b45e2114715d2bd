"""From SQLite's and the system's errors to the broker's, for the two moments where the difference matters."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import apsw

from services.core.broker.errors import BrokerError, DataDamaged, StorageFull, Unavailable

FAULTS = (apsw.Error, OSError, UnicodeDecodeError)
"""What a statement raises. The last: damage made text of a number or of bytes."""

_FULL = (errno.ENOSPC, errno.EDQUOT)


def classify(error: Exception, topic: str) -> BrokerError:
    """The error of an operation that stored nothing (a read, or a transaction that was rolled back)."""
    if isinstance(error, BrokerError):
        return error
    if is_damage(error):
        return DataDamaged(topic, (), f"{error}. Try: penstock log verify, then penstock log repair")
    if isinstance(error, apsw.FullError) or (isinstance(error, OSError) and error.errno in _FULL):
        return StorageFull(f"{topic}: disk full, nothing was stored. Try: freeing space; appends go on by themselves")
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return Unavailable(f"{topic}: another process held the log's write lock for too long")
    return Unavailable(f"{topic}: {type(error).__name__}: {error}")


@contextmanager
def classified(topic: str) -> Iterator[None]:
    """Turn SQLite's and the system's errors of a read into the broker's."""
    try:
        yield
    except FAULTS as error:
        raise classify(error, topic) from error


def is_damage(error: Exception) -> bool:
    """Whether SQLite found its own structure damaged: malformed, tables missing, or shorter than it says.

    Our statements are fixed and right, so an SQL error means an altered schema.
    """
    if isinstance(
        error, apsw.CorruptError | apsw.NotADBError | apsw.SQLError | apsw.SchemaChangeError | UnicodeDecodeError
    ):
        return True
    return isinstance(error, apsw.IOError) and getattr(error, "extendedresult", 0) == apsw.SQLITE_IOERR_SHORT_READ
