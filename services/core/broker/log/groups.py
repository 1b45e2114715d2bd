"""Consumer groups on disk: committed offsets (durable, fenced) and who may own what (leases).

Blocking. Offsets and leases share one file, so that a commit checks its lease and writes in one transaction. Two
connections: commits sync (FULL); leases and members do not (NORMAL), because after a power cut all leases are void
anyway, which the boot id in them tells.

The number of durable commits is also kept outside (groups.hwm): a file that lost some is found when it is opened.
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import closing
from typing import NamedTuple, TypeVar

import msgspec

from services.core.broker.errors import DataDamaged
from services.core.broker.log import schema
from services.core.broker.log.alive import Alive
from services.core.broker.log.clock import boot_id, boot_ms
from services.core.broker.log.durable import DurableFile, opened
from services.core.broker.log.faults import FAULTS, classified
from services.core.broker.log.layout import DataFolder
from services.core.broker.log.marks import Marks, require_no_loss
from services.core.broker.record import TopicPartition

T = TypeVar("T")

TABLES = """
CREATE TABLE meta(id INTEGER PRIMARY KEY, body BLOB NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE state(id INTEGER PRIMARY KEY, commits INTEGER NOT NULL);
CREATE TABLE offsets(grp TEXT, topic TEXT, partition INTEGER, incarnation BLOB NOT NULL, begin INTEGER NOT NULL,
                     processed INTEGER, crc INTEGER NOT NULL, PRIMARY KEY(grp, topic, partition)) WITHOUT ROWID;
CREATE TABLE members(grp TEXT, member TEXT, topics TEXT NOT NULL, deadline INTEGER NOT NULL, boot TEXT NOT NULL,
                     PRIMARY KEY(grp, member)) WITHOUT ROWID;
CREATE TABLE leases(grp TEXT, topic TEXT, partition INTEGER, owner TEXT, epoch INTEGER NOT NULL,
                    expires INTEGER NOT NULL, boot TEXT NOT NULL, PRIMARY KEY(grp, topic, partition)) WITHOUT ROWID;
"""


ALL = -1
"""In place of a partition: how many of them the topic had when the group last looked (in `begin`)."""


class Progress(NamedTuple):
    """How far a group is in a partition. begin: where it started; processed: the last processed offset, or None."""

    incarnation: bytes
    begin: int
    processed: int | None

    @property
    def next(self) -> int:
        """The offset to read next."""
        return self.begin if self.processed is None else self.processed + 1


class Claim(NamedTuple):
    """A commit of one member: per partition the epoch of its lease and the last processed offset."""

    group: str
    member: str
    offsets: Mapping[TopicPartition, tuple[int, int]]


class GroupsFile(DurableFile):
    """groups.db, open with one durable connection."""

    def __init__(self, folder: DataFolder) -> None:
        files = folder.groups
        self._alive = folder.alive
        with classified("groups"):
            if not files.db.exists():
                _create(folder)
            with opened(files) as (lock, connection):
                connection.wal_autocheckpoint(256)
                meta = schema.read_meta(connection, "groups")
                super().__init__(files, lock, connection, Marks.open(files.marks, "groups", meta.incarnation))
            try:
                self.rewrite_wal()
                self._check()
            except BaseException:
                self.close()
                raise

    def commit(self, claims: Iterable[Claim]) -> list[frozenset[TopicPartition]]:
        """Store what each claim may still commit, all in one durable transaction; gives per claim what was refused."""
        boot = boot_id()

        def work() -> tuple[list[frozenset[TopicPartition]], int]:
            return [self._commit_claim(claim, boot) for claim in claims], self._count()

        return self._durably(work)

    def enter(
        self,
        group: str,
        topic: str,
        incarnation: bytes,
        starts: Mapping[int, int],
        earliest: Mapping[int, int],
        *,
        has_begun: bool = False,
    ) -> dict[int, Progress]:
        """Remember, once, where the group starts in every partition of a topic: `latest` must mean the same after a crash.

        starts: by the group's start, for a group that is new here. has_begun: the topic knows the group, so what is not
        here was lost. Such partitions, and those added after the group came, start at their beginning: what was sent to
        them before anybody noticed belongs to the group. Gives the progress in all of them.
        """
        known = TopicPartition(topic, ALL)

        def work() -> tuple[None, int]:
            before = self._progress(group, known)
            is_new = not has_begun and (before is None or before.incarnation != incarnation)
            for partition, start in starts.items():
                source = TopicPartition(topic, partition)
                if self._progress(group, source) is None:
                    begin = start if is_new else earliest[partition]
                    self._write(group, source, Progress(incarnation, begin, None))
            self._write(group, known, Progress(incarnation, len(starts), None))
            return None, self._count()

        self._durably(work)
        return self.progress(group, topic)

    def set_progress(self, group: str, progress: Mapping[TopicPartition, Progress]) -> None:
        """Put the group where it shall go on, durably."""

        def work() -> tuple[None, int]:
            for source, value in progress.items():
                self._write(group, source, value)
            return None, self._count()

        self._durably(work)

    def begun(self, group: str, topic: str, incarnation: bytes) -> dict[TopicPartition, Progress]:
        """Everything that is known of the group in this topic, also how many partitions it has seen (`ALL`)."""
        with classified("groups"):
            sql = "SELECT partition FROM offsets WHERE grp=? AND topic=?"
            sources = [TopicPartition(topic, p) for (p,) in schema.fetch(self.connection, sql, (group, topic))]
            found = {source: self._progress(group, source) for source in sources}
        return {source: row for source, row in found.items() if row is not None and row.incarnation == incarnation}

    def forget_topic(self, topic: str) -> None:
        """Remove all groups' offsets of a topic, durably, and free its leases.

        Their epochs stay: a topic of the same name goes on counting them, so that a late commit for the old one is refused.
        """

        def work() -> tuple[None, int]:
            self.connection.execute("DELETE FROM offsets WHERE topic=?", (topic,))
            self.connection.execute("UPDATE leases SET owner=NULL WHERE topic=?", (topic,))
            return None, self._count()

        self._durably(work)

    def progress(self, group: str, topic: str) -> dict[int, Progress]:
        """How far the group is in each partition that it has begun."""
        with classified("groups"):
            rows = schema.fetch(
                self.connection,
                "SELECT partition FROM offsets WHERE grp=? AND topic=? AND partition>=0",
                (group, topic),
            )
            found = {p: self._progress(group, TopicPartition(topic, p)) for (p,) in rows}
        return {p: value for p, value in found.items() if value is not None}

    def live_members(self, group: str, topic: str) -> int:
        """How many live members of the group subscribe to the topic."""
        with classified("groups"), closing(Alive(self._alive)) as alive:
            rows = schema.fetch(
                self.connection,
                "SELECT member, topics FROM members WHERE grp=? AND boot=? AND deadline>=?",
                (group, boot_id(), boot_ms()),
            )
            living = [topics for member, topics in rows if alive.is_alive(member)]
        return sum(topic in msgspec.json.decode(topics, type=list[str]) for topics in living)

    def _durably(self, work: Callable[[], tuple[T, int]]) -> T:
        return self.transact(work, lambda done: {0: done[1]}, 1)[0]

    def _commit_claim(self, claim: Claim, boot: str) -> frozenset[TopicPartition]:
        refused = []
        for source, (epoch, processed) in claim.offsets.items():
            lease = self.connection.execute(
                "SELECT owner, epoch, boot FROM leases WHERE grp=? AND topic=? AND partition=?", (claim.group, *source)
            ).fetchone()
            progress = self._progress(claim.group, source) if lease == (claim.member, epoch, boot) else None
            if progress is None:
                refused.append(source)
            elif progress.processed is None or processed > progress.processed:
                self._write(claim.group, source, progress._replace(processed=processed))
        return frozenset(refused)

    def _progress(self, group: str, source: TopicPartition) -> Progress | None:
        row = self.connection.execute(
            "SELECT incarnation, begin, processed, crc FROM offsets WHERE grp=? AND topic=? AND partition=?",
            (group, *source),
        ).fetchone()
        if row is None:
            return None
        if schema.guard(group, *source, *row[:3]) != row[3]:
            raise DataDamaged(
                "groups",
                (),
                f"the committed offset of group {group!r} in {source.topic}[{source.partition}] is altered",
            )
        return Progress(*row[:3])

    def _write(self, group: str, source: TopicPartition, progress: Progress) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO offsets VALUES(?,?,?,?,?,?,?)",
            (group, *source, *progress, schema.guard(group, *source, *progress)),
        )

    def _count(self) -> int:
        return self._commits("UPDATE state SET commits=commits+1 WHERE id=1 RETURNING commits")

    def _commits(self, sql: str) -> int:
        match schema.fetch(self.connection, sql):
            case [[int(commits)]]:
                return commits
        raise DataDamaged("groups", (), "the number of commits is altered. Try: penstock log repair")

    def _check(self) -> None:
        commits = self._commits("SELECT commits FROM state WHERE id=1")
        (mark,) = self.marks.read(1)
        if commits < mark:
            raise DataDamaged(
                "groups", (), f"the last {mark - commits} commits of offsets are missing. Try: penstock log repair"
            )


def first_unread(folder: DataFolder, topic: str, meta: schema.Meta, groups: Collection[str]) -> list[int | None]:
    """Per partition the first offset that any group has still to read, None where there is no group.

    groups: those that the topic knows. A group without an offset in a partition has all of it to read; and where the file
    cannot be read, nobody knows who has read what, so everything counts as unread (0).
    """
    files = folder.groups
    nexts: dict[str, dict[int, int]] = {group: {} for group in groups}
    if files.db.exists():
        try:
            with closing(schema.connect(files.db)) as connection:
                sql = "SELECT grp, partition, begin, processed FROM offsets WHERE topic=? AND incarnation=?"
                for group, partition, *offsets in schema.fetch(connection, sql, (topic, meta.incarnation)):
                    nexts.setdefault(group, {})[partition] = Progress(meta.incarnation, *offsets).next
        except (*FAULTS, DataDamaged, TypeError):
            return [0] * meta.partitions
    return [min((of.get(p, 0) for of in nexts.values()), default=None) for p in range(meta.partitions)]


def _create(folder: DataFolder) -> None:
    files = folder.groups
    with folder.locked_catalog():
        if files.db.exists():
            return
        require_no_loss(files)
        incarnation = uuid.uuid4().bytes
        Marks.create(files.marks, incarnation, [0])
        draft = files.db.with_name(f".{uuid.uuid4().hex}.draft")
        connection = schema.connect(draft, create=True)
        try:
            with connection:
                connection.execute(TABLES)
                connection.execute("INSERT INTO state VALUES(1, 0)")
                schema.write_meta(connection, schema.Meta(schema.FORMAT, "groups", incarnation, 1, None, None, 0))
        finally:
            connection.close()
        draft.rename(files.db)
        connection = schema.connect(files.db)  # makes the write-ahead log, so that its name is synced with the folder
        try:
            connection.execute("UPDATE state SET commits=commits")
        finally:
            connection.close()
        folder.sync_names()
