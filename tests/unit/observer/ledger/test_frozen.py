"""The ledger's answers to one recorded history, to the last number. They are on file: a change of the code changes none of them.

After a change of behaviour that is wanted: PENSTOCK_FREEZE=1 pytest tests/unit/observer/ledger/test_frozen.py, and read the diff.
"""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from services.core.event import ARRIVAL, ORIGIN
from services.observer.explain import explain
from services.observer.follower import Follower
from services.observer.ledger_api import lag_json, row_json
from services.observer.planned import Window
from services.observer.snapshot import FollowerState
from services.observer.watch import Watch
from tests.support.memory_appender import MemoryAppender
from tests.unit.observer.ledger.history import FLOW, MINUTES, STEP_MS, History
from tests.unit.observer.ledger.snapshots import dump, restore
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, START_MS

FROZEN = Path(__file__).with_name("frozen.json")
SEED = 5


class Replay:
    """A ledger that is given a history, and what it says at some times."""

    def __init__(self, broker: Broker) -> None:
        self.now, self.broker = START_MS, broker
        self.said: dict[str, Any] = {}
        self.turns: list[object] = []
        self.alarms: list[object] = []
        self.begin()

    def begin(self, snapshot: list[bytes] | None = None) -> None:
        self.watch = Watch(0.01, _Webhook(), lambda _pipe: [])  # type: ignore[arg-type]
        self.follower = Follower(
            FLOW, self.broker.reader, Producer(MemoryAppender()), self.watch.on_final, now_ms=lambda: self.now
        )
        self.watch.follower = self.follower
        self.follower.catching_up = False
        if snapshot is not None:
            self.follower.planned = restore(snapshot, self.follower.table).planned
        self.table, self.lags, self.fields = self.follower.table, self.follower.lags, self.follower.fields

    def restart(self) -> None:
        alarms = self.follower.untold.all()
        self.begin(dump(self.table, FollowerState(self.follower.planned, 0, alarms, self.now)))
        for alarm in alarms:
            self.follower.untold.add(alarm)

    def tick(self) -> None:
        turn = self.table.tick(self.now)
        self.watch.on_final(turn)
        for verdict in turn.verdicts:
            row = verdict.row
            before = None if verdict.before is None else verdict.before.missing
            self.turns.append([self.now - START_MS, row.pipe, row.minute - MINUTE, verdict.part, row.missing, before])
        for row in turn.final:
            self.turns.append([self.now - START_MS, row.pipe, row.minute - MINUTE, "final", row.lost])
        for verdict in turn.given_up:
            self.turns.append([self.now - START_MS, verdict.row.pipe, verdict.row.minute - MINUTE, "given up"])
        for pipe in FLOW.pipes:
            self.watch.on_drifts(pipe, self.watch.find_drifts(pipe), self.now)
        for alarm in self.follower.untold.all():
            self.alarms.append([self.now - START_MS, alarm.id, alarm.body])
            self.follower.untold.remove(alarm)

    def say(self, name: str) -> None:
        said = self.said[name] = {}
        for pipe in FLOW.pipes:
            health = self.watch.find_health(pipe, self.now)
            rows = [self.table.row(pipe, minute, self.now) for minute in self.table.minutes(pipe)]
            said[pipe] = {
                "health": [health.state, len(health.reasons)],
                "rows": [_short(row_json(row)) for row in rows],
                "found": [row.minute - MINUTE for row in self.table.found_lately(pipe, self.now)],
                "missing": {
                    str(minute - MINUTE): sorted(
                        origin.pack().decode() for origin in self.table.settlement(pipe, minute).missing().first(99)
                    )
                    for minute in self.table.minutes(pipe)
                },
            }


class _Webhook:
    """Never asked: the test takes the alarms that wait."""


def _short(row: dict[str, Any]) -> list[object]:
    steps = [
        [
            step["node"],
            step["destination"],
            step["expected"],
            {name: count for name, count in step["outcomes"].items() if count},
            step["missing"],
            step["why_open"],
        ]
        for step in row["steps"]
    ]
    return [*(row[name] for name in ("minute", "accepted", "missing", "waiting", "why_open", "late", "lost")), steps]


async def replay(broker: Broker) -> dict[str, Any]:
    """Everything that the ledger says of the history."""
    ledger = Replay(broker)
    ledger.follower.planned.announce(Window("deploy", "late", START_MS, START_MS + 3 * MINUTE_MS, "ci"), START_MS)
    for number, (now, reports) in enumerate(History(SEED).steps()):
        ledger.now = now + 1_000
        for report in reports:
            ledger.table.apply(report, max(report.at_ms, now))
            ledger.lags.record(report)
            ledger.fields.record(report)
        ledger.table.liveness.listened(now - STEP_MS, now)
        ledger.fields.refresh()
        ledger.tick()
        if number == 45 or number == 130:
            ledger.restart()
        if number in (30, 6 * MINUTES + 20, 6 * MINUTES + 200):
            ledger.say(f"step {number}")
        if number == 6 * MINUTES:
            steps = [step for pipe in FLOW.pipes for step in FLOW.steps(pipe)]
            ledger.said["lags"] = [
                lag_json(minute, *key, histogram)
                for minute in ledger.lags.minutes()
                for key, histogram in sorted(ledger.lags.kinds(minute).items(), key=str)
            ]
            ledger.said["fields"] = [
                [str(step), name, msgspec.to_builtins(one)]
                for step in steps
                for name, one in ledger.fields.figures(step).items()
            ]
            ledger.said["explained"] = [
                msgspec.to_builtins(await explain(ledger.table, broker.reader, pipe, MINUTE + minute))
                for pipe in FLOW.pipes
                for minute in range(6)
            ]
    ledger.say("end")
    for hours in (2, 26, 24 * 8):
        ledger.now = START_MS + hours * 3_600_000 + 5 * MINUTE_MS
        ledger.tick()
        ledger.say(f"{hours} h")
    ledger.said["turns"], ledger.said["alarms"] = ledger.turns, ledger.alarms
    return ledger.said


async def test_the_ledger_says_what_it_said(broker: Broker) -> None:
    """Broken: a change that was to change nothing changes what is missing, final, lost or told."""
    for stream in ("orders", "copied", "clicks", "shop.out"):
        await fill(broker, stream)
    said = json.loads(msgspec.json.encode(await replay(broker)))
    if os.environ.get("PENSTOCK_FREEZE"):
        FROZEN.write_text("{\n" + ",\n".join(f'"{name}": {_text(part)}' for name, part in said.items()) + "\n}\n")
    frozen = json.loads(FROZEN.read_text())
    for name in frozen:
        assert said[name] == frozen[name], name
    assert said.keys() == frozen.keys()


def _text(part: object) -> str:
    """A line for each thing."""
    if isinstance(part, list):
        return "[\n" + ",\n".join(json.dumps(one, ensure_ascii=False) for one in part) + "\n]"
    return json.dumps(part, ensure_ascii=False)


async def fill(broker: Broker, stream: str) -> None:
    """Some of the events, where `explain` looks for them."""
    await broker.admin.create_topic(TopicSpec(stream, 2))
    for partition in (0, 1):
        records = [
            Record(
                b"k",
                b"{}",
                START_MS + MINUTE_MS + number,
                (
                    ("ce_id", b"e%d" % number),
                    (ARRIVAL, b"%d" % (START_MS + MINUTE_MS)),
                    (ORIGIN, b"%s:%d:%d" % (incarnation, partition, number)),
                ),
            )
            for number in range(80)
            for incarnation in ((b"c1",) if stream == "clicks" else (b"a1", b"b1"))
        ]
        await broker.appender.append(stream, partition, records, timeout=600)
