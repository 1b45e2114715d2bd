"""The scratch folder of Spark, without a Spark: one for each process, removed when its process has ended."""

import os
from pathlib import Path

import pytest

from spark.scratch import Scratch


def kill(scratch: Scratch) -> None:
    """What the end of a process does: its lock is gone, its files stay."""
    assert scratch._lock is not None
    os.close(scratch._lock)
    scratch._lock = None


def test_the_next_start_removes_only_what_nobody_uses(tmp_path: Path) -> None:
    """Broken: killed processes fill the disk, or a start removes the files of a transform that runs."""
    killed, running = Scratch(tmp_path), Scratch(tmp_path)
    (killed.folder / "blockmgr-1" / "0e").mkdir(parents=True)
    (killed.folder / "blockmgr-1" / "0e" / "block").write_bytes(b"x")
    kill(killed)
    stranger = tmp_path / "scratch" / "mine"
    stranger.mkdir()
    third = Scratch(tmp_path)
    assert not killed.folder.exists()
    assert running.folder.is_dir()
    assert stranger.is_dir()
    for one in (running, third):
        one.remove()
    assert not list((tmp_path / "scratch").glob("spark-*"))


def test_a_folder_without_its_lock_file_is_removed(tmp_path: Path) -> None:
    """Broken: a removal that was cut off leaves a folder for ever."""
    first = Scratch(tmp_path)
    (first.folder / "lock").unlink()
    kill(first)
    Scratch(tmp_path).remove()
    assert not first.folder.exists()


def test_without_a_data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a transform whose checkpoints are in an object store does not start in a container with a read-only disk."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "file").touch()
    scratch = Scratch(tmp_path / "file")
    assert scratch.folder.parent == tmp_path
    beside = Scratch(tmp_path / "file")
    assert scratch.folder.exists()
    kill(scratch)
    os.utime(scratch.folder, (0, 0))
    third = Scratch(tmp_path / "file")
    assert not scratch.folder.exists(), "what a killed process left, with its logins"
    assert beside.folder.exists()
    for each in (beside, third):
        each.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
