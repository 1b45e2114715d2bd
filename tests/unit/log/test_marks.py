"""High-water marks: they only rise, whoever writes them, and an altered one is not believed."""

import os
import threading
from pathlib import Path

import pytest

from services.core.broker.errors import DataDamaged
from services.core.broker.log.high_water_marks import HighWaterMarks

INCARNATION = bytes(range(16))


def open_marks(path: Path, partitions: int = 3) -> HighWaterMarks:
    """A fresh file, opened."""
    HighWaterMarks.create(path, INCARNATION, [0] * partitions)
    return HighWaterMarks.open(path, "orders", INCARNATION)


def test_marks_rise_and_never_fall(tmp_path: Path) -> None:
    """If it fails, a slow writer takes back what a quick one noted, and a loss in between is not found."""
    marks = open_marks(tmp_path / "m")
    try:
        marks.raise_to({0: 10, 2: 30}, 3)
        marks.raise_to({0: 5, 1: 1}, 3)
        assert marks.read(3) == marks.peek(3) == [10, 1, 30]
    finally:
        marks.close()


def test_writers_at_once_keep_the_highest(tmp_path: Path) -> None:
    """If it fails, two processes on one topic undo each other's marks."""
    open_marks(tmp_path / "m").close()

    def climb(step: int) -> None:
        marks = HighWaterMarks.open(tmp_path / "m", "orders", INCARNATION)
        try:
            for number in range(step, 400, 2):
                marks.raise_to({0: number, 1: 400 - number}, 3)
        finally:
            marks.close()

    threads = [threading.Thread(target=climb, args=(step,)) for step in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    marks = HighWaterMarks.open(tmp_path / "m", "orders", INCARNATION)
    try:
        assert marks.read(3) == [399, 400, 0]
    finally:
        marks.close()


def test_a_frozen_writer_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    """If it fails, one frozen process stops all writers of the topic."""
    marks, frozen = open_marks(tmp_path / "m"), HighWaterMarks.open(tmp_path / "m", "orders", INCARNATION)
    try:
        assert frozen._lock()
        marks.raise_to({0: 7}, 3)
        assert marks.read(3) == [7, 0, 0]
    finally:
        marks.close()
        frozen.close()


def test_altered_or_foreign_marks_are_refused(tmp_path: Path) -> None:
    """If it fails, a mark that was altered downwards hides a loss."""
    path = tmp_path / "m"
    marks = open_marks(path)
    try:
        marks.raise_to({1: 99}, 3)
        data = bytearray(path.read_bytes())
        data[33 + 16] ^= 1
        path.write_bytes(data)
        assert marks.peek(3) is None
        with pytest.raises(DataDamaged):
            marks.read(3)
        with pytest.raises(DataDamaged):
            HighWaterMarks.open(path, "orders", bytes(16))
        path.unlink()
        with pytest.raises(DataDamaged):
            HighWaterMarks.open(path, "orders", INCARNATION)
    finally:
        marks.close()


def test_extend_adds_and_keeps(tmp_path: Path) -> None:
    """If it fails, growing a topic loses its marks, or a second try after a crash does."""
    marks = open_marks(tmp_path / "m", 2)
    try:
        marks.raise_to({1: 5}, 2)
        marks.extend(2, 4)
        marks.raise_to({3: 8}, 4)
        marks.extend(2, 4)
        assert marks.read(4) == [0, 5, 0, 8]
    finally:
        marks.close()


def test_a_closed_file_never_writes_into_another(tmp_path: Path) -> None:
    """If it fails, a late mark lands in whatever file got the same number: a database, say."""
    marks = open_marks(tmp_path / "m")
    marks.close()
    fd = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    try:
        with pytest.raises((OSError, ValueError)):
            marks.raise_to({0: 1}, 3)
        assert os.fstat(fd).st_size == 0
    finally:
        os.close(fd)
