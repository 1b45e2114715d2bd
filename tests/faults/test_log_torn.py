"""The last write torn in every way: each subset of its unsynced sectors, before each change of the disk that an append makes."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.core.broker.contract import TopicSpec
from services.core.broker.log import topics
from services.core.broker.log.clock import WallClock
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topic_writer import TopicWriter
from tests.faults.log_disk import Choose, Crash, Disk
from tests.faults.log_disk_listen import listening
from tests.faults.log_small import BATCH, END, EVERYTHING, TOPIC, account, append, quick_folder, read, small_pages
from tests.support.damage_table import Damaged, RecordProperty

LAST = END // BATCH - 1
BEFORE = {place: value for place, value in EVERYTHING.items() if place[1] < LAST * BATCH}
MOST = 3_000
"""Ways to tear one write that are tried at most."""


@pytest.fixture(params=[False, True], ids=["log goes on", "log begins anew"])
def appended(request: pytest.FixtureRequest) -> Iterator[tuple[Path, list[Crash], Crash]]:
    """A folder to work in, the crashes during the last append, and one after its answer."""
    with quick_folder() as base:
        disk = Disk()
        with small_pages(), listening(disk):
            folder = DataFolder.prepare(base / "live")
            disk.load(folder.root)
            topics.create_topic(folder, TopicSpec(TOPIC, partitions=2))
            with TopicWriter(folder, TOPIC, WallClock()) as writer:
                for batch in range(LAST):
                    append(writer, batch, 0, 1)
                if request.param:
                    writer.checkpoint()
                crashes: list[Crash] = []
                disk.crashes = crashes
                append(writer, LAST, 0, 1)
                disk.crashes = None
                yield base, crashes, Crash(disk, None)


def torn(base: Path, crash: Crash, how: str) -> Iterator[DataFolder]:
    """Every folder that this crash can leave."""
    path = base / "left"
    for choose in every_choice():
        for old in path.rglob("*"):
            if old.is_file():
                old.unlink()
        getattr(crash, how)(path, choose, Disk())
        yield DataFolder.prepare(path)


def every_choice() -> Iterator[Choose]:
    """Choosers that together make every sequence of choices, like an odometer; MOST of them at most."""
    wheel: list[list[int]] = []
    for _ in range(MOST):
        place = iter(range(1 << 20))

        def choose(below: int) -> int:
            at = next(place)  # noqa: B023 - used before the next turn
            if at == len(wheel):
                wheel.append([0, below])
            return wheel[at][0]

        yield choose
        while wheel and wheel[-1][0] == wheel[-1][1] - 1:
            wheel.pop()
        if not wheel:
            return
        wheel[-1][0] += 1
    raise AssertionError("more ways than the test has time for")


@pytest.mark.parametrize("how", ["kill", "cut"])
def test_a_torn_append_is_whole_or_never_was(
    appended: tuple[Path, list[Crash], Crash], how: str, record_property: RecordProperty
) -> None:
    """If it fails, a crash loses acknowledged events, leaves half a transaction, or raises an alarm about nothing."""
    base, during, after = appended
    row = Damaged("last append", f"{how}, torn", 0)
    for crash in (*during, after):
        for folder in torn(base, crash, how):
            row.positions += 1
            found, lost, opened = read(folder)
            assert opened
            assert not lost
            assert found == EVERYTHING or (crash is not after and found == BEFORE)
            row.count("harmless")
    assert row.positions > len(during)
    record_property(*row.as_property())


def test_a_disk_that_lied_about_a_sync_is_found_out(
    appended: tuple[Path, list[Crash], Crash], record_property: RecordProperty
) -> None:
    """If it fails, acknowledged events that a disk did not keep, although it said so, vanish without a word."""
    base, during, after = appended
    after.kill(base / "acknowledged", lambda _: 0, Disk())
    marks = (base / "acknowledged" / "topics" / f"{TOPIC}.hwm").read_bytes()
    row = Damaged("last append", "not kept", 0)
    for crash in during:
        for folder in torn(base, crash, "cut"):
            folder.topic(TOPIC).marks.write_bytes(marks)
            row.positions += 1
            row.count(account(folder))
    assert row.loud > 10
    assert row.harmless > 0
    record_property(*row.as_property())
