"""`penstock backup`: what was acknowledged before it began is in it; half a backup is none; a restore replaces nothing."""

import asyncio
import json
import os
import random
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import apsw
import msgspec
import pytest

from services.core.audit import Entry
from services.core.broker.contract import TopicSpec
from services.core.broker.log import backup, blocking, cut, topics
from services.core.broker.log.clock import boot_id, boot_ms
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import GroupPosition, GroupsFile
from services.core.broker.log.repair import verify
from services.core.broker.log.retention import apply_retention_once
from services.core.broker.log.row_format import pack_all
from services.core.broker.log.topic_reader import TopicReader
from services.core.broker.log.topic_writer import Fence, TopicWriter
from services.core.broker.record import Record, TopicPartition
from services.core.pipe_file.snapshot import write_snapshot
from services.core.pipe_file.topic_names import AUDIT
from services.fleet.backup import manifest
from services.fleet.backup.checkpoints import copy_checkpoint, read_checkpoints, renew_incarnations
from services.fleet.backup.create import Made, Show, Source, create_backup
from services.fleet.backup.manifest import read_manifest
from services.fleet.backup.restore import check_backup, restore_backup
from services.fleet.folder import FleetState, describe_loss, lock_folder, take_restored, write_state
from services.fleet.problem import CommandFailed
from services.registry import entries, object_log
from tests.faults.registry_child import make_schema, open_registrar
from tests.unit.fleet.conftest import Shell
from tests.unit.log.sample import SetClock

GROUP = "lane"
PIPES = """\
brokers: {msk: 'kafka://127.0.0.1:1'}
streams: {in: {}, bills: {on: msk}}
pipes:
  p:
    sources: [in]
    destinations: [{name: hook, webhook: {url: 'https://example.org/', secret: {file: webhook.secret}}}]
"""


def nothing(_count: int) -> None:
    """No progress is shown."""


def make(data: Path, into: Path, seen: Callable[[int], None] = nothing) -> Made:
    """A backup. seen: called while records are copied."""
    source = Source(data, f"log://{data / 'log'}", data.parent / "pipes.yaml")
    return create_backup(source, into, Show(nothing, seen))


class Fleet:
    """Writers, a group that copies `in` to `out` and commits, retention; and what all of them were promised."""

    def __init__(self, data: Path, chance: random.Random) -> None:
        self.data, self.chance, self.clock = data, chance, SetClock()
        self.folder = DataFolder.prepare(data / "log")
        for name in ("in", "out"):
            topics.create_topic(self.folder, TopicSpec(name, 2, retention_ms=10_000))
        topics.create_topic(self.folder, TopicSpec(AUDIT, 1))
        self.stored: dict[TopicPartition, list[bytes]] = defaultdict(list)
        self.processed = dict.fromkeys((0, 1), -1)
        self.batches: list[tuple[int, int]] = []
        """The partition and the end of each batch in `out`."""
        self.groups = GroupsFile(self.folder)
        self.incarnation = self._use("in", lambda reader: reader.store.meta.incarnation)
        self.groups.enter(GROUP, "in", self.incarnation, {0: 0, 1: 0}, {0: 0, 1: 0})
        topics.register_group(self.folder, "in", GROUP)

    def _use(self, topic: str, work: Callable[[TopicReader], Any]) -> Any:
        with TopicReader(self.folder, topic) as reader:
            return work(reader)

    def append(self, topic: str, partition: int, values: list[bytes], fence: Fence | None = None) -> None:
        """Acknowledged when it returns."""
        with TopicWriter(self.folder, topic, self.clock) as writer:
            writer.append({partition: pack_all([Record(None, value, 0) for value in values])}, fence)
        self.stored[TopicPartition(topic, partition)] += values

    def step(self) -> None:
        """One act of some process."""
        partition, act = self.chance.randrange(2), self.chance.random()
        if act < 0.5:
            first = len(self.stored[TopicPartition("in", partition)])
            self.append("in", partition, [b"%d" % n for n in range(first, first + self.chance.randint(1, 40))])
        elif act < 0.8:
            self._deliver(partition)
        elif act < 0.95:
            self.clock.now += self.chance.randrange(6_000)
        else:
            apply_retention_once(self.folder, self.clock)

    def step_at_times(self, _count: int) -> None:
        """While records are copied."""
        if self.chance.random() < 0.3:
            self.step()

    def _deliver(self, partition: int) -> None:
        """Write to the next topic, then commit."""
        ends = self._use("in", TopicReader.ranges)[partition]
        at = max(self.processed[partition] + 1, ends.start)
        until = min(ends.end, at + self.chance.randint(1, 60))
        if at < until:
            values, out = self.stored[TopicPartition("in", partition)][at:until], TopicPartition("out", partition)
            self.append("out", partition, values, Fence("lane", len(self.batches) + 1))
            self.batches.append((partition, len(self.stored[out])))
            source = TopicPartition("in", partition)
            self.groups.set_progress(GROUP, {source: GroupPosition(self.incarnation, 0, until - 1)})
            self.processed[partition] = until - 1

    def close(self) -> None:
        self.groups.close()


def content(folder: DataFolder, topic: str, partition: int) -> tuple[int, list[bytes]]:
    """The first stored offset, and every value from there on."""
    held = blocking.ends(folder.root, topic)[partition]
    batches = blocking.read_range(folder.root, topic, partition, held.start, held.end)
    return held.start, [record.value or b"" for batch in batches for record in batch.records]


def check(fleet: Fleet, restored: DataFolder, before: dict[TopicPartition, int], committed: dict[int, int]) -> None:
    """before: the number of records acknowledged before the backup began, by partition; committed: the same for offsets."""
    assert verify(restored.root).is_sound
    for source, count in before.items():
        start, values = content(restored, *source)
        assert start + len(values) >= count, "an acknowledged record is missing"
        assert values == fleet.stored[source][start : start + len(values)]
    with closing(GroupsFile(restored)) as groups:
        found = groups.progress(GROUP, "in")
    with TopicReader(restored, "in") as reader:
        assert {value.incarnation for value in found.values()} == {reader.store.meta.incarnation} != {fleet.incarnation}
    epoch = blocking.last_epoch(restored.root, "out", "lane")
    for partition, position in found.items():
        held = blocking.ends(restored.root, "in")[partition]
        assert position.next - 1 >= committed[partition], "a commit is missing"
        assert held.start <= position.next <= held.end or position.next == 0
        _, given = content(restored, "out", partition)
        known = set(given) | set(
            fleet.stored[TopicPartition("out", partition)][: content(restored, "out", partition)[0]]
        )
        assert set(fleet.stored[TopicPartition("in", partition)][: position.next]) - known <= gone(fleet, partition)
    stored = [end <= sum(content_end(restored, partition)) for partition, end in fleet.batches]
    assert stored == [number <= (epoch or 0) for number in range(1, len(stored) + 1)], "a batch is recorded, not stored"


def content_end(folder: DataFolder, partition: int) -> tuple[int, int]:
    """Of `out`: its first stored offset, and the number of records from there on."""
    start, values = content(folder, "out", partition)
    return start, len(values)


def gone(fleet: Fleet, partition: int) -> set[bytes]:
    """Records of `in` that retention removed before they were delivered: they were never in `out`."""
    out = set(fleet.stored[TopicPartition("out", partition)])
    return set(fleet.stored[TopicPartition("in", partition)][: fleet.processed[partition] + 1]) - out


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_writers_commits_retention_and_backup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Broken: a restored log lacks an acknowledged record, or a group that passes over records, or repeats more than it must."""
    fleet = Fleet(tmp_path / "data", random.Random(seed))
    lock_all = cut._lock_all

    def act_first(*arguments: Any) -> float:
        for _ in range(fleet.chance.randrange(4)):
            fleet.step()
        return lock_all(*arguments)

    monkeypatch.setattr(cut, "_lock_all", act_first)
    for number in range(3):
        for _ in range(fleet.chance.randrange(30)):
            fleet.step()
        before = {source: len(values) for source, values in fleet.stored.items()}
        committed = dict(fleet.processed)
        made = make(fleet.data, tmp_path / "backups", fleet.step_at_times)
        assert check_backup(made.folder, nothing).problems == []
        data = tmp_path / f"restored{number}"
        restore_backup(made.folder, data, "me", nothing)
        check(fleet, DataFolder.prepare(data / "log"), before, committed)
    fleet.close()


def test_within_the_cut_nothing_is_committed_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: topics and groups are copied as of different moments, so a group's position is ahead of what it had written."""
    fleet, read_groups = Fleet(tmp_path / "data", random.Random(7)), cut._read_groups
    files = [fleet.folder.groups.db, *(fleet.folder.topic(name).db for name in ("in", "out", AUDIT))]
    tried: list[Path] = []

    def try_to_write(*arguments: Any) -> Any:
        for file in files:
            with closing(apsw.Connection(str(file))) as connection, pytest.raises(apsw.BusyError):
                connection.execute("BEGIN IMMEDIATE")
            tried.append(file)
        return read_groups(*arguments)

    monkeypatch.setattr(cut, "_read_groups", try_to_write)
    make(fleet.data, tmp_path / "backups")
    assert tried == files
    fleet.append("in", 0, [b"the locks are given back"])
    fleet.close()


def test_beside_a_working_fleet(tmp_path: Path) -> None:
    """Broken: a backup fails, or is not consistent, while other threads and processes write."""
    fleet = Fleet(tmp_path / "data", random.Random(7))

    def work() -> None:
        for _ in range(150):
            fleet.step()

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        for number in range(2):
            before = {source: len(values) for source, values in fleet.stored.copy().items()}
            committed = dict(fleet.processed)
            made = make(fleet.data, tmp_path / "backups")
            restore_backup(made.folder, tmp_path / f"{number}", "me", nothing)
            check(fleet, DataFolder(tmp_path / f"{number}" / "log"), before, committed)
        working.result()
    fleet.close()


def test_retention_waits_and_a_deleted_topic_is_still_copied(tmp_path: Path) -> None:
    """Broken: what retention or a deletion removes during the copy is missing in it."""
    fleet = Fleet(tmp_path / "data", random.Random(1))
    for _ in range(40):
        fleet.append("in", 0, [b"x" * 1000] * 10)
    passes: list[bool] = []

    def act(_count: int) -> None:
        if not passes:
            fleet.clock.now += 1_000_000
            passes.append(apply_retention_once(fleet.folder, fleet.clock))
            topics.delete_topic(fleet.folder, "out")

    fleet.append("out", 1, [b"last"])
    made = make(fleet.data, tmp_path / "backups", act)
    assert passes == [False]
    assert made.manifest.log is not None
    assert {topic.topic: topic.records for topic in made.manifest.log.topics} == {"in": 400, "out": 1, AUDIT: 0}
    assert apply_retention_once(fleet.folder, fleet.clock)
    fleet.close()


def test_the_locks_are_given_back_while_one_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a frozen writer of one topic stops the writers of all topics for as long as the backup waits."""

    def refuse(_tries: int) -> bool:
        raise apsw.BusyError("its write lock is not free")

    monkeypatch.setattr(cut, "BusyHandler", lambda _path, _seconds: refuse)
    fleet = Fleet(tmp_path / "data", random.Random(1))
    pauses: list[str] = []

    def pause(_seconds: float) -> None:
        fleet.append("in", 0, [b"meanwhile"])
        pauses.append("")

    own = SimpleNamespace(monotonic=time.monotonic, time_ns=time.time_ns, sleep=pause)
    monkeypatch.setattr("services.core.broker.log.cut.time", own)  # other threads and the appends sleep as ever
    with TopicWriter(fleet.folder, "out", fleet.clock) as writer:
        writer._store.connection.execute("BEGIN IMMEDIATE")
        with pytest.raises(CommandFailed, match=r"out: its write lock is not free"):
            make(fleet.data, tmp_path / "backups")
    assert len(pauses) == cut._TRIES
    assert list((tmp_path / "backups").glob("[0-9]*")) == []
    fleet.close()


def dies_after(steps: int, work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Do the work in another process that is killed before its n-th sync or rename; gives whether it was."""
    pid = os.fork()
    if pid == 0:
        left = iter(range(steps))

        def stop_at(real: Callable[..., Any]) -> Callable[..., Any]:
            def step(*arguments: Any, **named: Any) -> Any:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments, **named)

            return step

        monkeypatch.setattr(os, "fsync", stop_at(os.fsync))
        monkeypatch.setattr(Path, "rename", stop_at(Path.rename))
        try:
            work()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])


def test_a_killed_backup_is_no_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: half a backup verifies, or its remains fill the disk."""
    fleet = Fleet(tmp_path / "data", random.Random(2))
    fleet.append("in", 0, [b"a", b"b"])
    fleet.close()
    into, steps = tmp_path / "backups", 0
    while dies_after(steps, lambda: make(fleet.data, into), monkeypatch):
        finished = list(into.glob("[0-9]*")) if into.exists() else []
        for folder in finished:  # killed behind the rename
            assert check_backup(folder, nothing).problems == []
            shutil.rmtree(folder)
        for folder in into.glob(".*.draft"):
            (folder / "manifest.sha256").unlink(missing_ok=True)  # the last file of all
            with pytest.raises(CommandFailed, match="no backup, or one that was not finished"):
                read_manifest(folder)
        steps += 1
    assert steps > 8
    assert list(into.glob(".*.draft")) == []
    assert len(list(into.glob("[0-9]*"))) == 1


def test_a_killed_restore_is_no_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a fleet starts on half a log, and takes the rest for never accepted."""
    fleet = Fleet(tmp_path / "data", random.Random(2))
    fleet.append("in", 0, [b"a", b"b"])
    fleet.close()
    made, data, steps = make(fleet.data, tmp_path / "backups"), tmp_path / "new", 0
    while dies_after(steps, lambda: restore_backup(made.folder, data, "me", nothing), monkeypatch):
        steps += 3
        if not (data / "restore.unfinished").exists():
            assert content(DataFolder(data / "log"), "in", 0) == (0, [b"a", b"b"]) if (data / "log").exists() else True
        else:
            with pytest.raises(CommandFailed, match="did not finish"), lock_folder(data):
                pass
            with pytest.raises(CommandFailed, match="did not finish"):
                restore_backup(made.folder, data, "me", nothing)
        shutil.rmtree(data, ignore_errors=True)
    assert steps > 15
    assert content(DataFolder(data / "log"), "in", 0) == (0, [b"a", b"b"])


def test_damage_is_named_and_not_restored(tmp_path: Path) -> None:
    """Broken: a backup that rotted on its disk is found out on the day when it is needed, or never."""
    fleet = Fleet(tmp_path / "data", random.Random(3))
    for partition in (0, 1):
        fleet.append("in", partition, [b"%d" % n for n in range(500)])
    fleet.close()
    made = make(fleet.data, tmp_path / "backups")
    for name in ("log/in.db", "manifest.json"):
        copy = tmp_path / "damaged"
        shutil.copytree(made.folder, copy)
        file = copy / name
        raw = bytearray(file.read_bytes())
        raw[len(raw) // 2] ^= 1
        file.write_bytes(raw)
        if name == "manifest.json":
            with pytest.raises(CommandFailed, match="is altered"):
                check_backup(copy, nothing)
        else:
            assert "log/in.db is altered" in check_backup(copy, nothing).problems[0]
        with pytest.raises(CommandFailed, match="is altered"):
            restore_backup(copy, tmp_path / "new", "me", nothing)
        assert not (tmp_path / "new" / "log").exists()
        shutil.rmtree(copy)
    restore_backup(made.folder, tmp_path / "new", "me", nothing)  # the folder is as if nothing had happened
    (made.folder / "log" / "in.db").unlink()
    (made.folder / "log" / "more.db").touch()
    problems = check_backup(made.folder, nothing).problems
    assert problems[0].startswith("log/in.db cannot be read")
    assert problems[1] == "log/more.db is not in the manifest"


def test_records_are_compared_with_the_counts(tmp_path: Path) -> None:
    """Broken: a file that was complete when it was hashed, but not when it was copied, verifies."""
    fleet = Fleet(tmp_path / "data", random.Random(3))
    fleet.append("in", 0, [b"a"])
    fleet.append("in", 0, [b"b"])
    fleet.close()
    made = make(fleet.data, tmp_path / "backups")
    with closing(apsw.Connection(str(made.folder / "log" / "in.db"))) as connection:
        connection.execute("DELETE FROM batches WHERE pos=0; PRAGMA journal_mode=delete")
    for name in (manifest.MANIFEST, manifest.MANIFEST_HASH):
        (made.folder / name).unlink()
    manifest.seal(made.folder, made.manifest)
    (problem,) = check_backup(made.folder, nothing).problems
    assert "[0] offsets 0 to 0" in problem


def test_a_damaged_log_is_not_backed_up(tmp_path: Path) -> None:
    """Broken: the copy of a damaged log takes the place of a sound one in a rotation."""
    fleet = Fleet(tmp_path / "data", random.Random(3))
    fleet.append("in", 0, [b"a"])
    fleet.append("in", 0, [b"b"])
    fleet.close()
    with closing(apsw.Connection(str(fleet.folder.topic("in").db))) as connection:
        connection.execute("DELETE FROM batches WHERE pos=0")
    with pytest.raises(CommandFailed, match=r"in: damaged: .*\[0\] offsets 0 to 0"):
        make(fleet.data, tmp_path / "backups")


def test_a_full_disk_for_the_backup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an operator reads a traceback, or that the log is damaged; or the remains keep the disk full."""
    fleet, create = Fleet(tmp_path / "data", random.Random(3)), backup._create

    def create_small(path: Path) -> apsw.Connection:
        connection = create(path)
        connection.execute("PRAGMA max_page_count=2")
        return connection

    monkeypatch.setattr(backup, "_create", create_small)
    with pytest.raises(CommandFailed, match=r"no backup was made: .*\.db: No space left on device"):
        make(fleet.data, tmp_path / "backups")
    assert [path.name for path in (tmp_path / "backups").iterdir()] == [".lock"]
    fleet.close()


def test_a_restored_fleet_says_what_is_lost(tmp_path: Path) -> None:
    """Broken: nobody learns at the first start that events after the backup are gone, or the audit does not have it."""
    fleet = Fleet(tmp_path / "data", random.Random(3))
    fleet.append("in", 0, [b"a", b"b"])
    fleet.close()
    made, data = make(fleet.data, tmp_path / "backups"), tmp_path / "new"
    restore_backup(made.folder, data, "me@here", nothing)
    (entry,) = content(DataFolder(data / "log"), AUDIT, 0)[1]
    found = msgspec.json.decode(entry, type=Entry)
    assert (found.action, found.who, found.filters["cut"]) == ("restore", "me@here", made.manifest.cut)
    restored = take_restored(data)
    assert restored is not None
    assert f"accepted after {made.manifest.cut} are lost" in " ".join(describe_loss(restored.cut))
    assert take_restored(data) is None


def test_members_do_not_move_along(tmp_path: Path) -> None:
    """Broken: a member of the lost machine holds partitions of the restored log for a while."""
    fleet = Fleet(tmp_path / "data", random.Random(3))
    sql = "INSERT INTO members VALUES('lane', 'm', '[\"in\"]', ?, ?)"
    fleet.groups.connection.execute(sql, (boot_ms() + 60_000, boot_id()))
    restore_backup(make(fleet.data, tmp_path / "backups").folder, tmp_path / "new", "me", nothing)
    with closing(GroupsFile(DataFolder(tmp_path / "new" / "log"))) as groups:
        assert groups.connection.execute("SELECT count(*) FROM members").fetchall() == [(0,)]
    fleet.close()


# Checkpoints.


def write_checkpoint(root: Path, planned: int, done: int | None, incarnation: str = "0" * 32) -> Path:
    """As Spark leaves it, with a state of one partition."""
    folder = root / "sums"
    for batch in range(planned + 1):
        (folder / "offsets").mkdir(parents=True, exist_ok=True)
        (folder / "offsets" / str(batch)).write_text(
            f'v1\n{{}}\n{{"topics": {{"in": {{"incarnation": "{incarnation}"}}}}}}'
        )
        (folder / "offsets" / f".{batch}.crc").write_bytes(b"crc")
    for batch in range(-1 if done is None else done + 1):
        (folder / "commits").mkdir(exist_ok=True)
        (folder / "commits" / str(batch)).write_text("v1\n{}")
    for version in range(1, planned + 2):
        (folder / "state" / "0" / "0").mkdir(parents=True, exist_ok=True)
        (folder / "state" / "0" / "0" / f"{version}.delta").write_text(str(version))
    (folder / "metadata").write_text("{}")
    (folder / "penstock.lock").write_text("1")
    (folder / "penstock.json").write_text(json.dumps({"topics": {"in": incarnation}}))
    return folder


def test_a_checkpoint_is_that_of_the_cut(tmp_path: Path) -> None:
    """Broken: batches that were finished during the backup are in the checkpoint and not in the log: their results are lost."""
    folder = write_checkpoint(tmp_path, 3, 2)
    shutil.copytree(folder, tmp_path / "sums.20261123T000000Z")  # put aside by a reset
    (state,) = read_checkpoints(tmp_path)
    write_checkpoint(tmp_path, 6, 6)
    (folder / "penstock.json").write_text("later")
    copy_checkpoint(state, tmp_path / "copy")
    found = sorted(
        str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("[0-9p]*") if path.is_file()
    )
    assert found == [
        *(f"commits/{batch}" for batch in range(3)),
        *(f"offsets/{batch}" for batch in range(4)),
        "penstock.json",
        *(f"state/0/0/{version}.delta" for version in (1, 2, 3)),
    ]
    assert (tmp_path / "copy" / "penstock.json").read_text() != "later"
    assert state.entry == manifest.CheckpointCopy("sums", 3, 2)


def test_a_checkpoint_that_runs_away_is_refused(tmp_path: Path) -> None:
    """Broken: files that Spark removed meanwhile are missing in the copy, and the restored transform does not start."""
    write_checkpoint(tmp_path, 3, 2)
    (state,) = read_checkpoints(tmp_path)
    write_checkpoint(tmp_path, 80, 80)
    with pytest.raises(CommandFailed, match="finished 78 batches while it was copied"):
        copy_checkpoint(state, tmp_path / "copy")


def test_a_restored_checkpoint_belongs_to_the_restored_log(tmp_path: Path) -> None:
    """Broken: the transform refuses the restored log as another one, or Spark its own files for their sums."""
    folder = write_checkpoint(tmp_path, 9, 8, "a" * 32)
    renew_incarnations(folder, {"a" * 32: "b" * 32})
    for batch in range(10):
        assert "b" * 32 in (folder / "offsets" / str(batch)).read_text()
        assert not (folder / "offsets" / f".{batch}.crc").exists()
    assert "a" * 32 not in (folder / "penstock.json").read_text()


# The schemas.


def test_the_schemas_are_those_of_one_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: after a restore the ids in events mean nothing, or a copy made beside a working registry is damaged."""
    monkeypatch.setattr(entries, "SEGMENT", 2)
    monkeypatch.setattr(object_log, "SEGMENT", 2)
    store, copyfile = tmp_path / "data" / "schemas", shutil.copyfile

    async def register(folder: Path, *numbers: int) -> list[int]:
        registrar = await open_registrar(f"file://{folder}")
        assert not registrar.log.damage
        texts = [await registrar.read(make_schema("a", number)) for number in numbers]
        return [(await registrar.register("s", text, "")).schema.id for text in texts]

    def beside(source: Path, target: Path) -> object:
        monkeypatch.setattr(shutil, "copyfile", copyfile)
        assert asyncio.run(register(store, 4)) == [4]  # with it a segment
        return copyfile(source, target)

    assert asyncio.run(register(store, 1, 2, 3)) == [1, 2, 3]
    (store / "log" / ".new-000000000004-aa").write_bytes(b"left by a killed registry")
    DataFolder.prepare(tmp_path / "data" / "log")
    (tmp_path / "data" / "log" / "topics").mkdir(exist_ok=True)
    monkeypatch.setattr(shutil, "copyfile", beside)
    made = make(tmp_path / "data", tmp_path / "backups")
    names = sorted(
        str(path.relative_to(made.folder)) for path in (made.folder / "schemas").rglob("*") if path.is_file()
    )
    assert names == [*(f"schemas/log/{number:012d}" for number in (1, 2, 3)), f"schemas/segments/{0:012d}"]
    assert (made.manifest.schemas, check_backup(made.folder, nothing).problems) == (3, [])
    restore_backup(made.folder, tmp_path / "new", "me", nothing)
    assert asyncio.run(register(tmp_path / "new" / "schemas", 3, 2, 1, 7)) == [3, 2, 1, 4]
    second = store / "log" / f"{2:012d}"
    second.write_bytes(second.read_bytes().replace(b"t", b"T", 1))
    with pytest.raises(CommandFailed, match=f"schemas/log/{2:012d} is altered"):
        make(tmp_path / "data", tmp_path / "backups")
    second.unlink()
    with pytest.raises(CommandFailed, match="has a gap"):
        make(tmp_path / "data", tmp_path / "backups")


# The commands.


def test_the_commands(shell: Shell, tmp_path: Path) -> None:
    """Broken: an operator does not learn what is in a backup, what is not, and what comes next."""
    fleet, data = Fleet(tmp_path / "data", random.Random(3)), tmp_path / "data"
    fleet.append("in", 0, [b"a", b"b"])
    fleet.close()
    write_snapshot(data / "snapshot", {str(tmp_path / "pipes.yaml"): PIPES.encode()})
    (tmp_path / "pipes.yaml").write_text("an edit that does not run yet")
    running = str(data / "snapshot" / "0-pipes.yaml")
    write_state(data, FleetState(1, "", f"log://{data / 'log'}", running, "", "", []))
    assert shell.run("backup", "create", "backups", "--json") == 0
    made = json.loads(shell.out)
    assert (made["topics"], made["partitions"], made["records"], made["unread"]) == (3, 5, 2, {"lane": 2})
    assert made["left_out"][:2] == ["the stream bills on broker msk", "the file webhook.secret, named in pipes.yaml"]
    assert shell.run("backup", "verify", made["backup"]) == 0
    assert "is sound: 2 records of 3 topics, the configuration" in shell.err
    assert shell.run("backup", "restore", made["backup"], "--data", "data") == 2
    assert "is not empty" in shell.err
    assert shell.run("backup", "restore", made["backup"], "--data", "new") == 0
    assert "are lost, unless their senders send them again" in shell.err
    assert "lane: 2 records to read" in shell.err
    assert "penstock up -f new/config/pipes.yaml --data new" in shell.err
    assert (tmp_path / "new" / "config" / "pipes.yaml").read_text() == PIPES
    assert shell.run("backup", "create", "data/backups") == 2
    assert shell.run("backup", "verify", "new") == 1
    assert "no backup" in shell.err
    with (Path(made["backup"]) / "log" / "in.db").open("ab") as file:
        file.write(b"x")
    assert shell.run("backup", "verify", made["backup"], "--json") == 1
    assert json.loads(shell.out)["sound"] is False


def test_without_the_embedded_log(tmp_path: Path) -> None:
    """Broken: with Kafka nothing says that the topics are not in the backup."""
    write_checkpoint(tmp_path / "data" / "checkpoints", 1, 1)
    made = create_backup(
        Source(tmp_path / "data", "kafka://127.0.0.1:1", tmp_path / "pipes.yaml"),
        tmp_path / "b",
        Show(nothing, nothing),
    )
    assert any("kafka keeps them" in line for line in made.manifest.left_out)
    restore_backup(made.folder, tmp_path / "new", "me", nothing)
    assert (tmp_path / "new" / "checkpoints" / "sums" / "offsets" / "1").exists()
    assert take_restored(tmp_path / "new") is None
    with pytest.raises(CommandFailed, match="holds no log"):
        create_backup(Source(tmp_path / "d", f"log://{tmp_path}", tmp_path), tmp_path / "c", Show(nothing, nothing))
