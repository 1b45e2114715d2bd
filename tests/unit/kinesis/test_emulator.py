"""The emulator of Kinesis is installed when it is first needed, with a program `npm` of the test's own."""

from pathlib import Path

import pytest

from services.core import aws_emulator
from services.core.aws_emulator import AwsEmulator, EmulatorNotReady, install_kinesis

GOOD = 'echo run >> "$HOME/runs"; mkdir -p "$3/node_modules/kinesis-local"'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def make_npm(home: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    npm = home / "bin" / "npm"
    npm.parent.mkdir(exist_ok=True)
    npm.write_text(f"#!/bin/sh\n{script}\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{npm.parent}:/usr/bin:/bin")


def left(home: Path) -> list[str]:
    return [path.name for path in (home / ".cache" / "penstock").iterdir()]


def test_installed_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the Kinesis demo asks a newcomer to install something, or every start fetches it again."""
    make_npm(home, monkeypatch, GOOD)
    package = install_kinesis()
    assert package.is_dir()
    assert (package.parents[1] / "package-lock.json").is_file()
    assert install_kinesis() == package
    assert (home / "runs").read_text() == "run\n"
    assert len(left(home)) == 1


def test_a_failure_leaves_nothing(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an installation that was cut off is used, or the reason is not shown."""
    make_npm(home, monkeypatch, f"{GOOD}; echo no such registry >&2; exit 1")
    with pytest.raises(EmulatorNotReady, match=r"(?s)access to the npm registry.*no such registry"):
        install_kinesis()
    assert not left(home)


def test_without_node(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: who has no Node.js sees a stack trace."""
    monkeypatch.setenv("PATH", str(home))
    with pytest.raises(EmulatorNotReady, match=r"there is no npm\. Try: sudo apt-get install nodejs npm"):
        install_kinesis()


def test_without_moto(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: who installed the wheel is sent to a Makefile that is not there."""
    monkeypatch.setattr(aws_emulator, "find_spec", lambda _name: None)
    with pytest.raises(
        EmulatorNotReady, match=r"pip install flask flask-cors moto py-partiql-parser, or in a clone make"
    ):
        AwsEmulator(home)
