"""Each destination's minute is final by itself, and none is forgotten without a word."""

from typing import Any

import msgspec
import pytest
import zstandard
from prometheus_client import REGISTRY

from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.security.signing import SigningKeys
from services.observer import health
from services.observer.alarms import Alarm, AlarmWebhook, find_alarms
from services.observer.follower import Follower
from services.observer.ledger.finality import GIVEN_UP
from services.observer.ledger.flow import Flow, PipeFlow, Step
from services.observer.ledger.table import Ages, Table
from services.observer.ledger_api import row_json
from services.observer.planned import PlannedWindows
from services.observer.snapshot import FollowerState
from services.observer.snapshot_v1 import SnapshotState, restore_v1
from services.observer.watch import Watch
from tests.support.memory_appender import MemoryAppender
from tests.unit.observer.ledger.snapshots import dump, dump_v1, restarted, restore
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, START_MS, accept, beat, hear, tell

FLOW = Flow({"late": PipeFlow(("flights",), True, {"down": None, "lossy": None, "well": None})})
END_MS = START_MS + MINUTE_MS
FINAL_MS = END_MS + Ages().final
DAY_MS = Ages().drop


def speak(table: Table, at_ms: int, *, transform: int = 0, down: int = 0) -> None:
    """Everybody does; the transform and one destination are behind by so much."""
    hear(table, beat("ingest", "flights", at_ms=at_ms))
    hear(table, beat("transform", "late", at_ms=at_ms, behind_ms=transform))
    for name in FLOW.pipes["late"].destinations:
        hear(table, beat("expel", "late", name, at_ms=at_ms, behind_ms=down if name == "down" else 0))


def begin(table: Table, *, passed: int = 100, lossy: int = 90, down: int = 0) -> None:
    """A hundred events: so many pass the transform and are delivered."""
    hear(table, accept(range(100)))
    hear(table, tell("transform", "late", "passed", range(passed)))
    for name, count in (("down", down), ("lossy", lossy), ("well", passed)):
        hear(table, tell("expel", "late", "delivered", range(count), destination=name))


def states(table: Table, now: int) -> dict[str | None, str | None]:
    return {step.destination: step.why_open for step in table.row("late", MINUTE, now).steps}


def watching() -> tuple[Watch, Table]:
    no_admin: Any = None
    watch = Watch(0.01, AlarmWebhook("http://127.0.0.1:9/", SigningKeys()), lambda pipe: [])
    watch.follower = Follower(FLOW, no_admin, Producer(MemoryAppender()), watch.on_final)
    return watch, watch.follower.table


def alarms(watch: Watch) -> list[Alarm]:
    return list(watch.follower.untold.all())


def counted(name: str, destination: str) -> float:
    return REGISTRY.get_sample_value(name, {"pipe": "late", "destination": destination}) or 0.0


def test_a_destination_that_is_behind_hides_no_loss_of_another() -> None:
    """Broken: while one of fifty receivers is down for days, nobody hears of what the other forty-nine lose."""
    watch, table = watching()
    begin(table)
    speak(table, FINAL_MS, down=500_000)
    turn = table.tick(FINAL_MS)
    assert [(one.part, one.row.missing_for(one.part)) for one in turn.verdicts] == [
        (None, 0),
        ("lossy", 10),
        ("well", 0),
    ]
    assert states(table, FINAL_MS) == {
        None: None,
        "down": "expel to down is behind by 500 s",
        "lossy": None,
        "well": None,
    }
    watch.on_final(turn)
    (alarm,) = alarms(watch)
    assert (alarm.body["destination"], alarm.body["missing"], alarm.body["loss"]) == ("lossy", 10, 0.1)
    judged = health.find_health(table, PlannedWindows(), "late", FINAL_MS, 0.01)
    assert (judged.state, judged.reasons[0]) == ("unstable", "10 of 100 events are missing in 1 minute")
    said: dict[str, Any] = row_json(table.row("late", MINUTE, FINAL_MS))
    assert (said["final"], said["missing"], said["lost"], said["final_loss"]) == (False, 100, 10, 0.1)
    assert [step["final"] for step in said["steps"]] == [True, False, True, True]


def test_the_one_that_was_behind_is_judged_when_it_has_caught_up() -> None:
    """Broken: what is lost at a destination that was down is never told, or again for those that were final before."""
    watch, table = watching()
    begin(table, lossy=100)
    speak(table, FINAL_MS, down=500_000)
    watch.on_final(table.tick(FINAL_MS))
    assert alarms(watch) == []
    later = FINAL_MS + 2 * 3_600_000
    hear(table, tell("expel", "late", "delivered", range(95), destination="down", at_ms=later))
    speak(table, later)
    turn = table.tick(later)
    assert [(one.part, one.row.missing_for(one.part)) for one in turn.verdicts] == [("down", 5)]
    assert [row.missing for row in turn.final] == [5]
    watch.on_final(turn)
    assert [alarm.body["destination"] for alarm in alarms(watch)] == ["down"]
    assert table.tick(later + 1).verdicts == []


@pytest.mark.parametrize("restarts", [False, True])
def test_results_of_a_late_transform_are_not_lost_while_they_are_delivered(restarts: bool) -> None:
    """Broken: a transform that stood still for some minutes, e.g. in an upgrade, catches up, and its results are called lost
    because the destinations had done everything before they came; or so when the observer itself is replaced meanwhile."""
    table = Table(FLOW)
    hear(table, accept(range(100)))
    speak(table, FINAL_MS, transform=500_000)
    assert table.tick(FINAL_MS).verdicts == []
    assert "behind" in str(states(table, FINAL_MS)[None])
    table = restarted(table) if restarts else table
    late = FINAL_MS + 60_000
    hear(table, tell("transform", "late", "passed", range(100)))
    speak(table, late)  # the destinations: nothing waits, as of a moment ago
    assert [one.part for one in table.tick(late).verdicts] == [None]
    table = restarted(table) if restarts else table
    assert set(states(table, late).values()) > {None}
    table.tick(late + 5_000)
    begin(table, down=100, lossy=90)
    speak(table, late + 35_000)
    turn = table.tick(late + 35_000)
    assert [(one.part, one.row.missing_for(one.part)) for one in turn.verdicts] == [
        ("down", 0),
        ("lossy", 10),
        ("well", 0),
    ]


def test_results_that_came_shortly_before_a_minute_may_be_final_are_not_lost() -> None:
    """Broken: as above, for the one minute that ended one and a half to two and a half minutes before the standstill did."""
    _, table = watching()
    hear(table, accept(range(100)))
    behind = FINAL_MS - 50_000
    speak(table, behind, transform=500_000)
    table.tick(behind)
    hear(table, tell("transform", "late", "passed", range(100)))
    speak(table, FINAL_MS)
    assert [one.part for one in table.tick(FINAL_MS).verdicts] == [None]
    begin(table, down=100, lossy=100)
    speak(table, FINAL_MS + 35_000)
    turn = table.tick(FINAL_MS + 35_000)
    assert [(one.part, one.row.missing_for(one.part)) for one in turn.verdicts] == [
        (name, 0) for name in ("down", "lossy", "well")
    ]


def test_no_destination_is_final_before_what_comes_to_it_is_known() -> None:
    """Broken: a transform that is behind passes events on after their minute was final, and their loss raises no alarm."""
    _, table = watching()
    begin(table, passed=50, lossy=50, down=50)
    speak(table, FINAL_MS, transform=400_000)
    assert table.tick(FINAL_MS).verdicts == []
    assert set(states(table, FINAL_MS).values()) == {"transform is behind by 400 s"}


def test_what_the_transform_lost_is_one_alarm() -> None:
    """Broken: each of a thousand destinations wakes somebody for what none of them lost; or nobody does, while one is down."""
    watch, table = watching()
    begin(table, passed=80, lossy=80)
    speak(table, FINAL_MS, down=500_000)
    watch.on_final(table.tick(FINAL_MS))
    (alarm,) = alarms(watch)
    assert (alarm.body["destination"], alarm.body["missing"]) == (None, 20)
    hear(table, tell("expel", "late", "delivered", range(80), destination="down", at_ms=FINAL_MS + 10_000))
    speak(table, FINAL_MS + 10_000)
    watch.on_final(table.tick(FINAL_MS + 10_000))
    assert len(alarms(watch)) == 1, "the last destination lost nothing of its own"


def test_little_at_each_of_several_destinations_is_an_alarm_of_the_minute() -> None:
    """Broken: a pipe whose destinations lose 0.7 % each, of different events, loses over 1 % and raises no alarm."""
    table = Table(FLOW)
    hear(table, accept(range(1000)))
    hear(table, tell("transform", "late", "passed", range(1000)))
    for name, lost in (("down", 1000), ("lossy", 7), ("well", 500)):
        delivered = [n for n in range(1000) if not lost <= n < lost + 7]
        hear(table, tell("expel", "late", "delivered", delivered, destination=name))
    speak(table, FINAL_MS)
    turn = table.tick(FINAL_MS)
    (due,) = find_alarms(turn.verdicts, PlannedWindows(), 0.01, FINAL_MS)
    assert (due.part, due.row.lost) == (None, 14)


def test_what_is_forgotten_before_it_was_final_is_counted_and_told() -> None:
    """Broken: a destination is down for two days, and its minutes of before vanish from the table without a word; or they are
    called lost when it has caught up, although everything arrived."""
    watch, table = watching()
    minutes, events = "penstock_ledger_unjudged_minutes_total", "penstock_ledger_unjudged_events_total"
    before = [counted(minutes, "down"), counted(events, "down"), counted(minutes, "lossy")]
    begin(table, down=40)
    hear(table, tell("expel", "late", "parked", [50], destination="down"))  # which is held for longer than a day
    for now in range(FINAL_MS, END_MS + DAY_MS, 3_600_000):
        speak(table, now, down=now - END_MS)
        watch.on_final(table.tick(now))
    assert len(alarms(watch)) == 1, "lossy's"
    for now in (END_MS + DAY_MS, END_MS + DAY_MS + 1000):
        speak(table, now, down=now - END_MS)
        watch.on_final(table.tick(now))
    assert [counted(minutes, "down"), counted(events, "down"), counted(minutes, "lossy")] == [
        before[0] + 1,
        before[1] + 59,
        before[2],
    ]
    told = alarms(watch)[1:]
    assert [(alarm.body["type"], alarm.body["destination"], alarm.body["missing"]) for alarm in told] == [
        ("penstock.unjudged", "down", 59)
    ]
    assert states(table, now)["down"] == GIVEN_UP
    for one in (table, restarted(table)):
        later = now + 10_000
        hear(one, tell("expel", "late", "delivered", range(100), destination="down", at_ms=later))
        speak(one, later)
        turn = one.tick(later)
        assert (turn.verdicts, turn.given_up) == ([], [])


def test_an_hour_of_forgotten_minutes_is_one_alarm_and_all_are_counted() -> None:
    """Broken: a destination that is down for a week sends its operator an alarm a minute."""
    watch, table = watching()
    before = counted("penstock_ledger_unjudged_minutes_total", "down")
    first = MINUTE - MINUTE % 60 + 60
    for minute in range(first, first + 60):
        hear(table, accept([minute - first], minute=minute))
        hear(table, tell("transform", "late", "passed", [minute - first]))
        for name in ("lossy", "well"):
            hear(table, tell("expel", "late", "delivered", [minute - first], destination=name))
    for at in range(first, first + 60):
        now = (at + 1) * MINUTE_MS + DAY_MS
        speak(table, now, down=2 * DAY_MS)
        watch.on_final(table.tick(now))
    told = [alarm for alarm in alarms(watch) if alarm.body["type"] == "penstock.unjudged"]
    assert [alarm.body["destination"] for alarm in told] == ["down"]
    assert counted("penstock_ledger_unjudged_minutes_total", "down") - before == 60


def test_a_minute_of_which_nobody_knows_what_came_in_is_told_once() -> None:
    """Broken: an ingest that stays silent, and cannot be read up on, makes an alarm for each destination."""
    watch, table = watching()
    begin(table)
    now = END_MS + DAY_MS
    speak(table, END_MS)
    table.tick(now)  # it has not spoken for a day
    assert [alarm.body["destination"] for alarm in alarms(watch)] == []
    fresh = Table(FLOW)
    begin(fresh)
    speak(fresh, END_MS)
    turn = fresh.tick(now)
    assert ([one.part for one in turn.given_up], turn.verdicts) == ([None], [])


def test_a_restart_judges_only_what_was_open() -> None:
    """Broken: after a restart of the observer the destinations that were final raise their alarms again, or the open one none."""
    _, table = watching()
    begin(table)
    speak(table, FINAL_MS, down=500_000)
    table.tick(FINAL_MS)
    more = Flow(
        {
            "late": msgspec.structs.replace(
                FLOW.pipes["late"], destinations={**FLOW.pipes["late"].destinations, "new": None}
            )
        }
    )
    for flow in (FLOW, more):  # one that is new was never meant to get these
        other = restarted(table, flow)
        speak(other, FINAL_MS + 1000)
        turn = other.tick(FINAL_MS + 1000)
        assert [(one.part, one.row.missing_for(one.part)) for one in turn.verdicts] == [("down", 100)]
        hear(other, tell("expel", "late", "delivered", range(100), destination="lossy", at_ms=FINAL_MS + 2000))
        assert other.row("late", MINUTE, FINAL_MS + 2000).late == 10


def test_a_snapshot_that_knows_no_parts_is_read() -> None:
    """Broken: whoever updates the observer gets the alarms of a day again, or loses what settled late."""
    _, table = watching()
    begin(table, down=100)
    speak(table, FINAL_MS)
    table.tick(FINAL_MS)
    hear(table, tell("expel", "late", "delivered", range(94), destination="lossy"))
    state = msgspec.msgpack.decode(zstandard.decompress(dump_v1(table, FollowerState(PlannedWindows(), 0))))
    del state[fields_before() :]
    other = Table(FLOW)
    restore_v1(zstandard.compress(msgspec.msgpack.encode(state)), other)
    speak(other, FINAL_MS + 1000)
    assert other.tick(FINAL_MS + 1000).verdicts == []
    row = other.row("late", MINUTE, FINAL_MS + 1000)
    assert (row.why_open, row.missing, row.late) == (None, 6, 4)
    assert other.finality.is_final(("late", MINUTE), "lossy")


def fields_before() -> int:
    """How many there were before parts."""
    return [field.name for field in msgspec.structs.fields(SnapshotState)].index("open")


def test_a_new_name_is_charged_with_what_its_former_name_left() -> None:
    """Broken: a destination gets a new name, and all events of the last minutes are reported as lost on the way to it."""
    _, table = watching()
    begin(table)
    speak(table, FINAL_MS, down=500_000)
    table.tick(FINAL_MS)
    destinations = dict.fromkeys(("up", "lossy", "fine"))
    renames: dict[tuple[str, str | None], tuple[str, str]] = {
        ("late", "down"): ("late", "up"),
        ("late", "well"): ("late", "fine"),
    }
    pipe = msgspec.structs.replace(FLOW.pipes["late"], destinations=destinations)
    other = restarted(table, Flow({"late": pipe}, renames))
    assert other.finality.open == {("late", MINUTE): {"up"}}
    assert other.finality.final_missing == table.finality.final_missing
    missing = other.row("late", MINUTE, FINAL_MS).missing_by_part()
    assert (missing.get("fine", 0), missing.get("lossy"), missing.get("up")) == (
        0,
        table.row("late", MINUTE, FINAL_MS).missing_by_part()["lossy"],
        100,
    )


def test_a_renamed_pipe_keeps_what_is_final() -> None:
    """Broken: a pipe gets a new name, and whoever is on call gets the alarms of the last day again, or of an hour ago none:
    its minutes have no rows any more."""
    store = PipeFlow(("flights",), transforms=False, destinations={"down": None, "lossy": None, "gone": None})
    shop = msgspec.structs.replace(store, destinations=dict.fromkeys(("up", "lossy")))
    table = Table(Flow({"store": store}))
    for minute in (MINUTE, MINUTE + 1):
        numbers = range(100 * (minute - MINUTE), 100 * (minute - MINUTE) + 100)
        at_ms = START_MS + (minute - MINUTE) * MINUTE_MS
        hear(table, accept(numbers, minute=minute, at_ms=at_ms))
        hear(table, tell("expel", "store", "delivered", numbers[:90], destination="lossy", at_ms=at_ms))
        hear(table, tell("expel", "store", "delivered", numbers, destination="down", at_ms=at_ms))
        hear(table, tell("expel", "store", "delivered", numbers[:50], destination="gone", at_ms=at_ms))
    now = END_MS + Ages().fold  # the first minute is counts, the second has its sets
    hear(table, beat("ingest", "flights", at_ms=now))
    for name, behind_ms in (("down", 0), ("lossy", 0), ("gone", DAY_MS)):
        hear(table, beat("expel", "store", name, at_ms=now, behind_ms=behind_ms))
    assert {one.part for one in table.tick(now).verdicts} == {None, "down", "lossy"}
    hear(table, beat("expel", "store", "gone", at_ms=now + 1000))
    table.tick(now + 1000)
    assert [minute for _, minute in table.base] == [MINUTE]
    renames: dict[tuple[str, str | None], tuple[str, str]] = {
        ("store", "up"): ("shop", "up"),
        ("store", "down"): ("shop", "up"),
        ("shop", "down"): ("shop", "up"),
        ("store", "lossy"): ("shop", "lossy"),
    }
    drifts = {("store", Step("expel", "store", "down"), "price", "null"): now}
    other = Table(Flow({"shop": shop}, renames))
    state = restore(dump(table, FollowerState(PlannedWindows(), 0, drifting=drifts)), other)
    assert state.drifting == {("shop", Step("expel", "shop", "up"), "price", "null"): now}
    assert other.tick(now + 2000).verdicts == []
    assert {row.minute: row.lost for row in other.found_lately("shop", now + 2000)} == {MINUTE: 10, MINUTE + 1: 10}
    for minute in (MINUTE, MINUTE + 1):
        row, before = other.row("shop", minute, now + 2000), table.row("store", minute, now + 2000)
        assert (row.accepted, row.why_open) == (100, None)
        assert row.missing_by_part()["lossy"] == before.missing_by_part()["lossy"] == 10
        assert [(step.expected, step.missing) for step in row.steps if step.destination == "up"] == [(100, 0)]


def test_reports_under_a_former_name_count() -> None:
    """Broken: while instances with the former file still run, their deliveries are missing under the new name."""
    no_admin: Any = None
    destinations = dict.fromkeys(("down", "lossy", "fine"))
    flow = Flow(
        {"late": msgspec.structs.replace(FLOW.pipes["late"], destinations=destinations)},
        {("late", "well"): ("late", "fine")},
    )
    follower = Follower(flow, no_admin, Producer(MemoryAppender()), lambda _turn: None)
    reports = [
        accept(range(100)),
        tell("transform", "late", "passed", range(100)),
        tell("expel", "late", "delivered", range(60), destination="well"),
        tell("expel", "late", "delivered", range(50, 90), destination="fine"),
    ]
    records = [Record(b"k", report.encode(), 1) for report in reports]
    follower._apply(Batch("penstock.telemetry", 0, range(len(records)), records))
    assert follower.table.row("late", MINUTE, FINAL_MS).missing_by_part()["fine"] == 10
