"""The fleet under a load that triples and goes: the group of expel follows, and only that one, and not one delivery fails."""

import asyncio
import itertools
import json
import statistics
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from services.fleet.sending.event_source import SourceEvent
from services.fleet.sending.sender import SendSummary, Target, send_events
from tests.integration.fleet_process import Command, Desk, until

BASE = 150.0
"""Events a second; each is a request of its own."""
LOOKS = 8
"""So many looks at the base load make the target."""


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def write_pipes(desk: Desk) -> None:
    (desk.folder / "pipes.yaml").write_text(
        "streams:\n  events: {id: id, key: key, partitions: 8}\n"
        "pipes:\n  p:\n    sources: [events]\n    destinations:\n"
        f"      - name: d\n        webhook: {{url: 'http://127.0.0.1:{desk.hook_port}/', secret: {{file: webhook.secret}}, "
        "batch: {max_events: 1}}\n"
    )


def write_settings(desk: Desk, target: float) -> None:
    """The same for both groups but the target: ingest has all the room it may want."""
    quick = "max: 3, warm_up: 3s, cool_down: 3s, calm: 6s, max_lag: 10m"
    (desk.folder / "penstock.yaml").write_text(
        "autoscaler:\n  group_every: 1500ms\n  groups:\n"
        f"    expel: {{target_cpu: {target:.4f}, {quick}}}\n    ingest: {{target_cpu: 0.9, {quick}}}\n"
    )


def processes(desk: Desk, service: str) -> list[int]:
    """Their ids, those that still drain included."""
    state = orjson.loads((desk.data / "fleet.json").read_bytes())
    return [one["pid"] for one in state["processes"] if one["service"] == service]


def decisions(desk: Desk, group: str) -> list[dict[str, Any]]:
    lines = (desk.data / "logs" / "autoscaler-1.log").read_bytes().splitlines()
    said = [orjson.loads(line) for line in lines if b'"group_decision"' in line and line.endswith(b"}")]
    return [one for one in said if one["group"] == group]


class Load:
    """Events that never end, each with an id of its own."""

    def __init__(self, desk: Desk) -> None:
        self._url, self._numbers, self.accepted = f"http://127.0.0.1:{desk.ingest_port}", itertools.count(), 0

    @asynccontextmanager
    async def at(self, rate: float) -> AsyncIterator[None]:
        """While the context lasts. All that was sent is accepted, or AssertionError."""
        ended, summary = asyncio.Event(), SendSummary()

        def events() -> Iterator[SourceEvent]:
            while not ended.is_set():
                number = next(self._numbers)
                yield SourceEvent(number, json.dumps({"id": f"e{number}", "key": f"k{number % 97}"}).encode(), "")

        sending = asyncio.ensure_future(
            send_events(events(), Target(self._url, "events", batch=10, rate=rate), summary)
        )
        try:
            yield
        finally:
            ended.set()
            await sending
            assert not summary.refused
            self.accepted += summary.accepted


async def test_load_times_three_and_back(desk: Desk) -> None:
    """Broken: a loaded group does not grow, another one does, or shrinking loses or fails a delivery."""
    write_pipes(desk)
    write_settings(desk, 0.9)
    load = Load(desk)
    options = ("--config", "penstock.yaml", "--autoscale", "true")
    async with desk.receive():
        async with desk.up(*options) as fleet:
            async with load.at(BASE):
                await until(lambda: len(decisions(desk, "expel")) > LOOKS + 2, "the base load was looked at")
            assert await fleet.interrupt() == 0
        write_settings(desk, 1.5 * usual_cpu(desk))
        async with desk.up(*options) as fleet:
            async with load.at(3 * BASE):
                await until(lambda: works(desk, "expel-2"), "expel grew, and the second one works")
            async with load.at(BASE / 3):
                await until(lambda: len(processes(desk, "expel")) == 1, "expel shrank")
            await until(lambda: len(desk.ids) == load.accepted, "all delivered")
            status = json.loads((await desk.run("status", "--json")).out)
            assert await fleet.interrupt() == 0
    print(f"{load.accepted} events, {desk.receiver.duplicates} of them twice")
    assert_only_expel_moved(desk, fleet)
    assert (desk.receiver.delivered, desk.receiver.unsigned) == (load.accepted, 0)
    [destination] = status["destinations"]
    assert (destination["dead"], destination["retried"]) == (0, 0)


def usual_cpu(desk: Desk) -> float:
    """Of the one expel."""
    told: list[float | None] = [one["instances"]["expel-1"] for one in decisions(desk, "expel")[-LOOKS:]]
    return statistics.median(cpu for cpu in told if cpu is not None)


def works(desk: Desk, name: str) -> bool:
    return decisions(desk, "expel")[-1]["instances"].get(name) is not None


def assert_only_expel_moved(desk: Desk, fleet: Command) -> None:
    """More for their CPU, then one fewer at a time in calm; no process was killed on its way out."""
    actions = [(one["action"], one["reason"], one["wanted"] - one["size"]) for one in decisions(desk, "expel")]
    actions = [one for one in actions if one[0] != "hold"]
    assert actions[0][:2] == ("out", "cpu")
    assert actions[-1] == ("in", "calm", -1)
    assert {one["action"] for one in decisions(desk, "ingest")} == {"hold"}
    assert "did not drain" not in fleet.err
