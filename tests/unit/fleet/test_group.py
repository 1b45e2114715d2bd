"""`penstock group`: a destination's offsets are shown and moved; every skipped event is reported before it is passed."""

import asyncio
import fcntl
import json
import random
import re
import shutil
import time
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest

from services.core.audit import Entry
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, Lag, PartitionRange
from services.core.broker.errors import Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.control.transform_marks import Begin, TransformMark, read_transform_mark, write_transform_mark
from services.core.ledger.report import TELEMETRY, decode_report, unpack_numbers
from services.core.pipe_file.pipes import load_pipes
from services.core.pipe_file.snapshot import read_contents, write_snapshot
from services.core.pipe_file.state_plan import StatePlan
from services.core.pipe_file.topic_names import RETRIER_GROUP, RETRY_IN
from services.core.takeover_dedup import WITHIN_S
from services.core.times import format_time
from services.core.undelivered.dead_letter import DeadLetter, Position, event_time
from services.core.undelivered.retry_state import RetryState, wrap
from services.fleet.dead.audit import read_audit, whoami
from services.fleet.positions.lanes import find_lanes
from services.fleet.positions.offsets import (
    PartitionOffsets,
    _resolve,
    plan_moves,
    require_no_members,
    reset_offsets,
    retry_wait_s,
    skip_events,
)
from services.fleet.problem import CommandFailed
from tests.support.waiting_events import stored
from tests.unit.fleet.conftest import Shell, at_broker, commit, make_fleet, put

HOOK = "webhook: {url: 'https://example.org/'}"
PIPES = f"""\
streams: {{s: {{partitions: 2}}, t: {{partitions: 2}}}}
pipes:
  a: {{sources: [s], destinations: [{{name: crm, {HOOK}}}, {{name: erp, {HOOK}}}]}}
  b: {{sources: [s, t], destinations: [{{name: both, {HOOK}}}]}}
  sums: {{sources: [s], transform: {{sql: SELECT * FROM s}}, destinations: [{{name: hook, {HOOK}}}]}}
"""
PLAN = msgspec.json.encode(StatePlan([], {}, ["s"], "", "4.2.0", "")).decode()
BASE = 1_700_000_000_000
IDENTITY = '{"id":"1","pipe":"sums","topics":{},"transform":"","kind":"in plan"}'
EVENTS = 10
"""In each partition of `s`; event n of a partition has the origin `run:partition:n` and is n seconds younger than the first."""


def event(partition: int, number: int) -> Record:
    headers = (("ce_id", b"e"), ("penstock_arrival", b"1"), ("penstock_origin", b"run:%d:%d" % (partition, number)))
    return Record(b"k", b"{}", BASE + 1000 * number, headers)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with events in both partitions of `s`. a/crm has delivered four of partition 0, and two of partition 1."""
    folder = make_fleet(tmp_path_factory.mktemp("template"), PIPES)

    async def make() -> None:
        async with open_broker(f"log://{folder}/data/log") as broker, Producer(broker.appender) as producer:
            events = {number: [event(number, n) for n in range(EVENTS)] for number in (0, 1)}
            (await producer.send_to("s", events)).raise_first()
            await broker.admin.set_committed("a.crm", "s", {0: 3, 1: 1})

    asyncio.run(make())
    return folder


@pytest.fixture(autouse=True)
def url(template: Path, tmp_path: Path) -> str:
    """A copy of it: to create the topics takes a second."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    return f"log://{tmp_path}/data/log"


def positions(url: str, group: str = "a.crm") -> dict[int, int]:
    return at_broker(url, lambda broker: broker.admin.positions(group, "s"))


async def audited(broker: Broker) -> list[Entry]:
    return [entry async for entry in read_audit(broker.reader)]


async def reported(broker: Broker) -> set[tuple[int, int]]:
    """(partition, number) of the events that are reported as skipped for a/crm."""
    reports = [decode_report(record.value) for record in await stored(broker, TELEMETRY)]
    assert all((one.node, one.pipe, one.destination) == ("expel", "a", "crm") for one in reports)
    return {
        (found.partition, number)
        for one in reports
        for found in one.sets
        if found.outcome == "skipped"
        for number in unpack_numbers(found.numbers)
    }


def read_all(url: str) -> tuple[set[tuple[int, int]], list[Entry]]:
    return at_broker(url, reported), at_broker(url, audited)


def test_show(shell: Shell) -> None:
    """Broken: nobody sees where a destination is without the broker's own tools."""
    assert shell.run("group", "show", "a/crm", "--json") == 0
    shown = json.loads(shell.out)
    assert {key: shown[key] for key in ("pipe", "destination", "group", "members", "paused", "lag_records")} == {
        "pipe": "a", "destination": "crm", "group": "a.crm", "members": [], "paused": None, "lag_records": 14,
    }  # fmt: skip
    assert [(one["topic"], one["partition"], one["start"], one["next"], one["end"]) for one in shown["partitions"]] == [
        ("s", 0, 0, 4, EVENTS),
        ("s", 1, 0, 2, EVENTS),
    ]
    assert [one["lag_records"] for one in shown["partitions"]] == [6, 8]
    assert {(one["topic"], one["partition"]) for one in shown["waiting"]} >= {("a.retry", 0), ("a.parked", 0)}
    assert shell.run("destination", "pause", "erp") == 0
    assert shell.run("group", "show") == 0
    assert [line for line in shell.out.splitlines() if "member" in line][:2] == [
        next(
            line
            for line in shell.out.splitlines()
            if line.startswith("a/crm: 0 members, 14 events behind in s, oldest")
        ),
        next(
            line
            for line in shell.out.splitlines()
            if line.startswith("a/erp: 0 members, paused, 20 events behind in s")
        ),
    ]
    assert "sums: transform, lag not known; its checkpoint has its position" in shell.out
    assert max(map(len, shell.out.splitlines())) <= 80


def test_reset_goes_back(shell: Shell, url: str) -> None:
    """Broken: events cannot be delivered again, other partitions move too, or nobody knows who did it."""
    assert shell.run("group", "reset", "a/crm", "--to", format_time(BASE + 3000), "--yes", "--json") == 0
    assert json.loads(shell.out) == {
        "pipe": "a", "destination": "crm", "action": "reset", "events": 1,
        "partitions": [{"topic": "s", "partition": 0, "from": 4, "to": 3, "events": 1}],
    }  # fmt: skip
    assert positions(url) == {0: 3, 1: 2}, "partition 1 is further back already"
    assert shell.run("group", "reset", "a/crm", "--to-offset", "1:0", "--yes") == 0
    assert positions(url) == {0: 3, 1: 0}
    assert shell.run("group", "reset", "a/crm", "--to-earliest", "--yes") == 0
    assert positions(url) == {0: 0, 1: 0}
    assert shell.run("group", "reset", "a/crm", "--to-earliest", "--yes") == 0
    assert "Nothing was changed" in shell.err
    skipped, entries = read_all(url)
    assert skipped == set()
    assert [(one.action, one.partition, one.ranges, one.count, one.filters) for one in entries] == [
        ("reset", 0, [(3, 3)], 1, {"destination": "a/crm", "from": "4", "to": "3"}),
        ("reset", 1, [(0, 1)], 2, {"destination": "a/crm", "from": "2", "to": "0"}),
        ("reset", 0, [(0, 2)], 3, {"destination": "a/crm", "from": "3", "to": "0"}),
    ]


def test_reset_of_a_destination_that_has_not_begun(shell: Shell) -> None:
    """Broken: an operator reads that nothing had to be changed, and the destination begins somewhere else."""
    assert shell.run("group", "reset", "a/erp", "--to", format_time(BASE + 3000), "--yes") == 1
    assert "a/erp has not begun to read, so it cannot go back Try: start the fleet" in shell.said
    assert shell.run("group", "reset", "a/erp", "--to-earliest", "--yes") == 0


def test_skip_is_counted_with_its_reason(shell: Shell, url: str) -> None:
    """Broken: a skipped event is called missing, or delivered, and nobody knows who skipped it and why."""
    skip = ("group", "skip", "a/crm", "--reason", "tests of Monday", "--yes")
    assert shell.run(*skip, "--to", format_time(BASE + 5000)) == 0
    assert positions(url) == {0: 5, 1: 5}
    assert shell.run(*skip, "--to-end", "--json") == 0
    assert json.loads(shell.out)["events"] == 10
    skipped, entries = read_all(url)
    assert skipped == {(0, n) for n in range(4, EVENTS)} | {(1, n) for n in range(2, EVENTS)}
    assert {(one.action, one.filters["because"]) for one in entries} == {("skip", "tests of Monday")}
    assert [(one.partition, one.ranges, one.count) for one in entries] == [
        (0, [(4, 4)], 1), (1, [(2, 4)], 3), (0, [(5, 9)], 5), (1, [(5, 9)], 5),
    ]  # fmt: skip
    assert shell.run("dead", "audit") == 0
    assert "skip " in shell.out
    assert "because=tests of Monday" in shell.out


def test_over_records_that_are_gone(shell: Shell, url: str) -> None:
    """Broken: a partition that stopped, because retention deleted unread events, cannot continue by a command."""
    commit(url, "a.crm", "s", 99)
    assert shell.run("group", "reset", "a/crm", "--to-offset", f"0:{EVENTS}", "--yes") == 0
    assert positions(url) == {0: EVENTS, 1: 2}
    assert read_all(url)[1][0].ranges == []


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("reset a/crm", "exactly one of --to, --to-offset and --to-earliest is needed"),
        ("reset a/crm --to 2h --to-earliest", "exactly one of"),
        ("reset a/crm --to yesterday", "'yesterday' is not a time"),
        (
            "reset a/cmr --to-earliest",
            "there is no pipe or destination a/cmr; did you mean a/crm? Try: one of: a/crm, a/erp, b/both, sums/hook",
        ),
        ("reset a --to-earliest", "its destinations have offsets Try: a/crm or a/erp"),
        (
            "reset sums --to-offset 0:1",
            "its transform has a checkpoint Try: sums/hook; or, to transform stored events again: penstock group reset sums with",
        ),
        ("skip sums --to-end --reason x", "its transform has a checkpoint"),
        ("reset a/crm --to-offset 0", "names no offset Try: PARTITION:OFFSET, e.g. 0:4712"),
        ("reset a/crm --to-offset 0:1 --to-offset 0:2", "names a partition twice"),
        ("reset a/crm --to-offset 7:1", "s has no partition 7 Try: one of: 0, 1"),
        ("reset a/crm --to-offset 0:11", "s:0 holds the offsets 0 to 10, not 11"),
        (
            "reset a/crm --to-offset 0:5",
            "--to-offset 5 would skip events of s:0, which is at 4 Try: penstock group skip",
        ),
        (
            "reset a/crm --to-offset b.retry:0:0",
            "a/crm does not read b.retry Try: one of: s, a.retry, a.parked",
        ),
        ("reset a/crm --to-offset a.retry:0:3", "a.retry:0 holds the offsets 0 to 0, not 3"),
        ("skip penstock/retrier --to-end --reason x", "penstock/retrier has only waiting events"),
        (
            "skip penstock/retrier --to-offset 0:1 --reason x",
            "reads several topics: penstock.retry-in, penstock.delay-1s,",
        ),
        ("reset b/both --to-offset 0:0", "b/both reads several streams: s, t Try: --to-offset s:0:0"),
        ("skip a/crm --to-end", "Missing option '--reason'"),
        ("skip a/crm --to-end --reason ''", "--reason is empty"),
        (
            "skip a/crm --to-offset 0:3 --reason x",
            "would deliver events of s:0 again, which is at 4 Try: penstock group reset",
        ),
    ],
)
def test_mistakes(shell: Shell, url: str, command: str, words: str) -> None:
    """Broken: a slip of the pen moves a group to a place that nobody meant."""
    assert shell.run("group", *(word.strip("'") for word in command.split())) == 2
    assert words in shell.said
    assert positions(url) == {0: 4, 1: 2}


def test_nothing_moves_unconfirmed(shell: Shell, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an operator finds out how many events a command meant after it has done it."""
    asked: list[str] = []

    def refuse(text: str, **_: Any) -> bool:
        asked.append(text)
        raise SystemExit(1)

    monkeypatch.setattr("typer.confirm", refuse)
    assert shell.run("group", "skip", "a/crm", "--to-end", "--reason", "x") == 1
    assert shell.run("group", "reset", "a/crm", "--to-earliest") == 1
    assert asked == [
        "14 events will not be delivered to a/crm. Go on?",
        "6 events will be delivered again to a/crm. Go on?",
    ]
    assert positions(url) == {0: 4, 1: 2}
    assert read_all(url) == (set(), [])


async def test_refused_while_it_runs(url: str, tmp_path: Path) -> None:
    """Broken: a running destination undoes the move, or its events are called skipped and are delivered."""
    (lane,) = find_lanes(await asyncio.to_thread(load_pipes, tmp_path / "pipes.yaml"), "a/crm")

    async with open_broker(url) as broker, Producer(broker.appender) as producer:
        back = await plan_moves(broker, lane, "earliest", "reset")
        on = await plan_moves(broker, lane, "end", "skip")
        async with broker.consumer("a.crm", ["s"], start="earliest", on_revoke=AsyncMock()):
            with pytest.raises(CommandFailed, match=r"a/crm runs: its group a\.crm has living members") as refused:
                await require_no_members(broker, lane)
            assert refused.value.remedy.startswith("stop the fleet")
            with pytest.raises(CommandFailed, match="living members"):
                await reset_offsets(broker, producer, lane, back, "me@here")
            with pytest.raises(CommandFailed, match="living members"):
                await skip_events(broker, producer, lane, on, "me@here", "why")
        assert (await broker.admin.positions("a.crm", "s"), await audited(broker)) == ({0: 4, 1: 2}, [])
        assert await reported(broker) == set()
        await reset_offsets(broker, producer, lane, back, "me@here")
        with pytest.raises(CommandFailed, match=r"was moved by another process meanwhile, and is not moved now$"):
            await skip_events(broker, producer, lane, on, "me@here", "why")
        assert await reported(broker) == set(), "the plan was old"


async def test_a_destination_that_starts_during_a_skip(url: str, tmp_path: Path) -> None:
    """Broken: the operator is told that nothing happened, and the loss table says that the events are skipped."""
    (lane,) = find_lanes(await asyncio.to_thread(load_pipes, tmp_path / "pipes.yaml"), "a/crm")

    async with AsyncExitStack() as stack:
        broker = await stack.enter_async_context(open_broker(url))
        producer: Any = await stack.enter_async_context(Producer(broker.appender))

        class StartsWhileItReports:
            async def send_to(self, topic: str, records: Any) -> Any:
                found = await producer.send_to(topic, records)
                consumer = broker.consumer("a.crm", ["s"], start="earliest", on_revoke=AsyncMock())
                await stack.enter_async_context(consumer)
                return found

        late: Any = StartsWhileItReports()
        moves = await plan_moves(broker, lane, "end", "skip")
        with pytest.raises(
            CommandFailed, match=r"living members: .*; its events count as skipped until they are delivered"
        ):
            await skip_events(broker, late, lane, moves, "me@here", "why")
        assert len(await reported(broker)) == 14
        assert (await broker.admin.positions("a.crm", "s"), await audited(broker)) == ({0: 4, 1: 2}, [])


def waiting(lane: str, number: int, wait_s: float = 3600) -> Record:
    """Event `number` of partition 0 of `s`, which waits for its next attempt at this lane; read by the retrier an hour early."""
    pipe, _, destination = lane.partition("/")
    due = int((time.time() + wait_s) * 1000)
    state = RetryState(pipe, destination, 4, 1, BASE, due, "http_503", "busy", f"s:0:{number}", BASE + 1000 * number)
    return wrap(event(0, number), state, int(time.time() * 1000))


FOREIGN = Record(b"k", b"no retry record", BASE)


@pytest.mark.parametrize(
    ("lane", "topic", "records", "letters", "left"),
    [
        pytest.param(
            "a/crm",
            "a.retry",
            [waiting("a/crm", 1), waiting("a/erp", 2), FOREIGN, waiting("a/crm", 3), waiting("a/crm", 4)],
            [("a.dead", "a", "crm", 1), ("a.dead", "a", "crm", None), ("a.dead", "a", "crm", 3)],
            {1, 3},
            id="retry",
        ),
        pytest.param(
            "a/erp",
            "a.parked",
            [waiting("a/crm", 1), waiting("a/erp", 2), waiting("a/crm", 3), waiting("a/erp", 5), waiting("a/erp", 6)],
            [("a.dead", "a", "erp", 2), ("a.dead", "a", "erp", 5)],
            {2, 5},
            id="parked",
        ),
        pytest.param(
            "penstock/retrier",
            "penstock.delay-4s",
            [waiting("a/crm", 1), waiting("gone/x", 2), FOREIGN, waiting("b/both", 3), waiting("a/crm", 4)],
            [
                ("a.dead", "a", "crm", 1),
                ("b.dead", "b", "both", 3),
                ("penstock.dead", "gone", "x", 2),
                ("penstock.dead", "", "", None),
            ],
            {1, 2, 3},
            id="retrier",
        ),
    ],
)
def test_waiting_events_are_moved_by_name(
    shell: Shell,
    url: str,
    lane: str,
    topic: str,
    records: list[Record],
    letters: list[tuple[str, str, str, int | None]],
    left: set[int],
) -> None:
    """Broken: a partition of waiting events that stopped needs a script; or a skipped one is in no dead letter and no count, is
    counted for another destination, or moves without a name in the audit."""
    group = lane.replace("/", ".")

    async def look() -> tuple[dict[int, int], list[DeadLetter], set[tuple[Any, ...]], list[Entry]]:
        async with open_broker(url) as broker:
            reports = [decode_report(record.value) for record in await stored(broker, TELEMETRY)]
            said = {
                (one.pipe, one.destination, found.outcome, number)
                for one in reports
                for found in one.sets
                for number in unpack_numbers(found.numbers)
            }
            found = [
                DeadLetter.of(Position(name, 0, 0), record)
                for name in ("a.dead", "b.dead", "penstock.dead")
                for record in await stored(broker, name)
            ]
            return await broker.admin.positions(group, topic), found, said, await audited(broker)

    put(url, topic, records)
    skip = ("group", "skip", lane, "--reason", "ticket 4711", "--yes")
    assert shell.run(*skip, "--to-offset", f"{topic}:0:4", "--json") == 0
    assert json.loads(shell.out)["events"] == len(letters)
    position, found, said, _ = asyncio.run(look())
    assert position == {0: 4}
    assert sorted((one.position.topic, one.pipe, one.destination, one.reason, one.detail) for one in found) == sorted(
        (*where, "skipped", "ticket 4711") for *where, _ in letters
    )
    sources = {one.source: event_time(one.record) for one in found if one.attempts == 4}
    assert sources == {f"s:0:{n}": BASE + 1000 * n for *_, n in letters if n is not None}
    assert said == {(pipe, destination, "dead", n) for _, pipe, destination, n in letters if n is not None}
    assert {number for *_, number in said} == left
    assert shell.run(*skip, "--to-offset", f"{topic}:0:2") == 2
    assert "would deliver events" in shell.err
    assert shell.run("group", "show", lane) == 0
    rows = [line.split()[:5] for line in shell.out.splitlines() if line.startswith(topic)]
    assert rows[0] == [topic, "0", "0", "4", "5"]
    heading = re.search(r"(\d+) events? behind in (.*?), oldest", " ".join(shell.out.split()))
    assert heading is not None
    behind = [line.split()[5] for line in shell.out.splitlines() if re.match(r"\S+ +\d+ +\d", line)]
    assert int(heading[1]) == sum(map(int, behind)), "not `up to date` above a row that is behind"
    assert topic in heading[2].split(", ")
    assert shell.run("group", "reset", lane, "--to-offset", f"{topic}:0:1", "--yes", "--json") == 0
    assert json.loads(shell.out)["events"] == len(letters) - (lane != "a/erp")
    position, _, _, entries = asyncio.run(look())
    assert position == {0: 1}
    assert positions(url) == {0: 4, 1: 2}, "the streams stay"
    assert [(one.action, one.topic, one.ranges, one.count, one.filters["destination"]) for one in entries] == [
        ("skip", topic, [(0, 3)], len(letters), lane),
        ("reset", topic, [(1, 3)], len(letters) - (lane != "a/erp"), lane),
    ]


async def test_waiting_events_do_not_move_while_the_retrier_runs(url: str, tmp_path: Path) -> None:
    """Broken: a retrier that runs undoes the move, or an event is moved on and is a dead letter too."""
    (lane,) = find_lanes(await asyncio.to_thread(load_pipes, tmp_path / "pipes.yaml"), "penstock/retrier")

    async with open_broker(url) as broker, Producer(broker.appender) as producer:
        (await producer.send_to(RETRY_IN, {0: [waiting("a/crm", 1)]})).raise_first()
        moves = await plan_moves(broker, lane, {TopicPartition(RETRY_IN, 0): 1}, "skip")
        async with broker.consumer(RETRIER_GROUP, [RETRY_IN], start="earliest", on_revoke=AsyncMock()):
            with pytest.raises(CommandFailed, match=r"its group penstock\.retrier has living members") as refused:
                await skip_events(broker, producer, lane, moves, "me@here", "why")
        assert "services.global_retrier" in refused.value.remedy
        assert (await stored(broker, "a.dead"), await audited(broker)) == ([], [])


class Crashed(Exception):
    """The process ends here."""


class Crasher:
    """Ends the command at one of its calls to the broker, before or after the call has its effect."""

    def __init__(self, draw: random.Random) -> None:
        self._name = draw.choice(
            ["members", "positions", "read", "send_to", "send_to", "set_committed", "set_committed"]
        )
        self._left, self._after = draw.randint(1, 1 if self._name == "set_committed" else 4), draw.random() < 0.5

    def wrap(self, owner: Any) -> Any:
        crasher = self

        class Wrapped:
            def __getattr__(self, name: str) -> Any:
                found = getattr(owner, name)
                if name != crasher._name:
                    return found

                async def call(*given: Any, **more: Any) -> Any:
                    crasher._left -= 1
                    if crasher._left == 0 and not crasher._after:
                        raise Crashed
                    result = await found(*given, **more)
                    if crasher._left == 0:
                        raise Crashed
                    return result

                return call

        return Wrapped()


@pytest.mark.parametrize("seed", range(10))
async def test_a_skip_never_passes_an_unreported_event(
    seed: int, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: a skip that is killed passes events that nobody was told of. Killed at random, repeated until it succeeds."""
    draw = random.Random(seed)
    monkeypatch.setattr("services.fleet.positions.offsets.READ_RECORDS", draw.randint(1, 4))
    monkeypatch.setattr("services.fleet.positions.offsets._REPORT_EVENTS", draw.randint(1, 5))
    (lane,) = find_lanes(await asyncio.to_thread(load_pipes, tmp_path / "pipes.yaml"), "a/crm")
    before = {0: 4, 1: 2}
    async with open_broker(url) as broker:
        while True:
            crasher = Crasher(draw)

            class Mortal:
                features = broker.features
                admin, reader = crasher.wrap(broker.admin), crasher.wrap(broker.reader)

            moves = await plan_moves(broker, lane, "end", "skip")
            if not moves:
                break
            async with Producer(broker.appender) as producer:
                mortal: Any = crasher.wrap(producer)
                dying: Any = Mortal()
                with suppress(Crashed, Unavailable):  # `Reporter` calls it unavailable when it cannot send
                    await skip_events(dying, mortal, lane, moves, "me@here", "why")
            now = await broker.admin.positions("a.crm", "s")
            passed = {(number, n) for number, first in before.items() for n in range(first, now[number])}
            assert passed <= await reported(broker)
            written = [one for one in await audited(broker) if one.action == "skip"]
            covered = {
                (one.partition, n) for one in written for first, last in one.ranges for n in range(first, last + 1)
            }
            assert passed <= covered
        assert await broker.admin.positions("a.crm", "s") == {0: EVENTS, 1: EVENTS}


async def test_a_reset_waits_for_events_that_count_as_written(url: str, tmp_path: Path) -> None:
    """Broken: expel takes events that a reset delivers again for those it has just written to the retry topic."""
    lanes = {lane.name: lane for lane in find_lanes(await asyncio.to_thread(load_pipes, tmp_path / "pipes.yaml"), "a")}
    now = time.time()

    def handed_over(destination: str, source: str, age_s: float) -> Record:
        state = RetryState("a", destination, 4, 1, 77, 0, "http_503", "busy", source, BASE)
        return wrap(event(0, 1), state, int((now - age_s) * 1000))

    async with open_broker(url) as broker, Producer(broker.appender) as producer:
        records = [handed_over("crm", "s:0:1", 50), handed_over("crm", "s:0:9", 5), handed_over("erp", "s:0:1", 5)]
        records.append(handed_over("crm", "s:0:0", WITHIN_S + 10))
        (await producer.send_to(RETRY_IN, {0: records})).raise_first()
        moves = await plan_moves(broker, lanes["a/crm"], "earliest", "reset")
        assert WITHIN_S - 60 < await retry_wait_s(broker, lanes["a/crm"], moves) < WITHIN_S - 40
        moves = await plan_moves(broker, lanes["a/crm"], {TopicPartition("s", 0): 2}, "reset")
        assert await retry_wait_s(broker, lanes["a/crm"], moves) == 0


def read_mark(url: str) -> TransformMark | None:
    """Of the transform `sums`."""
    return at_broker(url, lambda broker: read_transform_mark(broker.reader, "sums"))


def test_a_transform_begins_again(shell: Shell, tmp_path: Path) -> None:
    """Broken: to transform all events again, an operator renames folders, perhaps below a running transform."""
    reset, folder = ("group", "reset", "sums", "--to-earliest", "--yes"), tmp_path / "data" / "checkpoints" / "sums"
    assert shell.run(*reset) == 1
    assert "there is no checkpoint in data/checkpoints/sums, and the transform has not begun" in shell.said
    folder.mkdir(parents=True)
    (folder / "penstock.lock").write_text("4711\n")
    (folder / "penstock.json").write_text("{}")
    with (folder / "penstock.lock").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert shell.run(*reset) == 1
        assert "the transform of sums runs Try: stop the fleet" in shell.said
        assert folder.exists()
    assert shell.run(*reset, "--json") == 0
    said = json.loads(shell.out)
    assert (said["events"], said["transform"]) == (2 * EVENTS, True)
    assert not folder.exists()
    assert (tmp_path / said["checkpoint"] / "penstock.lock").exists()
    assert shell.run("dead", "audit", "--json") == 0
    entries = [json.loads(line) for line in shell.out.splitlines()]
    assert [(one["action"], one["filters"]["transform"], one["ranges"]) for one in entries] == [
        ("reset", "sums", [[0, EVENTS - 1]]),
        ("reset", "sums", [[0, EVENTS - 1]]),
    ]


def test_a_transform_begins_at_a_time(shell: Shell, tmp_path: Path, url: str) -> None:
    """Broken: after the loss of a cluster everything is transformed again; or a window is summed of a part of its events; or a
    topic that was created again since is read from an offset of the former one."""
    since = ("group", "reset", "sums", "--to", format_time(BASE + 7000), "--yes", "--json")
    (folder := tmp_path / "data" / "checkpoints" / "sums").mkdir(parents=True)
    (folder / "penstock.json").write_text(IDENTITY)  # from a backup, without a lock

    async def mark(plan: StatePlan | None = None) -> tuple[TransformMark | None, str]:
        async with open_broker(url) as broker, Producer(broker.appender) as producer:
            if plan is not None:
                await write_transform_mark(producer, "sums", "begun", "0123", "transform", plan)
            return await read_transform_mark(broker.reader, "sums"), await broker.admin.incarnation("s")

    assert shell.run(*since) == 0
    said = json.loads(shell.out)
    assert (said["events"], said["at_least"], said["older_events"]) == (2 * 3, True, 2 * 7)
    assert (said["since"], said["former"]) == (format_time(BASE + 7000), Path(said["checkpoint"]).name)
    words = shell.said
    assert "or at the position of its former checkpoint, if that comes first" in words
    assert "Of 14 older events, it leaves out those that it has transformed." in words
    assert shell.run("dead", "audit", "--json") == 0
    filters = json.loads(shell.out.splitlines()[0])["filters"]
    assert (filters["since"], filters["or_position_of"]) == (said["since"], said["former"])
    found, incarnation = asyncio.run(mark())
    assert found is not None
    begins, former = {"s": Begin(incarnation, {0: 7, 1: 7})}, Path(said["checkpoint"]).name
    assert (found.state, found.begins, found.former) == ("reset", begins, former)
    assert shell.run("group", "reset", "sums", "--to-earliest", "--yes", "--json") == 0, "a second thought"
    found, _ = asyncio.run(mark())
    assert found is not None
    assert (found.state, found.begins, found.former) == ("reset", {}, former)
    assert shell.run(*since) == 0, "a third one"
    found, _ = asyncio.run(mark())
    assert found is not None
    assert (found.state, found.begins, found.former) == ("reset", begins, former)
    assert shell.run("group", "reset", "sums", "--to", "2999-01-01T00:00:00Z", "--yes") == 2
    assert "2999-01-01T00:00:00Z is in the future" in shell.err
    asyncio.run(mark(StatePlan([], {}, ["s"], "", "4.2.0", "")))
    assert shell.run(*since) == 2
    assert "kept state over several events, which a reset to a time would lose Try: --to-earliest" in shell.said


def test_a_transform_without_its_checkpoint_begins_at_a_time(shell: Shell) -> None:
    """Broken: nobody reads how many events a reset to a time leaves out."""
    since = ("group", "reset", "sums", "--to", format_time(BASE + 7000), "--yes")
    assert shell.run(*since, "--json") == 0
    said = json.loads(shell.out)
    assert (said["events"], said["at_least"], said["older_events"], said["former"]) == (2 * 3, False, 2 * 7, None)
    assert (
        "Its former checkpoint is not here, so it leaves out 14 older events, also events that it never transformed"
        in shell.said
    )
    assert shell.run(*since) == 0
    assert "sums: 6 events will be transformed again" in shell.said


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (', "state": "of a window"}', "kept state over several events"),
        (f', "plan": {PLAN}}}', "kept state over several events"),
        (', "ran": true}', "kept state over several events"),  # of 0.1, which kept it in `state/`
        (', "pipe": "a"}', "belongs to the pipe 'a'"),
        ("", "penstock.json cannot be read"),
    ],
)
def test_a_checkpoint_that_refuses_a_time_stays(
    shell: Shell, tmp_path: Path, url: str, changed: str, words: str
) -> None:
    """Broken: a reset to a time sets a checkpoint aside that the start then refuses, so the transform stands still."""
    (folder := tmp_path / "data" / "checkpoints" / "sums" / "state").mkdir(parents=True)
    if "ran" not in changed:
        folder.rmdir()
    (folder.parent / "penstock.json").write_text(IDENTITY.removesuffix("}") + changed)
    assert shell.run("group", "reset", "sums", "--to", format_time(BASE + 7000), "--yes") == 2
    said = shell.said
    assert words in said
    assert "Try: --to-earliest" in said
    assert folder.parent.exists()
    assert read_mark(url) is None
    assert shell.run("group", "reset", "sums", "--to-earliest", "--yes") == 0


def test_a_reset_by_root_leaves_the_checkpoint_to_its_owner(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: after a reset that root declined, the fleet's user cannot lock a restored checkpoint."""
    (folder := tmp_path / "data" / "checkpoints" / "sums").mkdir(parents=True)
    (folder / "penstock.json").write_text(IDENTITY)
    owner, given = folder.stat(), []

    def refuse(*_: Any, **__: Any) -> bool:
        raise SystemExit(1)

    monkeypatch.setattr("typer.confirm", refuse)
    monkeypatch.setattr("services.fleet.positions.transform_reset.os.geteuid", lambda: 0)
    monkeypatch.setattr("services.fleet.positions.transform_reset.os.fchown", lambda _file, *to: given.append(to))
    assert shell.run("group", "reset", "sums", "--to", format_time(BASE + 7000)) == 1
    assert (folder / "penstock.lock").exists()
    assert given == [(owner.st_uid, owner.st_gid)]


def test_a_second_reset_from_elsewhere(shell: Shell, tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a reset from a machine without the checkpoints forgets the position, and what was not transformed is left out."""
    since = ("group", "reset", "sums", "--to", format_time(BASE + 7000), "--yes", "--json")
    (folder := tmp_path / "data" / "checkpoints" / "sums").mkdir(parents=True)
    (folder / "penstock.json").write_text(IDENTITY)
    assert shell.run(*since) == 0
    former = json.loads(shell.out)["former"]
    monkeypatch.setenv("PENSTOCK_TRANSFORM_CHECKPOINTS", str(tmp_path / "laptop"))
    assert shell.run(*since) == 0
    assert f"{former} is not here; --to-earliest does not need it" in shell.said
    assert json.loads(shell.out)["former"] == former
    assert (mark := read_mark(url)) is not None
    assert mark.former == former
    assert shell.run("group", "reset", "sums", "--to-earliest", "--yes") == 0
    assert shell.run(*since) == 0
    assert json.loads(shell.out)["former"] is None


@pytest.mark.parametrize("setting", ["folder", "file", "s3"])
def test_checkpoints_that_are_elsewhere(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    """Broken: a reset does not find the checkpoint, so the transform continues with it, or leaves out what it has not read; or a
    folder of an earlier setting is taken for it."""
    for place in ("elsewhere", "data/checkpoints"):
        (tmp_path / place / "sums").mkdir(parents=True)
        (tmp_path / place / "sums" / "penstock.json").write_text(IDENTITY)
    named = "s3a://bucket/checkpoints" if setting == "s3" else str(tmp_path / "elsewhere")
    if setting == "file":
        (tmp_path / "penstock.yaml").write_text(f"transform: {{checkpoints: {named}}}\n")
        write_snapshot(tmp_path / "data" / "snapshot", read_contents([tmp_path / "penstock.yaml"]))
    else:
        monkeypatch.setenv("PENSTOCK_TRANSFORM_CHECKPOINTS", named)
    assert shell.run("group", "reset", "sums", "--to", format_time(BASE + 7000), "--yes", "--json") == 0
    said = json.loads(shell.out)
    assert (said["checkpoint"] or "").startswith(str(tmp_path / "elsewhere" / "sums.")) == (setting != "s3")
    assert (said["former"] is None) == (setting == "s3")
    words = shell.said
    assert ("sums was not looked at. If a checkpoint is still there" in words) == (setting == "s3")
    assert "There is no checkpoint" not in words
    assert (tmp_path / "data" / "checkpoints" / "sums").exists(), "nobody uses it"


@pytest.mark.parametrize("folder", ["none", "refused", "there"])
def test_a_transform_whose_checkpoint_is_lost_begins_again(shell: Shell, tmp_path: Path, folder: str) -> None:
    """Broken: a transform that is refused without its checkpoint stays refused, or begins again without a word in the audit."""
    place = tmp_path / "data" / "checkpoints" / "sums"

    async def on_control(*, begins: bool = False) -> TransformMark | None:
        async with open_broker(f"log://{tmp_path}/data/log") as broker, Producer(broker.appender) as producer:
            if begins:
                await write_transform_mark(producer, "sums", "begun", "0123", "transform")
            return await read_transform_mark(broker.reader, "sums")

    asyncio.run(on_control(begins=True))
    if folder != "none":
        place.mkdir(parents=True)
        (place / "penstock.lock").touch()  # the transform that was refused left it
    if folder == "there":
        (place / "penstock.json").touch()
    assert shell.run("group", "reset", "sums", "--to-earliest", "--yes", "--json") == 0
    words = shell.said
    assert ("with checkpoint 0123. If that checkpoint is elsewhere, the transform continues with it" in words) == (
        folder != "there"
    )
    assert (json.loads(shell.out)["checkpoint"] is None) == (folder != "there")
    found = asyncio.run(on_control())
    assert found is not None
    assert (found.state, found.checkpoint, found.by) == ("reset", "0123", whoami())
    assert shell.run("dead", "audit", "--json") == 0
    assert [json.loads(line)["filters"]["transform"] for line in shell.out.splitlines()] == ["sums", "sums"]
    assert shell.run("group", "reset", "sums", "--to-earliest", "--yes") == 1, "there is nothing to reset"


async def test_an_empty_shard_is_not_moved() -> None:
    """It has no offset to commit, also where the offsets of a stream that was moved have a base."""
    broker = Mock(is_contiguous=lambda _topic: False)
    lane, base = Mock(topics=["s"]), 1 << 200
    held = {0: PartitionRange(base, base), 1: PartitionRange(base + 3, base + 9)}
    offsets = [PartitionOffsets(TopicPartition("s", number), one, None, Lag(0, 0)) for number, one in held.items()]
    assert await _resolve(broker, lane, "earliest", offsets) == {TopicPartition("s", 1): base + 3}
