"""What services say: all to bounded files, warnings to the console without flooding it, secrets nowhere."""

import errno
import io
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from prometheus_client import REGISTRY

from services.fleet import console
from services.fleet.up.output import KEPT, Output, RotatedLog, describe_line


def test_log_files_are_bounded(tmp_path: Path) -> None:
    """Broken: a talkative service fills the disk that the events need."""
    path = tmp_path / "x.log"
    with RotatedLog(path, max_bytes=1000) as log:
        for number in range(1000):
            log.write(b"line %06d\n" % number)
    sizes = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert len(sizes) == KEPT + 1
    assert max(sizes.values()) <= 1000
    assert path.read_bytes().endswith(b"line 000999\n")
    assert (tmp_path / "x.log.1").read_bytes().splitlines()[-1] < path.read_bytes().splitlines()[0]
    with RotatedLog(path, max_bytes=1000) as log:
        log.write(b"again\n")
    assert path.read_bytes().endswith(b"line 000999\nagain\n")


def test_lines_for_a_person() -> None:
    """Broken: the console shows raw JSON, or a secret, or chokes on what is no log line."""
    line = (
        b'{"event":"lane stopped","level":"error","timestamp":"t","service":"expel","pipe":"p","exception":"Trace..."}'
    )
    assert describe_line(line) == ("error", "lane stopped pipe=p")
    assert describe_line(b'{"event":"x psk_abc_def","level":"info"}') == ("info", "x ***")
    for odd in (b"plain text\n", b"[1]\n", b'{"a":1}\n', b"\xff\xfe\n", b"\n"):
        assert describe_line(odd)[0] == ""
    assert describe_line(b"Bearer abc\n")[1] == "***"
    assert describe_line(b"auth.bearer can be read by others\n")[1] == "auth.bearer can be read by others"


def test_no_secret_of_java_is_in_a_file(tmp_path: Path) -> None:
    """Broken: Spark's own lines, which no masking of ours has seen, keep a secret on the disk."""
    output = Output("transform-1", tmp_path / "x.log", lambda *_: None)
    os.write(output.writer, b"ERROR Bearer abc at \xff\n" + b'{"event":"x"}\n')
    os.close(output.writer)
    output.last_lines(60.0)
    assert (tmp_path / "x.log").read_bytes() == b'ERROR *** at \xff\n{"event":"x"}\n'


def test_console_is_not_flooded(tmp_path: Path) -> None:
    """Broken: a service in trouble scrolls away everything else, or blocks when nobody reads its pipe."""
    said: list[str] = []
    output = Output("expel-1", tmp_path / "x.log", lambda _level, text: said.append(text))
    for number in range(20_000):
        os.write(output.writer, b'{"event":"trouble","level":"warning","n":%d}\n' % number)
    os.write(output.writer, b"the last words")
    os.close(output.writer)
    assert output.last_lines(60.0)[-1] == "the last words"
    assert 5 <= len(said) < 200
    assert said[0] == "expel-1: trouble n=0"
    assert "and more, in" in said[4]
    deadline = time.monotonic() + 60
    while output._thread.is_alive():
        assert time.monotonic() < deadline
    assert (tmp_path / "x.log").read_bytes().count(b"trouble") == 20_000


def test_a_full_disk_behind_a_log_stops_no_service(tmp_path: Path) -> None:
    """Broken: nobody reads what a service says once its log cannot be written, and the service stops at its next line."""
    path, said = tmp_path / "x.log", list[str]()
    path.symlink_to("/dev/full")
    output = Output("ingest-7", path, lambda _level, text: said.append(text))
    for number in range(2000):  # more than a pipe holds
        os.write(output.writer, b'{"event":"%s","level":"info","n":%d}\n' % (b"x" * 100, number))
    path.unlink()  # there is room again
    os.write(output.writer, b"the last words\n")
    os.close(output.writer)
    assert output.last_lines(60.0)[-1] == "the last words"
    assert [text.split(";")[0] for text in said] == [f"{path} cannot be written: No space left on device"]
    lost = REGISTRY.get_sample_value("penstock_fleet_log_lines_lost_total", {"log": "ingest-7"})
    assert lost is not None
    assert lost >= 1


def test_a_line_after_a_torn_one_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the first line after a full disk is glued to the half one before it, and no program can read it."""
    path = tmp_path / "x.log"
    with RotatedLog(path) as log:
        log.write(b"one\n")
        file = log._file
        assert file is not None
        room = [2, 100]
        short = SimpleNamespace(write=lambda data: file.write(data[: room.pop(0)]), close=file.close)
        monkeypatch.setattr(log, "_file", short)
        with pytest.raises(OSError, match="No space left"):
            log.write(b"two\n")
        log.write(b"three\n")
    assert path.read_bytes() == b"one\ntw\nthree\n"


def test_the_console_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a fleet whose console is a file on a full disk ends with its next warning, or keeps every line in memory."""
    full = Mock(spec=io.TextIOWrapper, encoding="utf-8")
    full.write.side_effect = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(sys, "stderr", full)
    for _ in range(3):
        console.print_note("look here")
    assert full.write.call_count >= 3
    assert not console.ERR._buffer
