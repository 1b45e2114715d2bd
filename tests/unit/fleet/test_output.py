"""What services say: all to bounded files, warnings to the console without flooding it, secrets nowhere."""

import os
import time
from pathlib import Path

from services.fleet.output import Output, describe_line
from services.fleet.rotation import KEPT, RotatedLog


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
