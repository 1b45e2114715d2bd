"""Creating, growing, listing and deleting topics. Blocking; safe between processes (one catalog lock)."""

import uuid
from contextlib import closing
from pathlib import Path

import msgspec

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import DataDamaged, TopicExists, Unavailable, UnknownTopic
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder, TopicFiles, is_topic_name
from services.core.broker.log.high_water_marks import HighWaterMarks, require_no_loss
from services.core.broker.log.row_format import MAX_PARTITIONS
from services.core.broker.log.sqlite_file import (
    COMPACTED_FORMAT,
    FORMAT,
    TOPIC_TABLES,
    Meta,
    checksum,
    classified,
    connect,
    write_meta,
)
from services.core.broker.log.topic_store import TopicStore
from services.core.folders import sync_folder


def create_topic(folder: DataFolder, spec: TopicSpec) -> None:
    """Create the topic, durably; it appears whole or not at all. Raises TopicExists, ValueError (name, partitions)."""
    if not is_topic_name(spec.name):
        raise ValueError(
            f"{spec.name[:80]!r} is not a topic name. Try: lower-case letters, digits, '.', '_', '-'; at most 200"
        )
    if not 1 <= spec.partitions <= MAX_PARTITIONS:
        raise ValueError(f"topic {spec.name!r} cannot have {spec.partitions} partitions. Try: 1 to {MAX_PARTITIONS}")
    files = folder.topic(spec.name)
    with folder.locked_catalog(), classified(spec.name):
        if files.db.exists():
            if not _is_deleted(folder, spec.name):
                raise TopicExists(f"topic {spec.name!r} exists")
            _unlink(folder, files)
        require_no_loss(files)
        for leftover in (files.wal, files.shm, files.marks):
            leftover.unlink(missing_ok=True)
        incarnation = uuid.uuid4().bytes
        HighWaterMarks.create(files.marks, incarnation, [0] * spec.partitions)
        draft = files.db.with_name(f".{uuid.uuid4().hex}.draft")
        try:
            _write_draft(draft, spec, incarnation)
            draft.rename(files.db)
            _make_wal(folder, spec.name)
        finally:
            for path in (draft, *(draft.with_name(draft.name + end) for end in ("-wal", "-shm"))):
                path.unlink(missing_ok=True)
        folder.sync_names()


def delete_topic(folder: DataFolder, topic: str, incarnation: str | None = None) -> bytes:
    """Delete the topic, and give its incarnation. Processes that have it open get UnknownTopic. Raises UnknownTopic, also when
    the topic is not this incarnation."""
    files = folder.topic(topic)
    with folder.locked_catalog(), classified(topic):
        with closing(TopicStore.open(folder, topic)) as store:
            if incarnation not in (None, store.meta.incarnation.hex()):
                raise UnknownTopic(f"topic {topic!r} was created again: the topic that was to be deleted is gone")
            meta = msgspec.structs.replace(store.meta, deleted=True)
            store.transact(lambda: write_meta(store.connection, meta), lambda _: {}, 0)
        _unlink(folder, files)
    return meta.incarnation


def topic_names(folder: DataFolder) -> list[str]:
    """Every topic that has a database or marks, damaged or not."""
    stems = {file.stem for file in folder.topics.iterdir() if file.suffix in (".db", ".hwm")}
    return sorted(stem for stem in stems if is_topic_name(stem))


def list_topics(folder: DataFolder) -> dict[str, int]:
    """Partition count by name. A topic that is damaged or under repair is listed with 0."""
    found = {}
    for name in topic_names(folder):
        try:
            with closing(TopicStore.open(folder, name)) as store:
                found[name] = store.meta.partitions
        except UnknownTopic:
            continue
        except (DataDamaged, Unavailable):
            found[name] = 0
    return found


def add_partitions(folder: DataFolder, topic: str, partitions: int) -> None:
    """Grow to this total. Raises UnknownTopic, ValueError when that is not growing."""
    with folder.locked_catalog(), classified(topic), closing(TopicStore.open(folder, topic)) as store:
        before = store.meta.partitions
        if not before < partitions <= MAX_PARTITIONS:
            raise ValueError(
                f"topic {topic!r} has {before} partitions and cannot get {partitions}. Try: more, at most {MAX_PARTITIONS}"
            )
        store.marks.extend(before, partitions)

        def grow() -> None:
            for partition in range(before, partitions):
                store.set_partition(partition, 0, 0)
            write_meta(store.connection, msgspec.structs.replace(store.meta, partitions=partitions))

        store.transact(grow, lambda _: {}, 0)


def register_group(folder: DataFolder, topic: str, group: str) -> None:
    """`TopicStore.register_group`. Raises UnknownTopic, StorageFull, Unavailable."""
    with classified(topic), closing(TopicStore.open(folder, topic)) as store:
        store.register_group(group)


def _write_draft(path: Path, spec: TopicSpec, incarnation: bytes) -> None:
    # Closing checkpoints, and removes the write-ahead log: one whole file.
    with closing(connect(path, create=True)) as connection, connection:
        connection.execute(TOPIC_TABLES)
        kept = (spec.retention_ms, spec.retention_bytes, WallClock().now_ms())
        version = COMPACTED_FORMAT if spec.compact else FORMAT
        meta = Meta(version, spec.name, incarnation, spec.partitions, *kept, compact=spec.compact)
        write_meta(connection, meta)
        connection.executemany(
            "INSERT INTO partitions VALUES(?,0,0,?)", [(p, checksum(p, 0, 0)) for p in range(spec.partitions)]
        )


def _make_wal(folder: DataFolder, topic: str) -> None:
    """Let the write-ahead log exist before the folder is synced: its name must survive a power cut with its content."""
    with closing(TopicStore.open(folder, topic)) as store:
        store.transact(lambda: write_meta(store.connection, store.meta), lambda _: {}, 0)


def _is_deleted(folder: DataFolder, topic: str) -> bool:
    """Whether its deletion was interrupted before the files were removed."""
    try:
        TopicStore.open(folder, topic).close()
    except UnknownTopic:
        return True
    return False


def _unlink(folder: DataFolder, files: TopicFiles) -> None:
    """Remove a deleted topic's files. It may be interrupted anywhere: marks never remain without a database (that means a lost
    one), nor a database without its own write-ahead log."""
    files.marks.unlink(missing_ok=True)
    sync_folder(folder.topics)
    unlinked = files.db.with_name(f".{uuid.uuid4().hex}.deleted")
    files.db.rename(unlinked)
    for path in (files.wal, files.shm, unlinked):
        path.unlink(missing_ok=True)
    sync_folder(folder.topics)
