"""The embedded log: a broker in a folder, for the processes of one host.

SQLite files (WAL, synchronous=FULL), one per topic; a row holds a batch; appends that arrive together are one transaction.
Start at `broker.LogBroker`. `blocking` has the same data for code without an event loop (Spark workers);
`verify` and `repair` are for damaged folders. The decisions behind it: docs/adr/0002-embedded-log.md.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from services.core.broker.log.broker import LogBroker

__all__ = ["LogBroker"]


def __getattr__(name: str) -> Any:
    """Only who asks for it loads it: each of Spark's Python processes reads a log, and needs no metrics and no groups."""
    if name != "LogBroker":
        raise AttributeError(name)
    from services.core.broker.log.broker import LogBroker

    return LogBroker
