"""The command line in the test's own process, and a folder for it without processes."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker
from services.core.broker.record import Record
from services.core.pipe_file.pipes import load_pipes
from services.core.provision import ensure_topics
from services.fleet.cli import main
from tests.support.waiting_events import store

T = TypeVar("T")


class Shell:
    """Runs verbs in this process. `out`, `err`: what the last one printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.out = self.err = ""

    def run(self, *arguments: str | Path) -> int:
        self._monkeypatch.setattr(sys, "argv", ["penstock", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        self.out, self.err = self._capsys.readouterr()
        code = caught.value.code
        assert code is None or isinstance(code, int)
        return code or 0

    @property
    def said(self) -> str:
        """`err` in one line, without frames."""
        return " ".join(self.err.replace("│", " ").split())


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Shell:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("PENSTOCK_KEY", "PENSTOCK_WEBHOOK_SECRET", "PENSTOCK_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return Shell(monkeypatch, capsys)


def at_broker(url: str, work: Callable[[Broker], Awaitable[T]]) -> T:
    """What this gives at the broker, which is open meanwhile."""

    async def run() -> T:
        async with open_broker(url) as broker:
            return await work(broker)

    return asyncio.run(run())


def make_fleet(folder: Path, text: str) -> Path:
    """A pipe file, and beside it a log with its topics; gives the folder."""
    (folder / "pipes.yaml").write_text(text)
    pipes = load_pipes(folder / "pipes.yaml")
    at_broker(f"log://{folder}/data/log", lambda broker: ensure_topics(broker.admin, pipes))
    return folder


def put(url: str, topic: str, records: Sequence[Record]) -> None:
    """Into the topic's first partition."""
    at_broker(url, lambda broker: store(broker, topic, records))


def commit(url: str, group: str, topic: str, offset: int) -> None:
    """As a group that has settled partition 0 up to this offset, and was stopped then."""
    at_broker(url, lambda broker: broker.admin.set_committed(group, topic, {0: offset}))
