"""A destination that begins at the newest event is owed nothing that was stored before; afterwards a loss is a loss."""

import msgspec
import pytest
import zstandard

from services.core.pipe_file.pipes import PipeFile
from services.observer.ledger.flow import Flow, PipeFlow, read_flow
from services.observer.ledger.table import Ages, Table
from services.observer.planned import PlannedWindows
from services.observer.snapshot import FollowerState
from services.observer.snapshot_v1 import SnapshotState, restore_v1
from tests.unit.observer.ledger.snapshots import dump, dump_v1, restore
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, START_MS, accept, beat, hear, tell

FLOW = Flow({"welcome": PipeFlow(("signups",), False, {"crm": None}, late=frozenset({"crm"}))})
BEGUN_MS = START_MS + 2 * MINUTE_MS
FINAL_MS = BEGUN_MS + MINUTE_MS + Ages().final


def beats(table: Table, at_ms: int) -> None:
    hear(table, beat("ingest", "signups", at_ms=at_ms))
    hear(table, beat("expel", "welcome", "crm", at_ms=at_ms))


def before() -> Table:
    """580 events, which nobody read."""
    table = Table(FLOW)
    hear(table, accept(range(580), stream="signups"))
    return table


def lost(table: Table) -> dict[int, int]:
    """By minute after the first, what is lost once everything is final."""
    beats(table, FINAL_MS)
    return {one.row.minute - MINUTE: one.row.lost for one in table.tick(FINAL_MS).verdicts if one.row.lost}


def test_events_from_before_the_start_are_not_missing() -> None:
    table = before()
    beats(table, BEGUN_MS)
    assert lost(table) == {}
    assert table.row("welcome", MINUTE, FINAL_MS).steps[-1].outcomes["skipped"] == 580


def test_a_destination_that_begins_at_the_oldest_event_is_owed_all() -> None:
    table = before()
    table.flow = Flow({"welcome": PipeFlow(("signups",), False, {"crm": None})})
    beats(table, BEGUN_MS)
    assert lost(table) == {0: 580}


def test_events_after_the_start_are_missing() -> None:
    table = before()
    beats(table, BEGUN_MS)
    at_ms = BEGUN_MS + 20_000
    hear(table, accept(range(580, 600), stream="signups", minute=MINUTE + 2, at_ms=at_ms))
    hear(table, tell("expel", "welcome", "delivered", range(590, 600), destination="crm", at_ms=at_ms))
    assert lost(table) == {2: 10}


def test_what_ingest_reports_just_after_the_start_was_stored_before() -> None:
    table = Table(FLOW)
    beats(table, BEGUN_MS)
    hear(table, accept(range(10), stream="signups", minute=MINUTE + 2, at_ms=BEGUN_MS + 1000))
    assert lost(table) == {}


def test_a_destination_whose_lag_is_unknown_has_not_begun() -> None:
    table = Table(FLOW)
    hear(table, beat("expel", "welcome", "crm", at_ms=START_MS, behind_ms=None))
    hear(table, accept(range(10), stream="signups", at_ms=START_MS + 10_000))
    beats(table, BEGUN_MS)
    assert lost(table) == {}


def test_an_event_that_is_delivered_after_all_is_delivered() -> None:
    table = before()
    beats(table, BEGUN_MS)
    hear(table, tell("expel", "welcome", "delivered", range(580), destination="crm", at_ms=BEGUN_MS + 1000))
    assert table.row("welcome", MINUTE, FINAL_MS).steps[-1].outcomes["delivered"] == 580


@pytest.mark.parametrize("is_old", [False, True])
def test_a_start_survives_a_restart_of_the_observer(is_old: bool) -> None:
    """Also by a snapshot that has no starts: a destination that has reported anything has begun."""
    table, other = before(), Table(FLOW)
    beats(table, BEGUN_MS)
    state = FollowerState(PlannedWindows(), 0)
    if is_old:
        fields = [field.name for field in msgspec.structs.fields(SnapshotState)]
        old = msgspec.msgpack.decode(zstandard.decompress(dump_v1(table, state)))
        restore_v1(zstandard.compress(msgspec.msgpack.encode(old[: fields.index("begun")])), other)
    else:
        restore(dump(table, state), other)
    at_ms = BEGUN_MS + 20_000
    hear(other, accept(range(580, 600), stream="signups", minute=MINUTE + 2, at_ms=at_ms))
    assert lost(other) == {2: 20}


def test_only_what_a_transform_had_passed_on_was_before_the_start() -> None:
    table = Table(Flow({"welcome": PipeFlow(("signups",), True, {"crm": None}, late=frozenset({"crm"}))}))
    hear(table, accept(range(10), stream="signups"))
    hear(table, tell("transform", "welcome", "passed", range(4)))
    beats(table, BEGUN_MS)
    hear(table, tell("transform", "welcome", "passed", range(4, 10), at_ms=BEGUN_MS + 20_000))
    assert lost(table) == {0: 6}


def test_the_pipe_file_says_who_begins_late() -> None:
    hook = {"url": "http://127.0.0.1:9/"}
    crm, mail = {"name": "crm", "webhook": hook, "start": "latest"}, {"name": "mail", "webhook": hook}
    pipe = {"sources": ["signups"], "destinations": [crm, mail]}
    file = PipeFile.model_validate({"streams": {"signups": {}}, "pipes": {"welcome": pipe}})
    assert read_flow(file).pipes["welcome"].late == {"crm"}
