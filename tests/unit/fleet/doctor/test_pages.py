"""Each page of docs/runbooks is some check's, and the checks of counters, limits and the observer: what they find, and when they
are silent."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.fleet.doctor.facts import Endpoint, Facts
from tests.unit.fleet.doctor.fleet_changes import (
    Change,
    add_autoscaler,
    add_expel,
    all_of,
    broken,
    counted,
    decisions,
    deliver,
    drift,
    due,
    elsewhere,
    fail_everywhere,
    lose_schema_store,
    reports,
    silent,
    starts,
    unserve,
    unserve_unready,
)
from tests.unit.fleet.doctor.fleet_facts import (
    BILLING,
    LANE,
    NOW,
    OTHER_LANE,
    count,
    instance,
    make_instance,
)

REPOSITORY = Path(__file__).parents[4]
UNSEEN = {
    "PenstockWatchdog": "it fires always; when it does not, Prometheus or Alertmanager is gone, and the doctor asks neither",
}
"""Pages that no check names, each with the reason."""


def named_pages() -> Iterator[str]:
    """The pages in the code of the checks: string constants, not words of a comment or a docstring."""
    for path in (REPOSITORY / "services" / "fleet" / "doctor" / "checks").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("Penstock"):
                yield node.value


def test_every_page_is_that_of_a_check() -> None:
    """Broken: a page says `penstock doctor` first, and the doctor looks at nothing of what it is about."""
    pages = {path.stem for path in (REPOSITORY / "docs" / "runbooks").glob("Penstock*.md")}
    named = set(named_pages())
    assert named - pages == set()
    assert pages - named == UNSEEN.keys()


GROUP = {"group": "expel", "what": "look", "reason": "Refused"}
TOKEN = "penstock_expel_token_requests_total"
REFUSED_TOKEN = {**LANE, "outcome": "invalid_client"}
UNTOLD, GONE = "penstock_ledger_alarms_untold_total", "penstock_ledger_reports_gone_total"
UNJUDGED, FAILURES = "penstock_ledger_unjudged_minutes_total", "penstock_autoscaler_group_failures_total"
QUERY, LARGE = "penstock_transform_query_failures_total", {"pipe": "large"}
STREAM = {"stream": "orders"}
BEHIND, REBUILT = "penstock_table_behind_seconds", "penstock_table_rebuilds_total"
CUT, SLOW = "penstock_table_connections_cut_off_total", {"reason": "slow_client"}
FAULTS: tuple[tuple[str, Change, str, str], ...] = (
    ("AutoscalerDown", reports(at_ms=int((NOW - 1800) * 1000)), "autoscaler-away", "30 minutes ago"),
    (
        "AutoscalerFails",
        counted(
            "autoscaler", FAILURES, GROUP, 9, 9, event="group_not_reached", age=60, times=4, group="expel", what="look"
        ),
        "autoscaler-fails",
        "4 within ten minutes, the last 60 s ago",
    ),
    ("AutoscalerAtLimit", decisions("at_max", 20), "groups-at-limit", "20 of its 20 decisions"),
    (
        "AutoscalerAtLimit",
        reports(reason="at_max", words="lag, but 4 are the most"),
        "groups-at-limit",
        "but 4 are the most",
    ),
    (
        "StreamAtLimit",
        counted(
            *("autoscaler", "penstock_autoscaler_stream_refused", STREAM, 1, 1),
            event="shards_decided",
            age=90,
            reason="hot key: 62 %",
            stream="orders",
        ),
        "streams-at-limit",
        "hot key: 62 %",
    ),
    (
        "InstancesMissing",
        reports(size=3, failed=("2 that never appeared",)),
        "instances-missing",
        "2 that never appeared",
    ),
    (
        "TokenRefused",
        counted(
            "expel", TOKEN, REFUSED_TOKEN, 4, 4, event="token_server_failed", age=40, lane="shop/crm", detail="expired"
        ),
        "tokens-refused",
        "invalid_client 4",
    ),
    (
        "SecretExpires",
        counted(
            "expel",
            "penstock_secret_expiry_timestamp_seconds",
            {"name": "shop/crm", "key": "secret"},
            NOW + 9e5,
            NOW + 9e5,
        ),
        "secret-expires",
        "(# expires)",
    ),
    ("EveryDestinationDown", fail_everywhere("dns", LANE, OTHER_LANE, BILLING), "every-receiver", "shop/crm: dns"),
    ("PipeUnserved", unserve, "pipe-unserved", "it has lanes of shop"),
    ("RetrierNotUp", counted("retrier", "penstock_retrier_up", {}, 0, 0), "retrier-down", "it says that it is ready"),
    ("RetrierStuck", due(400), "retrier-stuck", "0 given back"),
    (
        "SchemasDamaged",
        counted("ingest", "penstock_registry_objects_damaged", {}, 0, 1),
        "schemas-damaged",
        "nothing can be registered",
    ),
    ("SchemaStoreAway", lose_schema_store, "schema-store-away", "AccessDenied"),
    (
        "TableOld",
        counted("transform", "penstock_transform_table_age_seconds", {"table": "rates"}, 401, 406),
        "table-old",
        "it is read every 60 s",
    ),
    ("StreamTableStuck", counted("ingest", BEHIND, STREAM, 75, 80), "table-behind", "0 records read in 5 s"),
    (
        "StreamTableBehind",
        all_of(
            counted("ingest", BEHIND, STREAM, 75, 80),
            counted("ingest", "penstock_table_records_total", STREAM, 100, 900),
        ),
        "table-behind",
        "800 records read in 5 s",
    ),
    (
        "StreamTableRebuilt",
        counted(
            "ingest",
            REBUILT,
            {**STREAM, "reason": "damaged_file"},
            1,
            1,
            event="table_rebuilt",
            age=60,
            stream="orders",
        ),
        "table-rebuilt",
        "the last 60 s ago",
    ),
    ("StreamTableClientsCut", counted("ingest", CUT, SLOW, 10, 30), "table-clients-cut", "in 5 s"),
    (
        "TransformFails",
        counted(
            "transform", QUERY, LARGE, 2, 2, event="query_failed", age=30, times=2, error="no such column", **LARGE
        ),
        "transform-fails",
        "no such column",
    ),
    ("Drift", drift, "drift", "missing in 40 %"),
    (
        "AlarmsUntold",
        counted("observer", UNTOLD, {"reason": "refused"}, 1, 1, event="alarm_not_sent", age=60, error="status 401"),
        "alarms-untold",
        "status 401",
    ),
    (
        "ReportsGone",
        counted("observer", GONE, {}, 50, 50, event="reports_gone", age=60),
        "reports-gone",
        "the last 60 s ago",
    ),
    (
        "MinutesUnjudged",
        counted(
            "observer", UNJUDGED, LANE, 3, 3, event="minute_unjudged", age=60, times=3, pipe="shop", destination="crm"
        ),
        "minutes-unjudged",
        "3 within ten minutes",
    ),
    ("MinutesStayOpen", counted("observer", "penstock_ledger_open_minutes", LANE, 14, 14), "minutes-open", "`state`"),
    ("NobodySpeaks", counted("observer", "penstock_observer_speaks", {}, 0, 0), "nobody-speaks", "observer-1"),
    (
        "LettersUnread",
        counted("observer", "penstock_observer_topic_up", {"topic": "shop.dead"}, 0, 0),
        "letters-unread",
        "is 0",
    ),
    (
        "BrokerAccessRefused",
        counted(
            *("expel", "penstock_broker_access_refused_total", {}, 4, 5),
            event="kafka_access_refused",
            age=30,
            problem="Kafka at k:9093 does not accept user ann. Try: compare sasl",
        ),
        "access-refused",
        "does not accept user ann",
    ),
    ("TelemetrySilent", silent, "loss", "written 40 reports, 0 of them in the last 5 s"),
)


@pytest.mark.parametrize(
    ("page", "change", "check", "words"), FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_fault(page: str, change: Change, check: str, words: str) -> None:
    """Broken: the engineer runs the doctor as the page says, and it finds nothing, names another page, or has no figures."""
    found = broken(change)
    assert [cause.check.name for cause in found.causes] == [check]
    cause = found.causes[0]
    assert cause.runbook == f"Penstock{page}"
    assert words in " ".join(cause.finding.evidence)
    assert cause.finding.first
    assert found.status == 1


def start_elsewhere(facts: Facts) -> None:
    elsewhere(counted("retrier", "penstock_retrier_up", {}, 0, 0))(facts)
    count(instance(facts, "retrier"), "process_start_time_seconds", {}, NOW + 3, NOW + 3)


def begin_again(ended: int) -> Change:
    """A batch that ended so many processes."""
    event = "batch_begun_before_and_not_done"
    return counted("transform", QUERY, LARGE, 0, 0, event=event, age=30, batch=6, ended_processes=ended, pipe="large")


HARMLESS: tuple[tuple[str, Change], ...] = (
    ("an autoscaler that has just decided", reports(at_ms=int((NOW - 100) * 1000))),
    ("an autoscaler that was removed two days ago", reports(at_ms=int((NOW - 2 * 86400) * 1000))),
    (
        "two failures of the autoscaler",
        counted("autoscaler", FAILURES, GROUP, 9, 9, event="group_not_reached", age=60, times=2),
    ),
    (
        "failures of an hour ago",
        counted("autoscaler", FAILURES, GROUP, 9, 9, event="group_not_reached", age=3600, times=9),
    ),
    ("three decisions at the limit", decisions("at_max", 3)),
    ("decisions below the limit", all_of(decisions("steady", 20), reports(reason="at_max"))),
    (
        "a stream that was refused once",
        counted("autoscaler", "penstock_autoscaler_stream_refused", STREAM, 0, 1),
    ),
    ("instances that were ordered lately", reports(size=3, starting=1)),
    ("a failed instance that was replaced", all_of(add_expel, reports(size=2, failed=("i-1: no CPU figure",)))),
    (
        "a token after a failure",
        all_of(counted("expel", TOKEN, {**LANE, "outcome": "ok"}, 3, 4), counted("expel", TOKEN, REFUSED_TOKEN, 4, 5)),
    ),
    (
        "a token server that answers again",
        all_of(
            counted("expel", TOKEN, REFUSED_TOKEN, 4, 4, event="token_server_answers_again", age=40, lane="shop/crm"),
            lambda facts: count(instance(facts, "expel"), TOKEN, {**LANE, "outcome": "ok"}, 2, 2),
        ),
    ),
    ("an expel that starts", starts("expel", unserve)),
    ("a retrier that joins its group", starts("retrier", counted("retrier", "penstock_retrier_up", {}, 0, 0))),
    ("a retrier elsewhere that starts, on a clock ahead of ours", start_elsewhere),
    ("a transform that ended one process", begin_again(1)),
    ("a retrier that came up meanwhile", counted("retrier", "penstock_retrier_up", {}, 0, 1)),
    ("an event that is due soon", due(-60)),
    (
        "a table that was late once",
        counted("transform", "penstock_transform_table_age_seconds", {"table": "rates"}, 300, 305),
    ),
    ("a table that is a moment behind", counted("ingest", BEHIND, STREAM, 20, 25)),
    ("a slow client", counted("ingest", CUT, SLOW, 1, 2)),
    ("a query that failed once", counted("transform", QUERY, LARGE, 1, 1, event="query_failed", age=30, **LARGE)),
    (
        "queries that failed an hour ago",
        counted("transform", QUERY, LARGE, 8, 8, event="query_failed", age=3600, times=8, **LARGE),
    ),
    (
        "an alarm of an hour ago",
        counted("observer", UNTOLD, {"reason": "refused"}, 1, 1, event="alarm_not_sent", age=3600),
    ),
    (
        "minutes of another lane",
        counted("observer", UNJUDGED, LANE, 3, 3, event="minute_unjudged", age=60, pipe="large"),
    ),
    (
        "open minutes after a restart",
        starts("observer", counted("observer", "penstock_ledger_open_minutes", LANE, 14, 14), 200),
    ),
    (
        "a change of the speaker",
        counted("observer", "penstock_observer_speaks", {}, 0, 0, event="stands_by", age=30),
    ),
    ("an observer that starts", starts("observer", counted("observer", "penstock_observer_speaks", {}, 0, 0))),
    ("letters unread for a moment", counted("observer", "penstock_observer_topic_up", {"topic": "shop.dead"}, 1, 0)),
    ("an observer that has just stepped down", counted("observer", "penstock_observer_speaks", {}, 1, 0)),
    ("a retrier that has just left its group", counted("retrier", "penstock_retrier_up", {}, 1, 0)),
    ("an autoscaler that cannot reach the observer", all_of(add_autoscaler, reports(at_ms=int((NOW - 1800) * 1000)))),
    ("reports of another service", counted("expel", GONE, {}, 5, 6)),
    (
        "a login that Kafka accepts again",
        counted(*("expel", "penstock_broker_access_refused_total", {}, 4, 4), event="kafka_access_accepted", age=30),
    ),
)


@pytest.mark.parametrize(("name", "change"), HARMLESS, ids=lambda value: value if isinstance(value, str) else "")
def test_no_fault(name: str, change: Change) -> None:
    """Broken: the doctor names what is over, what starts, or what is as it should be, and nobody reads it."""
    found = broken(change)
    assert (found.causes, found.notes, found.unknown) == ([], [], []), name


def test_counters_of_a_fleet_elsewhere() -> None:
    """Broken: without its logs a fault of last week is a cause, and one of this moment is none."""
    old = broken(elsewhere(counted("observer", UNJUDGED, LANE, 3, 3)))
    assert (old.status, [note.check.name for note in old.notes]) == (0, ["minutes-unjudged"])
    now = broken(elsewhere(counted("observer", UNJUDGED, LANE, 3, 4)))
    assert [cause.check.name for cause in now.causes] == ["minutes-unjudged"]
    assert "1 in 5 s" in now.causes[0].finding.evidence[0]

    def stand_by(facts: Facts) -> None:  # both count, and the one that was started first shows an old figure
        other = make_instance("observer")
        other.name = "observer-0"
        facts.instances.insert(0, other)
        count(other, UNJUDGED, LANE, 90, 90)

    two = broken(elsewhere(all_of(counted("observer", UNJUDGED, LANE, 3, 4), stand_by)))
    assert [cause.check.name for cause in two.causes] == ["minutes-unjudged"]

    def start_lately(facts: Facts) -> None:
        elsewhere(counted("observer", GONE, {}, 50, 50))(facts)
        count(instance(facts, "observer"), "process_start_time_seconds", {}, NOW - 240, NOW - 240)

    young = broken(start_lately)
    assert [cause.check.name for cause in young.causes] == ["reports-gone"]
    assert "since its start 4 minutes ago" in young.causes[0].finding.evidence[0]
    assert broken(elsewhere(lambda _: None)).status == 0


def test_a_batch_that_ends_processes() -> None:
    """Broken: events that end Java look like none; or one kill of the transform looks like such an event."""
    (cause,) = broken(begin_again(2)).causes
    assert (cause.check.name, cause.finding.what) == (
        "transform-poison",
        "The transform of large meets events that it cannot process.",
    )


def test_one_of_two_that_reports_nothing() -> None:
    """Broken: the one process whose ledger is off is not named, because another one's name begins as its own."""

    def rename(facts: Facts) -> None:
        silent(facts)
        add_expel(facts)
        facts.of("expel")[1].name = "expel"

    evidence = broken(rename).causes[0].finding.evidence
    assert "expel answers, and has written no report: is `ledger` off?" in evidence


def test_a_query_that_has_recovered_is_a_note() -> None:
    """Broken: an outage of the broker that is over is the first cause for ten minutes."""
    found = broken(counted("transform", QUERY, LARGE, 3, 3, event="query_failed", age=400, times=3, pipe="large"))
    assert (found.status, [note.check.name for note in found.notes]) == (0, ["transform-fails"])


def test_every_destination_or_one() -> None:
    """Broken: a fault of our network is so many faults of receivers; or a destination that delivers is overlooked."""
    found = broken(fail_everywhere("connection", LANE, OTHER_LANE))
    assert [cause.check.name for cause in found.causes] == ["every-receiver"]
    assert {one.check.name for one in found.causes[0].symptoms} == {"receivers-fail"}
    assert len(found.causes[0].symptoms) == 2
    assert "Ask their owners" in broken(fail_everywhere("http_503", LANE, OTHER_LANE)).causes[0].finding.first
    one_delivers = broken(all_of(fail_everywhere("connection", LANE, OTHER_LANE), deliver))
    assert {cause.check.name for cause in one_delivers.causes} == {"receivers-fail"}
    assert {cause.check.name for cause in broken(fail_everywhere("connection", LANE)).causes} == {"receivers-fail"}

    def come_back(facts: Facts) -> None:
        for lane in (LANE, OTHER_LANE):
            count(instance(facts, "expel"), "penstock_expel_breaker_state", lane, 2.0, 2.0)
            labels = {**lane, "outcome": "connection"}
            count(instance(facts, "expel"), "penstock_expel_attempts_total", labels, 9.0, 9.0)
        facts.endpoints = (Endpoint("https://example.org", ("shop/crm", "shop/erp")),)

    assert broken(come_back).causes == []


def test_consequences_of_known_causes() -> None:
    """Broken: a broker that is gone, or a dead service, is one of ten equal lines since the doctor has more checks."""

    def lose_broker(facts: Facts) -> None:
        facts.broker.problem = "no answer"
        for service, metric, labels in (
            ("retrier", "penstock_retrier_up", {}),
            ("observer", "penstock_observer_speaks", {}),
            ("observer", "penstock_observer_topic_up", {"topic": "shop.dead"}),
        ):
            count(instance(facts, service), metric, labels, 0, 0)
        count(instance(facts, "observer"), "penstock_ledger_open_minutes", LANE, 14, 14)
        due(900)(facts)
        unserve(facts)

    found = broken(lose_broker)
    assert [cause.check.name for cause in found.causes] == ["broker-gone"]
    known = {"retrier-down", "nobody-speaks", "letters-unread", "minutes-open", "pipe-unserved"}
    assert known <= {one.check.name for one in found.causes[0].symptoms}

    found = broken(
        all_of(counted("expel", TOKEN, REFUSED_TOKEN, 4, 5), fail_everywhere("no_token", LANE, OTHER_LANE))
    )  # one has a cause of its own, so it is not the network
    assert [cause.check.name for cause in found.causes] == ["tokens-refused", "receivers-fail"]
    assert [one.check.name for one in found.causes[0].symptoms] == ["receivers-fail"]

    def kill_autoscaler(facts: Facts) -> None:
        one = add_autoscaler(facts)
        one.answer, one.reason, one.status, one.first, one.second = (
            "refused",
            "nobody listens there",
            "gone",
            None,
            None,
        )
        reports(at_ms=int((NOW - 1800) * 1000))(facts)

    found = broken(kill_autoscaler)
    assert [(cause.check.name, cause.runbook) for cause in found.causes] == [
        ("processes-dead", "PenstockAutoscalerDown")
    ]
    assert broken(unserve_unready).causes[0].check.name == "processes-not-ready"
