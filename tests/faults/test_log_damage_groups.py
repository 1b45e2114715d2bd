"""Damaged offsets: a group reads again, or somebody is told. It never skips."""

import shutil
from pathlib import Path

import pytest

from services.core.broker.errors import BrokerError, DataDamaged
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.groups import CommitRequest, GroupsFile
from services.core.broker.log.leases import Leases
from services.core.broker.log.repair import repair, verify
from services.core.broker.record import TopicPartition
from tests.faults.log_damage import copy_folder, flip, positions, truncate

TOPIC = "orders"
COMMITTED = {partition: 1000 + partition for partition in range(4)}
INCARNATION = b"0123456789abcdef"


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose group has committed; some commits in the database, the last ones in the write-ahead log."""
    base = tmp_path_factory.mktemp("groups")
    folder = DataFolder.prepare(base / "live")
    file = GroupsFile(folder)
    leases = Leases(folder, 60_000)
    try:
        zero = dict.fromkeys(COMMITTED, 0)
        file.enter("g", TOPIC, INCARNATION, zero, zero)
        epochs = leases.heartbeat("g", "m", {TOPIC: len(COMMITTED)}, {}).acquired
        file.connection.wal_checkpoint()
        for partition, offset in COMMITTED.items():
            source = TopicPartition(TOPIC, partition)
            for step in (500, 0):
                assert file.commit([CommitRequest("g", "m", {source: (epochs[source], offset - step)})]) == [
                    frozenset()
                ]
        shutil.copytree(folder.root, base / "crashed", ignore=shutil.ignore_patterns("*-shm"))
    finally:
        leases.close()
        file.close()
    return base / "crashed"


def next_offsets(folder: Path) -> dict[int, int]:
    """Where the group would go on. Raises what a consumer's poll would raise."""
    file = GroupsFile(DataFolder(folder))
    try:
        return {partition: progress.next for partition, progress in file.progress("g", TOPIC).items()}
    finally:
        file.close()


def is_loud(folder: Path) -> bool:
    """Whether the group is told. Otherwise every offset must be exactly what was committed: none behind, none ahead."""
    try:
        found = next_offsets(folder)
    except BrokerError:
        return True
    assert found == {partition: offset + 1 for partition, offset in COMMITTED.items()}
    return False


@pytest.mark.parametrize(
    ("file", "step", "head"), [("groups.db", 397, 100), ("groups.db-wal", 397, 64), ("groups.hwm", 1, 0)]
)
def test_flipped_bit(crashed: Path, tmp_path: Path, file: str, step: int, head: int) -> None:
    """If it fails, a group skips events, or goes back without anybody knowing why it delivers twice."""
    loud = 0
    for number, position in enumerate(positions((crashed / file).stat().st_size, step, head=head)):
        folder = tmp_path / f"{number}"
        copy_folder(crashed, folder)
        flip(folder / file, position, number % 8)
        try:
            loud += is_loud(folder)
        except AssertionError as error:
            raise AssertionError(f"bit {number % 8} of byte {position}: {error}") from error
    assert loud > 10, "no damage bit: the test proves nothing"


@pytest.mark.parametrize("file", ["groups.db", "groups.db-wal", "groups.hwm"])
def test_cut_file(crashed: Path, tmp_path: Path, file: str) -> None:
    """If it fails, lost commits pass as if they had never been."""
    size = (crashed / file).stat().st_size
    loud = 0
    for number, cut in enumerate((0, 100, size // 3, size // 2)):
        folder = tmp_path / f"{number}"
        copy_folder(crashed, folder)
        truncate(folder / file, cut)
        loud += is_loud(folder)
    assert loud > 1


def test_lost_commits_are_counted(crashed: Path, tmp_path: Path) -> None:
    """If it fails, an operator cannot tell how much will be delivered again."""
    folder = tmp_path / "log"
    copy_folder(crashed, folder)
    (folder / "groups.db-wal").unlink()
    with pytest.raises(DataDamaged, match="the last 8 commits"):
        next_offsets(folder)
    assert any("the last 8 commits" in problem for problem in verify(folder).groups.problems)


def test_lost_offsets_are_not_a_new_folder(crashed: Path, tmp_path: Path) -> None:
    """If it fails, every group starts anew, those that start at the latest record skip what they had not read."""
    folder = tmp_path / "log"
    copy_folder(crashed, folder)
    (folder / "groups.db").unlink()
    with pytest.raises(DataDamaged, match="missing"):
        next_offsets(folder)
    assert not verify(folder).is_sound
    repair(folder)
    assert next_offsets(folder) == {}


def test_repair_never_moves_a_group_forward(crashed: Path, tmp_path: Path) -> None:
    """If it fails, a repair of offsets loses events that were stored all the time."""
    repaired = 0
    for number in range(24):
        folder = tmp_path / f"{number}"
        copy_folder(crashed, folder)
        file = folder / ("groups.db", "groups.db-wal", "groups.hwm")[number % 3]
        flip(file, file.stat().st_size * (number + 1) // 25, number % 8)
        if verify(folder).is_sound:
            continue
        repaired += 1
        repair(folder)
        assert verify(folder).is_sound
        for partition, offset in next_offsets(folder).items():
            assert offset <= COMMITTED[partition] + 1
    assert repaired > 5
