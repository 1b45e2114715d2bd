"""Temporary folders, such as those of `penstock try`, `check`, `demo` and `rate`."""

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.core.temporary import TemporaryFolder, temporary_folder

HOLD = "from services.core.temporary import TemporaryFolder; print(TemporaryFolder('try').folder, flush=True); input()"


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: each `penstock try` that is killed leaves some megabytes for ever; or one removes what another still uses, what a
    demo kept for the user, or what is somebody else's."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    other = tmp_path / "penstock-try-other"
    other.mkdir()
    (kept := TemporaryFolder("try")).keep()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        held = Path(process.stdout.readline().strip())
        (held / "spark").mkdir()
        with temporary_folder("try") as mine:
            assert held.is_dir(), "its process lives"
            TemporaryFolder("state").remove()
            assert mine.is_dir()
        assert not mine.exists()
        process.send_signal(signal.SIGKILL)
        process.wait()
    with temporary_folder("demo"):
        assert held.is_dir(), "of another kind"
    with temporary_folder("try") as mine:
        assert {path for path in tmp_path.iterdir() if path.name.startswith("penstock-")} == {other, kept.folder, mine}


def test_what_is_kept_while_another_looks_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the logs of a demo that failed are gone, because another demo began in that moment."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    failed, lock = TemporaryFolder("demo"), fcntl.flock

    def keep_first(descriptor: int, how: int) -> None:
        if how & fcntl.LOCK_NB:
            failed.keep()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", keep_first)
    with temporary_folder("demo"):
        assert failed.folder.is_dir()
