"""Where Spark keeps the state of a transform over several events, or the ids of `deduplicate_within`.

New checkpoints have it in RocksDB: outside of Java's heap, in bounded memory, the rest on the disk of the executor. Each batch
leaves its changes in the checkpoint, and Spark now and then a whole copy. The files of a batch have names of their own, and
`commits/N` says which ones count: what a replaced driver's executors write is never read (ADR 0017).

Spark cannot move state from one kind of store to another. So a checkpoint keeps the one that it was begun with: in the versions
up to 0.2.0.dev, all state is in Java's heap, and each batch's changes are in files that the next writer replaces.

The number of parts of the state never changes. Spark keeps it in `offsets/N`. In those of sources with names, Spark 4.2.0 forgets
it until the query starts for the second time (SPARK-59919). That start would look for the state in as many parts as its own
settings say. So the number is noted beside the checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark.sql import SparkSession

from spark.jobs.checkpoint import Checkpoint
from spark.transforms.preparation import Prepared

_STORE = "spark.sql.streaming.stateStore"
PROVIDER = f"{_STORE}.providerClass"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_HEAP = "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider"
FORMAT = f"{_STORE}.checkpointFormatVersion"
_OWN_NAMES = "2"
"""The format in which files of state have names of their own."""
_FORMER = "1"
_PARTS = "spark.sql.shuffle.partitions"
PARTS_FILE = "state_parts.json"
"""The number of parts of the state of a query whose sources have names."""


def needs_state(prepared: Prepared) -> bool:
    return prepared.deduplicates or bool(prepared.state)


def checkpoint_version(prepared: Prepared, checkpoint: Checkpoint) -> int:
    """The format that a run needs: earlier versions cannot read the state of a new checkpoint."""
    return 2 if needs_state(prepared) and checkpoint.newest("offsets") is None else 1


@contextmanager
def state_store(
    session: SparkSession, prepared: Prepared, checkpoint: Checkpoint, *, named: bool = False
) -> Iterator[None]:
    """A query that starts within the block has the state store of its checkpoint, or of a new one. It keeps these settings.

    named: as in `Identity.named`. Raises the errors of reading and writing.
    """
    provider, version = _chosen(checkpoint) if needs_state(prepared) else (_HEAP, _FORMER)
    parts = int(session.conf.get(_PARTS) or 1)
    session.conf.set(_PARTS, _noted_parts(checkpoint, parts) if named else parts)
    session.conf.set(PROVIDER, provider)
    session.conf.set(FORMAT, version)
    try:
        yield
    finally:  # the query of bad records has no state
        session.conf.set(_PARTS, parts)
        session.conf.set(PROVIDER, _HEAP)
        session.conf.set(FORMAT, _FORMER)


def _noted_parts(checkpoint: Checkpoint, now: int) -> int:
    """now: the number of this start, which a new checkpoint gets."""
    found = checkpoint.read_note(PARTS_FILE, int)
    if found is None:
        found = now
        checkpoint.write_note(PARTS_FILE, found)
    return found


def _chosen(checkpoint: Checkpoint) -> tuple[str, str]:
    planned, done = checkpoint.newest("offsets"), checkpoint.newest("commits")
    if planned is None:
        return ROCKSDB, _OWN_NAMES
    provider = checkpoint.settings(planned).get(PROVIDER, _HEAP)
    if provider != ROCKSDB:
        return provider, _FORMER
    return provider, _OWN_NAMES if done is None or checkpoint.has_named_state(done) else _FORMER
