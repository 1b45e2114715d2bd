"""The files of a data folder, and the folders that are refused.

<folder>/topics/<topic>.db      SQLite: batches, partitions, gaps, exactly-once writers (+ -wal, -shm)
<folder>/topics/<topic>.hwm     high-water marks: the next offset that was acknowledged, per partition
<folder>/topics/<topic>.lock    shared lock of all that have the topic open; `repair` locks it alone
<folder>/groups.db, groups.hwm  committed offsets and leases of consumer groups
<folder>/groups.alive           empty; each living member of a group locks one byte
<folder>/groups.bell            8 bytes that change when members came or partitions became free
<folder>/catalog.lock           held while topics are created or deleted
<folder>/keeper.lock            held while retention is applied
<folder>/retention.clock        the time by which retention judges ages
"""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.core.broker.errors import BadDataFolder, Unavailable, UnknownTopic
from services.core.folders import make_folder, sync_folder

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,199}")
_NETWORK = frozenset(
    (
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "9p",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "glusterfs",
        "davfs",
    )
)
_NETWORK_FUSE = frozenset(
    ("sshfs", "glusterfs", "s3fs", "gcsfuse", "rclone", "davfs", "curlftpfs", "juicefs", "ceph-fuse")
)


def is_topic_name(name: str) -> bool:
    """Lower-case letters, digits, `.`, `_` and `-`, at most 200, starting with a letter or digit."""
    return _NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True)
class TopicFiles:
    topic: str
    db: Path
    wal: Path
    shm: Path
    marks: Path
    lock: Path


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Paths of one data folder; makes no file by itself except in `prepare`."""

    root: Path

    @classmethod
    def prepare(cls, path: str | Path) -> "DataFolder":
        """Check the folder and durably make its missing parts (mode 0700). Raises BadDataFolder."""
        root = Path(path).absolute()
        try:
            for folder in (root, root / "topics"):
                make_folder(folder, mode=0o700)
        except OSError as error:
            raise BadDataFolder(
                f"data folder {root}: {error.strerror}. Try: a folder that this user may write"
            ) from error
        refuse_network(root)
        return cls(root)

    @property
    def topics(self) -> Path:
        return self.root / "topics"

    @property
    def groups(self) -> TopicFiles:
        """The files of the consumer groups; the same shape as a topic's."""
        return self._files("groups", self.root)

    @property
    def alive(self) -> Path:
        """The file of members' liveness locks."""
        return self.root / "groups.alive"

    def topic(self, topic: str) -> TopicFiles:
        """The files of a topic, whether it exists or not. Raises UnknownTopic for an impossible name."""
        if not is_topic_name(topic):
            raise UnknownTopic(f"{topic[:80]!r} is not a topic name. Try: lower-case letters, digits, '.', '_', '-'")
        return self._files(topic, self.topics)

    @contextmanager
    def locked_catalog(self) -> Iterator[None]:
        """The lock for creating and deleting topics, among all processes. Blocks while another holds it."""
        fd = os.open(self.root / "catalog.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def sync_names(self) -> None:
        """Make the names of new files durable, and of the folders that hold them.

        A process may be killed between making a folder and syncing its name: the next one syncs it.
        """
        for folder in (self.topics, self.root, self.root.parent):
            sync_folder(folder)

    @staticmethod
    def _files(name: str, folder: Path) -> TopicFiles:
        paths = (folder / f"{name}.{end}" for end in ("db", "db-wal", "db-shm", "hwm", "lock"))
        return TopicFiles(name, *paths)


@contextmanager
def locked(path: Path, wait_s: float, refusal: str) -> Iterator[None]:
    """Hold a lock file alone, among all processes. Blocking: waits `wait_s` seconds. Raises Unavailable(refusal), OSError."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise Unavailable(refusal) from None
                time.sleep(0.02)
        yield
    finally:
        os.close(fd)


def refuse_network(root: Path, mounts: str | None = None) -> None:
    """Raise BadDataFolder when the folder is on a network file system: SQLite's locks and shared memory fail there.

    mounts: the text of /proc/self/mounts; read when None.
    """
    if (found := network_mount(root, mounts)) is not None:
        raise BadDataFolder(
            f"data folder {root} is on a network file system ({found}), where file locks and shared memory "
            "cannot be trusted. Try: --data on a local disk"
        )


def network_mount(root: Path, mounts: str | None = None) -> str | None:
    """The kind and the place of the network file system that a folder is on; None for a local one. mounts: as above."""
    try:
        text = Path("/proc/self/mounts").read_text() if mounts is None else mounts
    except OSError:
        return None
    best, kind = "", ""
    for line in text.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        if len(point) >= len(best) and root.resolve().is_relative_to(point):
            best, kind = point, fields[2]
    if kind in _NETWORK or kind.removeprefix("fuse.") in _NETWORK_FUSE:
        return f"{kind} at {best}"
    return None
