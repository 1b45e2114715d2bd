"""The snapshot of a fleet's configuration files: what a service that is started again reads."""

from pathlib import Path

import pytest

from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.snapshot import (
    SNAPSHOT_VARIABLE,
    copy_in,
    list_copies,
    read_broker,
    read_contents,
    source_of,
    write_snapshot,
)
from services.core.yaml_source import BadConfiguration
from services.fleet.pipes.topics import compare_prefix

PIPES = """
streams: {s: {}}
pipes: {p: {sources: [s], destinations: [{name: d, webhook: {url: "https://example.com/"}}]}}
"""


@pytest.fixture
def pipes(tmp_path: Path) -> Path:
    file = tmp_path / "pipes.yaml"
    file.write_text(PIPES)
    return file


def test_read_as_it_was(pipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a service that is started again takes half of an edit, or ends because of one."""
    write_snapshot(tmp_path / "snapshot", read_contents([pipes]))
    monkeypatch.setenv(SNAPSHOT_VARIABLE, str(tmp_path / "snapshot"))
    pipes.write_text(PIPES.replace("{name: d", "{name: other"))
    assert load_pipes(pipes).pipes["p"].destinations[0].name == "d"
    [(original, copy)] = list_copies(tmp_path / "snapshot").items()
    assert (original, copy.read_text()) == (str(pipes), PIPES), "the doctor compares these"
    pipes.unlink()
    assert load_pipes(pipes).pipes["p"].destinations[0].name == "d"
    write_snapshot(tmp_path / "snapshot", {str(pipes): PIPES.replace("{name: d", "{nam: d").encode()})
    with pytest.raises(BadConfiguration, match=rf"^{pipes}:3: pipes\.p\.destinations\.0"):
        load_pipes(pipes)


def test_what_is_not_copied_is_read_as_it_is(pipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a rotated key needs a restart, since the snapshot hides it."""
    write_snapshot(tmp_path / "snapshot", read_contents([pipes]))
    monkeypatch.setenv(SNAPSHOT_VARIABLE, str(tmp_path / "snapshot"))
    assert source_of(tmp_path / "keys.yaml") == tmp_path / "keys.yaml"
    assert (tmp_path / "snapshot").stat().st_mode & 0o077 == 0


def test_two_files_of_one_name(tmp_path: Path) -> None:
    """Broken: of two files with one name in two folders, the services read one for both."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "t.py").write_text(folder)
    files = [tmp_path / "a" / "t.py", tmp_path / "b" / "t.py"]
    write_snapshot(tmp_path / "snapshot", read_contents(files))
    assert [copy_in(tmp_path / "snapshot", file).read_text() for file in files] == ["a", "b"]


def test_a_snapshot_that_is_gone_is_an_error(pipes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a service whose snapshot was removed goes on with files that were edited meanwhile."""
    monkeypatch.setenv(SNAPSHOT_VARIABLE, str(tmp_path / "gone"))
    with pytest.raises(BadConfiguration):
        load_pipes(pipes)


def test_another_prefix_is_told(tmp_path: Path) -> None:
    """Broken: a typing error in the broker's URL makes a fleet begin anew, and nobody says so."""
    was, now = "kafka://h:9092?prefix=acme.", "kafka://h:9092,i:9092?prefix=acne."
    assert compare_prefix(now, tmp_path) == []
    write_snapshot(tmp_path / "snapshot", {}, was)
    assert read_broker(tmp_path / "snapshot") == was
    assert compare_prefix("kafka://i:9092?prefix=acme.", tmp_path) == []
    assert compare_prefix("kinesis://eu-west-1?prefix=other.", tmp_path) == []
    [line] = compare_prefix(now, tmp_path)
    assert str(line).startswith("broker: the prefix was acme. at the last start")
    assert "?prefix=acme. in the broker's URL" in str(line)
    assert "no ?prefix=" not in str(line)
    (tmp_path / "snapshot" / "broker").unlink()  # of a version without prefixes
    [line] = compare_prefix(now, tmp_path)
    assert "the prefix was empty" in str(line)
    assert "no ?prefix= in the broker's URL" in str(line)
