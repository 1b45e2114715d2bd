"""`Admin.read` over a damaged log."""

from pathlib import Path

import pytest

from services.core.broker.errors import DataDamaged
from services.core.broker.log import LogBroker
from services.core.broker.record import Record
from tests.unit.log.sample import TOPIC, make_topic, records, store


def flip(folder: Path, value: bytes) -> None:
    """Alter one byte of this value wherever the log has it."""
    for path in folder.rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if value in content:
            path.write_bytes(content.replace(value, value[:-1] + b"?"))


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """Six records in three rows, the middle one altered."""
    folder = make_topic(tmp_path)
    for items in (records(0, 3), [Record(b"k", b"very unlucky value", 3)], records(4, 2)):
        store(folder, 0, items)
    flip(tmp_path, b"very unlucky value")
    return tmp_path


async def test_damage_is_raised_and_never_passed_over(damaged: Path) -> None:
    """Broken: an operator's look at a damaged topic ends early, as if nothing came behind."""
    async with LogBroker.open(str(damaged)) as broker:
        before = await broker.reader.read(TOPIC, 0, 0, max_records=10)
        assert before is not None
        assert list(before.offsets) == [0, 1, 2]
        with pytest.raises(DataDamaged) as caught:
            await broker.reader.read(TOPIC, 0, 3, max_records=10)
        assert caught.value.ranges == ((0, 3, 3),)
        behind = await broker.reader.read(TOPIC, 0, 4, max_records=1)
        assert behind is not None
        assert list(behind.offsets) == [4]
