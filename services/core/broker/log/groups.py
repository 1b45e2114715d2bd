"""Consumer groups on disk: committed offsets, durable and fenced. `leases` has the other half of the file.

Offsets and leases share groups.db, so a commit checks its lease and writes in one transaction. Two connections: commits sync
(FULL); leases and members do not (NORMAL), because after a power cut all leases are void: they name the boot.

The number of durable commits is also in groups.hwm: a file that lost some is found when it is opened. `GroupsFile` blocks;
`CommittedOffsets` is for the event loop.
"""

import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from services.core.broker.errors import BrokerError, DataDamaged, GroupHasMembers
from services.core.broker.log.clock import boot_id, boot_ms
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.group_commit import Gatherer, PendingRequest
from services.core.broker.log.high_water_marks import HighWaterMarks, require_no_loss
from services.core.broker.log.leases import MemberLocks
from services.core.broker.log.sqlite_file import (
    FAULTS,
    FORMAT,
    DurableFile,
    Meta,
    checksum,
    classified,
    connect,
    fetch,
    opened,
    read_meta,
    shared_lock,
    write_meta,
)
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
"""In place of a partition: `begin` is the number of partitions that the topic had at the group's last join. It stays when the
topic is deleted."""


class GroupPosition(NamedTuple):
    """The position of a group in a partition. begin: its first offset; processed: the last processed offset, or None."""

    incarnation: bytes
    begin: int
    processed: int | None

    @property
    def next(self) -> int:
        """The offset to read next."""
        return self.begin if self.processed is None else self.processed + 1


class CommitRequest(NamedTuple):
    """A commit of one member: the epoch of its lease and the last processed offset of each partition."""

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
                meta = read_meta(connection, "groups")
                super().__init__(files, lock, connection, HighWaterMarks.open(files.marks, "groups", meta.incarnation))
            try:
                self.rewrite_wal()
                self._check()
            except BaseException:
                self.close()
                raise

    def commit(self, requests: Iterable[CommitRequest]) -> list[frozenset[TopicPartition]]:
        """Commit all requests in one durable transaction; gives the refused partitions of each request."""
        boot = boot_id()

        def work() -> tuple[list[frozenset[TopicPartition]], int]:
            return [self._commit_request(request, boot) for request in requests], self._count()

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
    ) -> dict[int, GroupPosition]:
        """Store, once, the group's start in every partition of a topic: `latest` must mean the same after a crash.

        starts: by the group's `start`, for a group that is new in the topic. has_begun: the group is registered in the topic,
        so missing offsets were lost. Such partitions, and partitions that were added later, start at their beginning: their
        records belong to the group. So do those of a topic that was created again. Gives the positions in all partitions.
        """
        known = TopicPartition(topic, ALL)

        def work() -> tuple[None, int]:
            is_new = not has_begun and self._progress(group, known) is None
            for partition, start in starts.items():
                source = TopicPartition(topic, partition)
                if self._progress(group, source) is None:
                    begin = start if is_new else earliest[partition]
                    self._write(group, source, GroupPosition(incarnation, begin, None))
            self._write(group, known, GroupPosition(incarnation, len(starts), None))
            return None, self._count()

        self._durably(work)
        return self.progress(group, topic)

    def move(self, group: str, topic: str, progress: Mapping[TopicPartition, GroupPosition]) -> None:
        """Move the group to these positions in a topic, durably. Raises GroupHasMembers while it has some there.

        In one transaction: a member that joins later reads the new positions. A frozen member is not counted; it loses its
        leases, so what it commits later is refused.
        """

        def work() -> tuple[None, int]:
            if members := self.live_members(group, topic):
                raise GroupHasMembers(f"group {group!r} has {members} members on {topic!r}. Try: stop them first")
            self.connection.execute("UPDATE leases SET owner=NULL WHERE grp=? AND topic=?", (group, topic))
            for source, value in progress.items():
                self._write(group, source, value)
            return None, self._count()

        self._durably(work)

    def set_progress(self, group: str, progress: Mapping[TopicPartition, GroupPosition]) -> None:
        """Set the group's positions, durably."""

        def work() -> tuple[None, int]:
            for source, value in progress.items():
                self._write(group, source, value)
            return None, self._count()

        self._durably(work)

    def begun(self, group: str, topic: str, incarnation: bytes) -> dict[TopicPartition, GroupPosition]:
        """All rows of the group in this incarnation of the topic, also `ALL`."""
        with classified("groups"):
            sql = "SELECT partition FROM offsets WHERE grp=? AND topic=?"
            sources = [TopicPartition(topic, p) for (p,) in fetch(self.connection, sql, (group, topic))]
            found = {source: self._progress(group, source) for source in sources}
        return {source: row for source, row in found.items() if row is not None and row.incarnation == incarnation}

    def forget_topic(self, topic: str, incarnation: bytes) -> None:
        """Remove all groups' offsets of a topic, durably, and free its leases. The offsets of a later incarnation stay; its
        members join again.

        The epochs stay: a topic of the same name goes on counting them, so a late commit for the old one is refused. The names of
        its groups stay, too (`ALL`): if the topic is created again, they read it from its beginning.
        """

        def work() -> tuple[None, int]:
            self.connection.execute(
                "DELETE FROM offsets WHERE topic=? AND partition>? AND incarnation=?", (topic, ALL, incarnation)
            )
            self.connection.execute("UPDATE leases SET owner=NULL WHERE topic=?", (topic,))
            return None, self._count()

        self._durably(work)

    def progress(self, group: str, topic: str) -> dict[int, GroupPosition]:
        """The group's position in each partition that it has begun."""
        with classified("groups"):
            rows = fetch(
                self.connection,
                "SELECT partition FROM offsets WHERE grp=? AND topic=? AND partition>=0",
                (group, topic),
            )
            found = {p: self._progress(group, TopicPartition(topic, p)) for (p,) in rows}
        return {p: value for p, value in found.items() if value is not None}

    def live_members(self, group: str, topic: str) -> int:
        """The number of live members of the group that subscribe to the topic."""
        return sum(topic in topics for topics in self.members(group).values())

    def members(self, group: str) -> dict[str, list[str]]:
        """The live members of the group, with the topics that they subscribe to."""
        with classified("groups"), closing(MemberLocks(self._alive)) as alive:
            rows = fetch(
                self.connection,
                "SELECT member, topics FROM members WHERE grp=? AND boot=? AND deadline>=?",
                (group, boot_id(), boot_ms()),
            )
            living = {member: topics for member, topics in rows if alive.is_alive(member)}
        return {member: msgspec.json.decode(topics, type=list[str]) for member, topics in living.items()}

    def _durably(self, work: Callable[[], tuple[T, int]]) -> T:
        return self.transact(work, lambda done: {0: done[1]}, 1)[0]

    def _commit_request(self, request: CommitRequest, boot: str) -> frozenset[TopicPartition]:
        refused = []
        for source, (epoch, processed) in request.offsets.items():
            lease = self.connection.execute(
                "SELECT owner, epoch, boot FROM leases WHERE grp=? AND topic=? AND partition=?",
                (request.group, *source),
            ).fetchone()
            progress = self._progress(request.group, source) if lease == (request.member, epoch, boot) else None
            if progress is None:
                refused.append(source)
            elif progress.processed is None or processed > progress.processed:
                self._write(request.group, source, progress._replace(processed=processed))
        return frozenset(refused)

    def _progress(self, group: str, source: TopicPartition) -> GroupPosition | None:
        row = self.connection.execute(
            "SELECT incarnation, begin, processed, crc FROM offsets WHERE grp=? AND topic=? AND partition=?",
            (group, *source),
        ).fetchone()
        if row is None:
            return None
        if checksum(group, *source, *row[:3]) != row[3]:
            raise DataDamaged(
                "groups",
                (),
                f"the committed offset of group {group!r} in {source.topic}[{source.partition}] is altered",
            )
        return GroupPosition(*row[:3])

    def _write(self, group: str, source: TopicPartition, progress: GroupPosition) -> None:
        self.connection.execute(
            "INSERT OR REPLACE INTO offsets VALUES(?,?,?,?,?,?,?)",
            (group, *source, *progress, checksum(group, *source, *progress)),
        )

    def _count(self) -> int:
        return self._commits("UPDATE state SET commits=commits+1 WHERE id=1 RETURNING commits")

    def _commits(self, sql: str) -> int:
        match fetch(self.connection, sql):
            case [[int(commits)]]:
                return commits
        raise DataDamaged("groups", (), "the number of commits is altered. Try: penstock log repair")

    def _check(self) -> None:
        (mark,) = self.marks.read(1)  # before the commits: those that other processes make meanwhile are not missing
        commits = self._commits("SELECT commits FROM state WHERE id=1")
        if commits < mark:
            raise DataDamaged(
                "groups", (), f"the last {mark - commits} commits of offsets are missing. Try: penstock log repair"
            )


def first_unread(folder: DataFolder, topic: str, meta: Meta, groups: Collection[str]) -> list[int | None]:
    """The first offset of each partition that any group has still to read; None without a group.

    groups: those that are registered in the topic. A group without an offset in a partition has not read it. When the
    file cannot be read, or is being repaired, all records count as unread (0).
    """
    files = folder.groups
    nexts: dict[str, dict[int, int]] = {group: {} for group in groups}
    if files.db.exists():
        try:
            with shared_lock(files), closing(connect(files.db)) as connection:
                sql = "SELECT grp, partition, begin, processed FROM offsets WHERE topic=? AND incarnation=?"
                for group, partition, *offsets in fetch(connection, sql, (topic, meta.incarnation)):
                    nexts.setdefault(group, {})[partition] = GroupPosition(meta.incarnation, *offsets).next
        except (*FAULTS, BrokerError, TypeError):
            return [0] * meta.partitions
    return [min((of.get(p, 0) for of in nexts.values()), default=None) for p in range(meta.partitions)]


def _create(folder: DataFolder) -> None:
    files = folder.groups
    with folder.locked_catalog():
        if files.db.exists():
            return
        require_no_loss(files)
        incarnation = uuid.uuid4().bytes
        HighWaterMarks.create(files.marks, incarnation, [0])
        draft = files.db.with_name(f".{uuid.uuid4().hex}.draft")
        write_groups(draft, incarnation, 0, {})
        draft.rename(files.db)
        with closing(connect(files.db)) as connection:
            # This makes the write-ahead log, so that its name is synced with the folder.
            connection.execute("UPDATE state SET commits=commits")
        folder.sync_names()


def write_groups(
    path: Path, incarnation: bytes, commits: int, progress: Mapping[tuple[str, TopicPartition], GroupPosition]
) -> None:
    """Write a new file of groups without members. commits: its count. progress: by group and partition."""
    with closing(connect(path, create=True)) as connection, connection:
        connection.execute(TABLES)
        connection.execute("INSERT INTO state VALUES(1, ?)", (commits,))
        write_meta(connection, Meta(FORMAT, "groups", incarnation, 1, None, None, 0))
        connection.executemany(
            "INSERT INTO offsets VALUES(?,?,?,?,?,?,?)",
            [(group, *s, *value, checksum(group, *s, *value)) for (group, s), value in progress.items()],
        )


TIMEOUT = 30.0
"""The time limit of a commit, in seconds."""


class _Request(PendingRequest[object]):
    """A commit request, or any other work on the file."""

    __slots__ = ("work",)

    def __init__(self, work: CommitRequest | Callable[[GroupsFile], object]) -> None:
        super().__init__()
        self.work = work


class CommittedOffsets:
    """groups.db from the event loop: the commits of all members of this process are gathered into one transaction."""

    def __init__(self, folder: DataFolder) -> None:
        self._folder = folder
        self._file: GroupsFile | None = None
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="log-commit")
        self._gatherer = Gatherer[_Request]("groups", self._threads, self._work, 10_000)

    async def commit(self, request: CommitRequest) -> frozenset[TopicPartition]:
        """Make the offsets durable; gives the refused partitions."""
        refused: frozenset[TopicPartition] = await self._gatherer.put(_Request(request), TIMEOUT)
        return refused

    async def use(self, work: Callable[[GroupsFile], T]) -> T:
        """Run `work` on the file's thread."""
        done: T = await self._gatherer.put(_Request(work), TIMEOUT)
        return done

    async def close(self, timeout: float) -> None:
        """Finish requests under way, and close the file."""
        if await self._gatherer.close(timeout) and self._file is not None:
            await self._gatherer.run(self._file.close)
        self._threads.shutdown(wait=False)

    def _work(self, requests: list[_Request]) -> None:
        if self._file is None:
            self._file = GroupsFile(self._folder)
        try:
            commits = [r for r in requests if isinstance(r.work, CommitRequest)]
            if commits:
                self._commit(self._file, commits)
            for request in requests:
                if not isinstance(request.work, CommitRequest):
                    self._answer(self._file, request)
        finally:
            if self._file.broken:
                self._file.close()
                self._file = None

    @staticmethod
    def _commit(file: GroupsFile, requests: list[_Request]) -> None:
        try:
            refused = file.commit([r.work for r in requests if isinstance(r.work, CommitRequest)])
        except Exception as error:
            for request in requests:
                request.error = error
            file.broken = file.broken or isinstance(error, DataDamaged)
        else:
            for request, answer in zip(requests, refused, strict=True):
                request.outcome = answer

    @staticmethod
    def _answer(file: GroupsFile, request: _Request) -> None:
        assert not isinstance(request.work, CommitRequest)
        try:
            request.outcome = request.work(file)
        except Exception as error:
            request.error = error
