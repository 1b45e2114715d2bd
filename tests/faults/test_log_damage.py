"""One flipped bit or a cut file: the log reads on unharmed or says exactly what is lost. It never passes over it."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.errors import BrokerError, DataDamaged
from services.core.broker.log import topics
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.repair import repair, verify
from services.core.broker.log.row_format import pack_all
from services.core.broker.log.scan import FolderReport
from services.core.broker.log.topic_writer import TopicWriter
from services.core.broker.record import Record
from tests.faults.log_damage import (
    END,
    PARTITIONS,
    TOPIC,
    check_never_silent,
    copy_folder,
    flip,
    make_crashed,
    positions,
    truncate,
)

TOTAL = END * PARTITIONS


def count_noted(report: FolderReport) -> int:
    """The records of the topic whose loss was accepted by a repair."""
    return sum(last - first + 1 for part in report.topics[0].partitions for first, last in part.accepted)


@pytest.fixture(scope="module")
def in_both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half in the database, half in the write-ahead log."""
    return make_crashed(tmp_path_factory.mktemp("both"), checkpoint_after=6)


@pytest.fixture(scope="module")
def in_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything in the database; the write-ahead log's frames are copies."""
    return make_crashed(tmp_path_factory.mktemp("database"), checkpoint_after=12)


def outcomes(sound: Path, tmp_path: Path, file: str, step: int, head: int) -> dict[str, int]:
    """Flip one bit at many places of one file, each in a fresh copy; count what the reader said."""
    counts = {"whole": 0, "loud": 0}
    size = (sound / file).stat().st_size
    for number, position in enumerate(positions(size, step, head=head)):
        folder = tmp_path / f"{number}"
        copy_folder(sound, folder)
        flip(folder / file, position, number % 8)
        try:
            counts[check_never_silent(folder)] += 1
        except AssertionError as error:
            raise AssertionError(f"bit {number % 8} of byte {position} in {file}: {error}") from error
    return counts


def test_undamaged_is_whole(in_both: Path, in_database: Path, tmp_path: Path) -> None:
    """If it fails, the other tests here say nothing: the oracle itself is wrong."""
    for number, sound in enumerate((in_both, in_database)):
        copy_folder(sound, tmp_path / f"{number}")
        assert check_never_silent(tmp_path / f"{number}") == "whole"


def test_flipped_bit_in_the_database(in_both: Path, tmp_path: Path) -> None:
    """If it fails, a disk error drops or alters acknowledged events without a word."""
    counts = outcomes(in_both, tmp_path, f"topics/{TOPIC}.db", step=613, head=100)
    assert counts["loud"] > 20, "no damage bit: the test proves nothing"


def test_flipped_bit_in_the_write_ahead_log(in_both: Path, tmp_path: Path) -> None:
    """If it fails, SQLite drops later commits at recovery and nobody notices."""
    counts = outcomes(in_both, tmp_path, f"topics/{TOPIC}.db-wal", step=1231, head=64)
    assert counts["loud"] > 20


def test_flipped_bit_in_the_marks(in_both: Path, tmp_path: Path) -> None:
    """If it fails, a mark that was altered downwards hides what it should guard."""
    counts = outcomes(in_both, tmp_path, f"topics/{TOPIC}.hwm", step=1, head=0)
    assert counts["loud"] > 20


@pytest.mark.parametrize("file", [f"{TOPIC}.db", f"{TOPIC}.db-wal", f"{TOPIC}.hwm"])
def test_cut_file(in_both: Path, tmp_path: Path, file: str) -> None:
    """If it fails, a file that lost its end takes acknowledged events with it in silence."""
    size = (in_both / "topics" / file).stat().st_size
    loud = 0
    for number, cut in enumerate({0, 1, 31, 32, 100, 4096, 8192, size // 2, size - 8192, size - 4096, size - 1}):
        if not 0 <= cut < size:
            continue
        folder = tmp_path / f"{number}"
        copy_folder(in_both, folder)
        truncate(folder / "topics" / file, cut)
        loud += check_never_silent(folder) == "loud"
    assert loud > 3


@pytest.mark.parametrize("end", ["db-wal", "hwm"])
def test_deleted_file(in_both: Path, tmp_path: Path, end: str) -> None:
    """If it fails, a deleted file takes acknowledged events with it in silence."""
    folder = tmp_path / "log"
    copy_folder(in_both, folder)
    (folder / "topics" / f"{TOPIC}.{end}").unlink()
    assert check_never_silent(folder) == "loud"


def test_lost_tail_is_named_exactly_and_appends_are_refused(in_both: Path, tmp_path: Path) -> None:
    """If it fails, new events get the offsets of lost ones, and consumers pass over them."""
    folder = tmp_path / "log"
    copy_folder(in_both, folder)
    (folder / "topics" / f"{TOPIC}.db-wal").unlink()
    with pytest.raises(DataDamaged) as raised:
        TopicWriter(DataFolder(folder), TOPIC, WallClock())
    assert raised.value.ranges == ((0, 30, END - 1), (1, 30, END - 1))


def test_verify_accounts_for_every_record(in_database: Path, tmp_path: Path) -> None:
    """If it fails, an operator is told a wrong number of lost events."""
    damaged = 0
    file = f"topics/{TOPIC}.db"
    for number, position in enumerate(positions((in_database / file).stat().st_size, 1511, head=0)):
        folder = tmp_path / f"{number}"
        copy_folder(in_database, folder)
        (folder / "topics" / f"{TOPIC}.db-wal").unlink()  # its copies would heal what we damage
        flip(folder / file, position, number % 8)
        report = verify(folder, TOPIC).topics[0]
        records = sum(part.records for part in report.partitions)
        assert records + report.lost_records == TOTAL, f"byte {position}"
        if check_never_silent(folder) == "loud":
            damaged += 1
            assert not report.is_sound, f"byte {position}: the reader complains, verify does not"
    assert damaged > 10


def test_repair_keeps_the_rest_and_counts_the_loss(in_both: Path, tmp_path: Path) -> None:
    """If it fails, after a repair events are still missing without a number, or reading never goes on."""
    repaired = 0
    for number, file in enumerate([f"{TOPIC}.db", f"{TOPIC}.db-wal", f"{TOPIC}.hwm"] * 8):
        folder = tmp_path / f"{number}"
        copy_folder(in_both, folder)
        size = (folder / "topics" / file).stat().st_size
        flip(folder / "topics" / file, size * (number + 1) // 26, number % 8)
        if verify(folder).is_sound:
            continue
        repaired += 1
        repair(folder)
        after = verify(folder)
        assert after.is_sound, after
        noted = count_noted(after)
        assert sum(part.records for part in after.topics[0].partitions) + noted == TOTAL
        with TopicWriter(DataFolder(folder), TOPIC, WallClock()):
            pass
        assert list((folder / "damaged").iterdir()), "the damaged files are gone"
    assert repaired > 8


@pytest.mark.parametrize("change", range(6))
def test_a_repair_that_was_cut_off_is_made_again(
    in_both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    """Broken: a repair is killed between two changes of names, and the next one no longer knows how far the topic reached:
    what is lost is noted nowhere, and new records get offsets that groups have committed already."""
    folder = tmp_path / "log"
    copy_folder(in_both, folder)
    log = folder / "topics" / f"{TOPIC}.db-wal"
    truncate(log, log.stat().st_size // 2)
    changes = iter(range(100))

    def killed_before(make_change: Callable[..., object]) -> Callable[..., object]:
        def changed(*args: object, **more: object) -> object:
            if next(changes) == change:
                raise KeyboardInterrupt
            return make_change(*args, **more)

        return changed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", killed_before(Path.rename))
        patched.setattr(Path, "unlink", killed_before(Path.unlink))
        with suppress(KeyboardInterrupt):
            repair(folder)
    repair(folder)
    after = verify(folder)
    assert after.is_sound, after
    assert [part.end for part in after.topics[0].partitions] == [END] * PARTITIONS
    noted = count_noted(after)
    assert sum(part.records for part in after.topics[0].partitions) + noted == TOTAL
    assert noted


def test_repair_needs_the_topic_alone(in_both: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, a repair replaces files under a working fleet, which goes on writing into the old ones."""
    monkeypatch.setattr("services.core.broker.log.repair._LOCK_SECONDS", 0.1)
    folder = tmp_path / "log"
    copy_folder(in_both, folder)
    with TopicWriter(DataFolder(folder), TOPIC, WallClock()):
        flip(folder / "topics" / f"{TOPIC}.hwm", 40, 0)
        with pytest.raises(BrokerError, match="in use"):
            repair(folder, TOPIC)


def test_lost_database_is_not_an_unknown_topic(in_both: Path, tmp_path: Path) -> None:
    """If it fails, the next start makes the topic anew, empty, and nobody learns what was lost."""
    folder = tmp_path / "log"
    copy_folder(in_both, folder)
    (folder / "topics" / f"{TOPIC}.db").unlink()
    lost = tuple((partition, 0, END - 1) for partition in range(PARTITIONS))
    for use in (
        lambda: TopicWriter(DataFolder(folder), TOPIC, WallClock()),
        lambda: topics.create_topic(DataFolder(folder), TopicSpec(TOPIC, partitions=PARTITIONS)),
    ):
        with pytest.raises(DataDamaged) as raised:
            use()
        assert raised.value.ranges == lost
    assert topics.list_topics(DataFolder(folder)) == {TOPIC: 0}
    assert verify(folder).topics[0].lost_records == TOTAL
    repair(folder)
    assert count_noted(verify(folder)) == TOTAL
    with TopicWriter(DataFolder(folder), TOPIC, WallClock()) as writer:
        assert writer.append({0: pack_all([Record(None, b"new", 1)])}) == {0: [END]}
