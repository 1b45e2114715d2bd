"""What `penstock doctor` names first, for each kind of fault; the facts are made here."""

import pytest

from services.core.broker.contract import Lag
from services.core.broker.record import TopicPartition
from services.core.control.pauses import Pause
from services.core.control.transform_marks import TransformMark
from services.core.pipe_file.pipes import PipeFile
from services.core.process.scrape import Sample
from services.fleet.doctor.checks.broker import find_gone, find_missing_topics, find_throttled
from services.fleet.doctor.checks.counters import format_span
from services.fleet.doctor.diagnosis import Diagnosis
from services.fleet.doctor.facts import Certificate, Checkpoint, Disk, Endpoint, Facts, FileFault, Letters, LogLine
from tests.unit.fleet.doctor.fleet_changes import Change, broken, counted
from tests.unit.fleet.doctor.fleet_facts import (
    DATA,
    LANE,
    NOW,
    OTHER_LANE,
    count,
    healthy,
    instance,
    line,
    make_instance,
    raw,
)

DAY_S = 86400.0


def first_of(found: Diagnosis) -> str:
    assert found.causes, found
    return found.causes[0].check.name


def symptoms_of(found: Diagnosis) -> set[str]:
    return {one.check.name for one in found.causes[0].symptoms}


def test_nothing_is_wrong() -> None:
    """Broken: the doctor finds something at every fleet, and nobody reads it."""
    found = broken()
    assert (found.causes, found.notes, found.unknown, found.status) == ([], [], [], 0)


def dead(service: str) -> Change:
    def kill(facts: Facts) -> None:
        one = instance(facts, service)
        one.answer, one.reason, one.status, one.pid = "refused", "nobody listens there", "gone", None
        one.first = one.second = None

    return kill


def hung(service: str) -> Change:
    def stop(facts: Facts) -> None:
        one = instance(facts, service)
        one.answer, one.reason, one.status = "silent", "no answer", "stopped"
        one.first = one.second = None

    return stop


def looping(service: str) -> Change:
    def loop(facts: Facts) -> None:
        one = instance(facts, service)
        one.restarts, one.restarts_later, one.age = 7, 8, 1.0
        one.answer, one.reason = "refused", "nobody listens there"
        one.lines = (line("failed", "error", error="no such thing"),)
        one.first = one.second = None

    return loop


@pytest.mark.parametrize("service", ["observer", "retrier", "expel", "transform", "ingest"])
def test_a_service_that_is_dead_hung_or_dying(service: str) -> None:
    """Broken: a service does not work, and its consequences are named instead of it, or not which way it fails."""
    for breaks, check in ((dead, "processes-dead"), (hung, "processes-hung"), (looping, "crash-loops")):
        found = broken(breaks(service))
        assert first_of(found) == check
        assert f"{service}-1" in found.causes[0].finding.what
        assert len(found.causes) == 1
        assert found.status == 1
    assert "no such thing" in " ".join(found.causes[0].finding.evidence)


def test_a_dead_expel_explains_waiting_events() -> None:
    """Broken: the engineer looks at lanes that wait, while their process is dead."""

    def wait(facts: Facts) -> None:
        stored = int((NOW - 4000) * 1000)
        facts.broker.lags["shop.crm", "orders"] = facts.broker.later["shop.crm", "orders"] = {
            0: Lag(50, 4_000_000, stored)
        }

    found = broken(wait)
    assert first_of(found) == "stalled"
    assert "50 events" in found.causes[0].finding.what
    found = broken(wait, dead("expel"))
    assert (first_of(found), symptoms_of(found), len(found.causes)) == ("processes-dead", {"stalled"}, 1)


def test_a_lane_that_does_not_move_in_a_topic_with_the_writers_time() -> None:
    """Broken: in topics of others no stalled lane is found. Or an old event that has just come is called a long wait."""

    def wait(facts: Facts) -> None:
        facts.broker.lags["shop.crm", "orders"] = facts.broker.later["shop.crm", "orders"] = {0: Lag(50, 4_000_000)}

    def move(facts: Facts) -> None:
        wait(facts)
        before = facts.broker.positions.get(("shop.crm", "orders"), {}).get(0, 0)
        facts.broker.positions_later["shop.crm", "orders"] = {0: before + 10}

    assert first_of(broken(wait)) == "stalled"
    assert not broken(move).causes

    def add_another(facts: Facts) -> None:
        other = make_instance("expel")
        other.name = "expel-2"
        facts.instances.append(other)

    found = broken(wait, add_another, dead("expel"))
    assert [cause.check.name for cause in found.causes] == ["processes-dead", "stalled"]  # expel-2 could deliver


def test_a_process_that_lives_longer_than_its_last_runs_does_not_die_again_and_again() -> None:
    """Broken: a crash of an hour ago is the first cause of tonight's page."""

    def restart(age: float) -> Change:
        def change(facts: Facts) -> None:
            one = instance(facts, "expel")
            one.restarts = one.restarts_later = 5
            one.age = age
            one.lines = tuple(line("started", "info", NOW - age - 50 * number) for number in (3, 2, 1, 0))

        return change

    assert first_of(broken(restart(60.0))) == "crash-loops"
    found = broken(restart(200.0))
    assert (found.status, [note.check.name for note in found.notes]) == (0, ["processes-restarted"])
    assert broken(restart(7200.0)).notes == []


def test_a_wrong_configuration() -> None:
    """Broken: a wrong deploy looks like a crash."""

    def misconfigure(facts: Facts) -> None:
        looping("expel")(facts)
        instance(facts, "expel").lines = (raw("error: pipes.yaml:7: webhook.url: private addresses are refused"),)

    found = broken(misconfigure)
    assert (first_of(found), symptoms_of(found)) == ("configuration", {"crash-loops"})
    assert "pipes.yaml:7" in found.causes[0].finding.evidence[0]


def test_versions_differ() -> None:
    """Broken: half of a deploy is taken for a whole one."""

    def upgrade(facts: Facts) -> None:
        one = instance(facts, "expel")
        one.second = Sample(5.0)
        one.second.values["penstock_build_info", frozenset({"service": "expel", "version": "2"}.items())] = 1.0

    found = broken(upgrade)
    assert first_of(found) == "versions"
    assert "2: expel-1" in found.causes[0].finding.evidence


def test_edited_files() -> None:
    """Broken: an edit that never took effect is searched for in the services."""

    def edit(facts: Facts) -> None:
        facts.changed = ("diff data/snapshot/0-pipes.yaml pipes.yaml: the first difference is in line 3",)

    found = broken(edit)
    assert first_of(found) == "edited"
    assert (
        found.causes[0].finding.first == "penstock check   # then restart the fleet to use the files, or undo the edit"
    )
    assert first_of(broken(edit, dead("expel"))) == "processes-dead"  # the fleet runs on its snapshot


def test_a_start_is_no_fault() -> None:
    """Broken: the doctor is red after every `penstock up`; or green where a process never becomes ready, or died."""

    def at_age(service: str, age: float, reason: str, restarts: int = 0) -> list[str]:
        def start(facts: Facts) -> None:
            one = instance(facts, service)
            one.answer, one.reason, one.age, one.restarts_later = "not ready", reason, age, restarts
            if service == "transform":
                count(one, "penstock_transform_query_up", {"pipe": "large"}, 0.0, 0.0)

        return [cause.check.name for cause in broken(start).causes]

    assert at_age("transform", 150.0, "large: starting (a trial run)") == []
    assert at_age("expel", 10.0, "no answer of the broker yet") == []
    assert at_age("expel", 60.0, "no answer of the broker yet") == ["processes-not-ready"]
    assert at_age("transform", 60.0, "large: no such checkpoint") == ["checkpoint"]
    assert at_age("transform", 300.0, "large: starting") == ["transform-down"]
    assert at_age("transform", 20.0, "large: starting", restarts=1) == ["processes-not-ready"]


def test_the_broker_is_gone() -> None:
    """Broken: a dead broker is one of ten equal lines."""

    def remove(facts: Facts) -> None:
        facts.broker.problem = "the folder of the embedded log is not there"
        for one in facts.instances:
            one.answer, one.reason = "not ready", "the broker cannot be opened: it is away"
        count(instance(facts, "expel"), "penstock_expel_lane_up", LANE, 0.0, 0.0)
        facts.observer.problem = "no answer"

    found = broken(remove)
    assert (first_of(found), len(found.causes)) == ("broker-gone", 1)
    assert {"processes-not-ready", "observer-away"} <= symptoms_of(found)


def test_a_full_disk() -> None:
    """Broken: a full disk looks like a broker's fault, or like five services' faults."""

    def fill(facts: Facts) -> None:
        facts.disks = (Disk(DATA, 0, 1_000_000_000, 100, read_only=False),)
        facts.broker.problem = "the disk is full"
        labels = {"stream": "orders", "reason": "storage-full"}
        count(instance(facts, "ingest"), "penstock_ingest_events_refused_total", labels, 0.0, 10.0)

    found = broken(fill)
    assert (first_of(found), len(found.causes)) == ("disk-full", 1)
    assert {"broker-gone", "ingest-refuses"} <= symptoms_of(found)

    def use_up_quota(facts: Facts) -> None:  # df shows room
        instance(facts, "ingest").answer = "not ready"
        instance(facts, "ingest").reason = "the broker cannot store events of orders: StorageFull: the disk is full"

    assert first_of(broken(use_up_quota)) == "disk-full"

    def nearly(facts: Facts) -> None:
        facts.disks = (Disk(DATA, 900_000_000, 100_000_000_000, 100, read_only=False),)

    assert first_of(broken(nearly)) == "disk-nearly-full"


def test_a_wrong_clock() -> None:
    """Broken: a clock that is an hour ahead is not seen, or seen as loss."""

    def set_ahead(facts: Facts) -> None:
        instance(facts, "ingest").skew = 3600.0

    found = broken(set_ahead)
    assert first_of(found) == "clock"
    assert "ingest-1" in found.causes[0].finding.what
    assert "3,600 s ahead" in found.causes[0].finding.evidence[0]

    def set_ours_behind(facts: Facts) -> None:
        for one in facts.instances:
            one.skew = 3600.0

    assert "this machine" in broken(set_ours_behind).causes[0].finding.what

    def store_in_future(facts: Facts) -> None:
        facts.broker.newest["orders"] = int((NOW + 600) * 1000)

    assert first_of(broken(store_in_future)) == "clock"

    def look_slowly(facts: Facts) -> None:
        store_in_future(facts)
        facts.broker.newest_at = NOW + 601

    assert not broken(look_slowly).causes


def fail_attempts(facts: Facts) -> None:
    expel = instance(facts, "expel")
    count(expel, "penstock_expel_breaker_state", LANE, 2.0, 2.0)
    count(expel, "penstock_expel_attempts_total", {**LANE, "outcome": "tls"}, 10.0, 12.0)
    count(expel, "penstock_expel_attempts_total", {**OTHER_LANE, "outcome": "delivered"}, 10.0, 12.0)


def test_a_receiver_is_down() -> None:
    """Broken: the wrong destination is blamed, or the events that wait are blamed."""

    def refuse(facts: Facts) -> None:
        fail_attempts(facts)
        facts.endpoints = (Endpoint("https://crm.example.org", ("shop/crm",), "Connection refused"),)
        letter = Letters("shop.dead", "shop", "crm", "expel", "window_over", "", 3, "shop.dead:0:1", NOW)
        facts.broker.letters = (letter,)

    found = broken(refuse)
    assert (first_of(found), symptoms_of(found), len(found.causes)) == ("receivers-fail", {"dead-letters"}, 1)
    assert "shop/crm" in found.causes[0].finding.what


def test_events_that_wait_for_a_round_are_not_behind() -> None:
    """Broken: the number of events behind a receiver that is down is not that of `penstock status`."""

    def fail(facts: Facts) -> None:
        count(instance(facts, "expel"), "penstock_expel_attempts_total", {**LANE, "outcome": "http_503"}, 1.0, 9.0)
        for topic, records in (("orders", 491), ("shop.retry", 88)):
            facts.broker.lags["shop.crm", topic] = facts.broker.later["shop.crm", topic] = {0: Lag(records, 1)}

    found = broken(fail)
    assert first_of(found) == "receivers-fail"
    assert any(line.startswith("491 events not settled, beside") for line in found.causes[0].finding.evidence)


def test_a_broker_that_only_destinations_name() -> None:
    """Broken: the Kafka of one receiver is down, and the doctor says that the fleet's own broker is; or sends a person to the log
    of expel."""

    def refuse(facts: Facts) -> None:
        assert facts.pipes is not None
        file = facts.pipes.model_dump(exclude_unset=True)
        file["brokers"] = {"msk": "kafka://b-1.example.org:9098,b-2.example.org:9098?security=/etc/kafka.yaml"}
        file["pipes"]["shop"]["destinations"][0] = {"name": "crm", "topic": {"name": "crm.in", "on": "msk"}}
        facts.pipes = PipeFile.model_validate(file)
        facts.broker.silent = {"msk": "no node answers"}
        facts.broker.lags["shop.crm", "orders"] = facts.broker.later["shop.crm", "orders"] = {0: Lag(5, 1)}
        labels = {**LANE, "outcome": "unavailable"}
        count(instance(facts, "expel"), "penstock_expel_attempts_total", labels, 1.0, 9.0)

    found = broken(refuse)
    assert (first_of(found), len(found.causes)) == ("broker-silent", 1)
    assert "receivers-fail" in symptoms_of(found)
    assert "nc -vz b-1.example.org 9098" in found.causes[0].finding.first

    def wait(facts: Facts) -> None:
        refuse(facts)
        for one in facts.instances:
            one.answer, one.reason = (
                "not ready",
                "the broker cannot be opened: broker msk of the pipe file: no node answers",
            )

    assert first_of(broken(wait)) == "broker-silent"


def test_a_receiver_that_is_back() -> None:
    """Broken: a destination that recovers by itself sends a person to its owner; or one that still fails looks well."""

    def recover(reason: str) -> Change:
        def change(facts: Facts) -> None:
            expel = instance(facts, "expel")
            count(expel, "penstock_expel_breaker_state", LANE, 2.0, 2.0)
            count(expel, "penstock_expel_attempts_total", {**LANE, "outcome": reason}, 12.0, 12.0)
            facts.endpoints = (Endpoint("https://crm.example.org", ("shop/crm",)),)
            expel.lines = (LogLine(NOW, "warning", "breaker_open", "", {"lane": "shop/crm", "reason": reason}),)

        return change

    found = broken(recover("connection"))
    assert (found.status, [note.check.name for note in found.notes]) == (0, ["receivers-fail"])
    assert "accepts connections again" in found.notes[0].finding.what
    assert first_of(broken(recover("http_503"))) == "receivers-fail"
    assert (
        "does not answer in time" in broken(recover("timeout")).causes[0].finding.what
    )  # it accepts connections all the time


@pytest.mark.parametrize(
    ("outcome", "words"), [("http_429", "throttles us"), ("http_401", "our credential"), ("timeout", "not answer")]
)
def test_the_way_in_which_a_receiver_fails(outcome: str, words: str) -> None:
    """Broken: a quota, a rejected credential and an outage at the receiver read alike."""
    fail = counted("expel", "penstock_expel_attempts_total", {**LANE, "outcome": outcome}, 1.0, 9.0)
    assert words in broken(fail).causes[0].finding.what


def test_an_expired_certificate() -> None:
    """Broken: an expired certificate looks like a receiver that is down."""

    def expire(facts: Facts) -> None:
        fail_attempts(facts)
        until = Certificate("the certificate of https://crm.example.org", NOW - 3 * DAY_S, ("shop/crm",))
        facts.endpoints = (Endpoint("https://crm.example.org", ("shop/crm",), "", until),)

    found = broken(expire)
    assert (first_of(found), symptoms_of(found)) == ("certificate-expired", {"receivers-fail"})
    assert "3 days ago" in found.causes[0].finding.what

    def end_soon(facts: Facts) -> None:
        facts.certificates = (Certificate("our client certificate", NOW + 3 * DAY_S, ("shop/crm",), DATA / "own.pem"),)

    assert first_of(broken(end_soon)) == "certificate-expires"


def test_an_expired_login() -> None:
    """Broken: the certificate with which we reach Kafka expires, and the doctor names a broker, or receivers, or nothing."""

    def expire(facts: Facts) -> None:
        facts.certificates = (Certificate("our client certificate for Kafka (tls)", NOW - DAY_S, (), DATA / "own.pem"),)
        facts.broker.problem = "Kafka at k:9093 does not accept our client certificate"
        fail_attempts(facts)

    found = broken(expire)
    assert (first_of(found), found.causes[0].runbook) == ("login-expired", "PenstockCertificateExpired")
    assert {"broker-gone", "receivers-fail"} <= symptoms_of(found)

    def show_soon(facts: Facts) -> None:  # a fleet elsewhere: only its services know the file
        facts.data = None
        labels = {"name": "kafka", "key": "tls.certificate"}
        count(
            instance(facts, "expel"), "penstock_certificate_expiry_timestamp_seconds", labels, NOW + DAY_S, NOW + DAY_S
        )

    soon = broken(show_soon)
    assert first_of(soon) == "certificate-expires"
    assert "tls.certificate in the file of ?security=" in soon.causes[0].finding.first


@pytest.mark.parametrize(
    ("name", "life", "left", "said"),
    [
        ("shop/crm", 30 * DAY_S, 20 * DAY_S, "The secret of shop/crm (auth) expires in 20 days."),
        ("shop/crm", 30 * DAY_S, 22 * DAY_S, ""),
        ("shop/crm", 30 * DAY_S, -DAY_S, "The secret of shop/crm (auth) expired 24 hours ago, by its date."),
        ("ingest", 365 * DAY_S, 20 * DAY_S, "The API key auth expires in 20 days."),
        ("ingest", DAY_S, 9000.0, ""),
        ("ingest", DAY_S, 8000.0, "The API key auth expires in 2 hours."),
    ],
)
def test_a_secret_with_a_date(name: str, life: float, left: float, said: str) -> None:
    """Broken: a secret expires without a word, or an API key that lives for a day counts as a fault from its first hour."""
    ages = [
        counted("expel", f"penstock_secret_{word}_timestamp_seconds", {"name": name, "key": "auth"}, value)
        for word, value in (("written", NOW + left - life), ("expiry", NOW + left))
    ]
    found = broken(*ages)
    assert [cause.finding.what for cause in found.causes] == ([said] if said else [])


def test_a_secret_without_a_date() -> None:
    """Broken: nobody sees that a secret is years old; or each secret without a date is a fault."""
    metric = "penstock_secret_written_timestamp_seconds"
    found = broken(
        *(
            counted("expel", metric, {"name": lane, "key": "secret"}, NOW - days * DAY_S)
            for lane, days in (("shop/crm", 500), ("shop/erp", 300))
        )
    )
    assert not found.causes
    assert [note.finding.what for note in found.notes] == [
        "The secret of shop/crm (secret) was not changed for 500 days, and has no date."
    ]


@pytest.mark.parametrize(
    ("life", "left", "first"),
    [
        (365 * DAY_S, 20 * DAY_S, "token-expires"),
        (365 * DAY_S, 22 * DAY_S, ""),
        (DAY_S, 8000.0, "token-expires"),
        (DAY_S, 9000.0, ""),
        (DAY_S, -7200.0, "token-expired"),
    ],
)
def test_a_token_with_an_end(life: float, left: float, first: str) -> None:
    """Broken: a token of an hour that is renewed every time counts as a fault, or one of a year ends without a word."""

    def age(facts: Facts) -> None:
        labels = {"name": "shop/crm", "key": "auth.bearer"}
        for word, value in (("issued", NOW + left - life), ("expiry", NOW + left)):
            count(instance(facts, "expel"), f"penstock_token_{word}_timestamp_seconds", labels, value, value)
        if left < 0:
            fail_attempts(facts)

    found = broken(age)
    if not first:
        assert not found.causes
        return
    assert first_of(found) == first
    assert symptoms_of(found) == ({"receivers-fail"} if left < 0 else set())
    assert ("2 hours" in found.causes[0].finding.what) == (life == DAY_S)


def test_a_secret_that_cannot_be_read() -> None:
    """Broken: a file with the wrong mode is found by reading four logs."""

    def expose(facts: Facts) -> None:
        parts = frozenset({"shop/crm", "expel"})
        problem = "it can be read by everybody. Try: chmod 600 /srv/crm.secret"
        facts.files = (FileFault("the signing secret of shop/crm", "/srv/crm.secret", problem, parts),)

    found = broken(expose)
    assert first_of(found) == "secrets"
    assert "chmod 600" in found.causes[0].finding.first

    def damage(facts: Facts) -> None:
        facts.files = (FileFault("the API keys of ingest", "/srv/keys.yaml", "not valid YAML", frozenset({"ingest"})),)

    assert "last good content" in broken(damage).causes[0].finding.first, "who changes the mode loses time"
    assert first_of(broken(counted("ingest", "penstock_ingest_keys_age_seconds", {}, 90.0, 95.0))) == "secrets"


def test_a_quota() -> None:
    """Broken: senders that are refused by their own quota look like a fault of ours, or like nothing."""
    labels = {"stream": "orders", "reason": "over-quota"}
    found = broken(counted("ingest", "penstock_ingest_events_refused_total", labels, 10.0, 40.0))
    assert (first_of(found), found.causes[0].runbook) == ("quota", "PenstockClientsRefused")


def test_a_misspelt_field_of_a_stream() -> None:
    """Broken: events whose id the pipe file misspells get new ids, and no tool says so; or it warns where one event has it."""

    def misspell(facts: Facts, absent: float) -> None:
        facts.pipes = PipeFile.model_validate({"streams": {"orders": {"id": "nummer"}}, "pipes": {}})
        count(instance(facts, "ingest"), "penstock_ingest_events_accepted_total", {"stream": "orders"}, 50.0, 50.0)
        labels = {"stream": "orders", "use": "id"}
        count(instance(facts, "ingest"), "penstock_ingest_fields_absent_total", labels, absent, absent)

    found = broken(lambda facts: misspell(facts, 50.0))
    assert (first_of(found), found.causes[0].runbook) == ("fields-absent", "PenstockDrift")
    assert "No event of orders has the field nummer" in found.causes[0].finding.what
    some = broken(lambda facts: misspell(facts, 49.0))
    assert (some.causes, [one.finding.evidence[0][:16] for one in some.notes]) == ([], ["absent in 49 of "])


def test_a_quota_of_kafka() -> None:
    """Broken: services that must wait for a quota look as if each had a fault of its own."""

    def silence(facts: Facts) -> None:
        count(instance(facts, "ingest"), "penstock_broker_quota_wait_seconds_total", {}, 10.0, 14.0)
        facts.observer.problem = "Kafka node 1 asked for 9.0 s of silence"

    found = broken(silence)
    assert (first_of(found), found.causes[0].runbook) == ("throttled", "PenstockBrokerQuota")


def test_a_checkpoint_that_makes_the_process_die() -> None:
    """Broken: between two starts nobody answers, and a checkpoint that cannot be used looks like a process that dies."""

    def fail(facts: Facts) -> None:
        one = instance(facts, "transform")
        one.answer, one.restarts, one.restarts_later = "refused", 4, 5
        error = "CheckpointDamaged: checkpoint /srv/data/checkpoints/large: offsets/73 is gone"
        one.lines = (LogLine(NOW - 5, "error", "query_failed", "", {"pipe": "large", "error": error}),)
        facts.checkpoints = (Checkpoint("large", DATA / "checkpoints" / "large", NOW - DAY_S),)

    def start_again(facts: Facts) -> None:
        fail(facts)
        one = instance(facts, "transform")
        one.answer, one.reason = "not ready", "large: starting"

    assert first_of(broken(start_again)) == "checkpoint"
    found = broken(fail)
    assert first_of(found) == "checkpoint"
    assert "offsets/73 is gone" in found.causes[0].finding.evidence[0]


def test_a_lost_checkpoint() -> None:
    """Broken: the transform is started again without its checkpoint, and sends a week of events twice."""

    def remove(facts: Facts) -> None:
        facts.broker.ends["large.out"] = 500
        facts.checkpoints = (Checkpoint("large", DATA / "checkpoints" / "large", None),)
        down(facts, "large: checkpoint /srv/data/checkpoints/large is damaged: penstock.json is missing")

    found = broken(remove)
    assert (first_of(found), symptoms_of(found)) == ("checkpoint", {"transform-down", "processes-not-ready"})

    def delete(facts: Facts) -> None:  # the query has not noticed it
        facts.broker.ends["large.out"] = 500
        facts.checkpoints = (Checkpoint("large", DATA / "checkpoints" / "large", None),)

    assert first_of(broken(delete)) == "checkpoint"

    def reset(facts: Facts) -> None:  # an operator did, and the transform has not begun since
        delete(facts)
        facts.broker.marks = {"large": TransformMark("reset", "0123", "ann", int(NOW - DAY_S) * 1000)}

    assert broken(reset).status == 0

    def lose(facts: Facts) -> None:  # before its first result, and on the disk is no trace of it
        facts.broker.marks = {"large": TransformMark("begun", "0123", "transform", int(NOW - DAY_S) * 1000)}
        delete(facts)
        facts.broker.ends.clear()

    assert "with checkpoint 0123" in broken(lose).causes[0].finding.evidence[0]

    def make_anew(is_reset: bool) -> Change:
        def change(facts: Facts) -> None:
            facts.broker.ends["large.out"] = 500
            path = DATA / "checkpoints" / "large"
            facts.checkpoints = (Checkpoint("large", path, NOW - 60, NOW - 9 * DAY_S, is_reset=is_reset),)

        return change

    assert first_of(broken(make_anew(is_reset=False))) == "checkpoint"
    assert broken(make_anew(is_reset=True)).status == 0  # an operator asked for it

    def begin_late(facts: Facts) -> None:  # a first start failed, and had made the topics
        facts.broker.ends["large.out"] = 500
        facts.checkpoints = (Checkpoint("large", DATA / "checkpoints" / "large", NOW - 60, NOW - 59),)

    assert broken(begin_late).status == 0

    def begin(facts: Facts) -> None:  # a new pipe has neither
        facts.checkpoints = (Checkpoint("large", DATA / "checkpoints" / "large", None),)

    assert broken(begin).status == 0


def test_errors_of_an_earlier_process() -> None:
    """Broken: a service that is not ready is explained by the errors of the process before it."""

    def wait(facts: Facts) -> None:
        one = instance(facts, "expel")
        one.answer, one.reason = "not ready", "the broker answers slowly"
        one.lines = (
            LogLine(NOW - 60, "error", "failed", "former: another pipe failed"),
            LogLine(0.0, "", "", "OSError: of the former process"),
            LogLine(NOW - 20, "info", "started", "started"),
            LogLine(NOW - 10, "error", "slow", "present: the broker was slow"),
        )

    evidence = " ".join(text for cause in broken(wait).causes for text in cause.finding.evidence)
    assert "present" in evidence
    assert "former" not in evidence


def down(facts: Facts, reason: str) -> None:
    one = instance(facts, "transform")
    one.answer, one.reason = "not ready", reason
    count(one, "penstock_transform_query_up", {"pipe": "large"}, 0.0, 0.0)
    count(one, "penstock_transform_query_failures_total", {"pipe": "large"}, 3.0, 4.0)


def test_poisoned_events() -> None:
    """Broken: a transform that fails on some events looks like one that is down."""

    def poison(facts: Facts) -> None:
        down(facts, "large: a batch has made no progress for 300 s")
        letter = Letters("large.dead", "large", "", "transform", "transform_error", "1/0", 7, "large.dead:0:3", NOW)
        facts.broker.letters = (letter,)

    found = broken(poison)
    assert (first_of(found), len(found.causes)) == ("transform-poison", 1)
    assert "large.dead:0:3" in found.causes[0].finding.evidence[0]


def test_dead_letters_explain_nothing_elsewhere() -> None:
    """Broken: an old dead letter is the first cause, and explains a process that was killed, and dead letters of other pipes."""
    letters = tuple(
        Letters(f"{pipe}.dead", pipe, "", "transform", reason, "1/0", 1, f"{pipe}.dead:0:3", at)
        for pipe, reason, at in (("per-city", "late", NOW - 700), ("large", "transform_error", NOW - 650))
    )

    def start_again(facts: Facts) -> None:
        one = instance(facts, "transform")
        one.answer, one.reason, one.age, one.restarts, one.restarts_later = "not ready", "starting", 20.0, 1, 1
        facts.broker.letters = letters

    def wait(facts: Facts) -> None:
        start_again(facts)
        one = instance(facts, "transform")
        one.reason = "large: starting"
        one.lines = (LogLine(NOW - 600, "warning", "batch_in_parts", "batch_in_parts", {"pipe": "large"}),)

    for change in (start_again, wait):
        found = broken(change)
        names = [cause.check.name for cause in found.causes]
        assert names == ["processes-not-ready", "transform-poison", "transform-poison"]
        assert not any(cause.symptoms for cause in found.causes)
        assert found.causes[2].finding.what == "The transform of per-city meets events that are behind its watermark."


def test_of_the_past_the_newest_is_first() -> None:
    """Broken: who is called because of new dead letters reads first of those that a colleague knows already."""

    def write(facts: Facts) -> None:
        facts.broker.letters = (
            Letters("large.dead", "large", "", "transform", "transform_error", "1/0", 70, "large.dead:0:3", NOW - 800),
            Letters("shop.dead", "shop", "crm", "expel", "http_400", "", 1, "shop.dead:0:1", NOW - 20),
            Letters("per-city.dead", "per-city", "", "transform", "late", "", 1, "per-city.dead:0:3", NOW - 90),
        )
        one = instance(facts, "transform")
        one.lines = (LogLine(NOW - 10, "warning", "batch_in_parts", "batch_in_parts", {"pipe": "large"}),)

    found = broken(write)
    assert [min(cause.finding.about) for cause in found.causes] == ["dead large/", "shop/crm", "dead per-city/"]


def test_a_transform_that_reads_nothing() -> None:
    """Broken: a query that is up and stuck looks healthy."""
    stick = counted("transform", "penstock_transform_events_read_total", {"pipe": "large"}, 100.0)
    assert first_of(broken(stick)) == "transform-stuck"
    labels = {"pipe": "large", "mode": "real-time", "why": ""}
    real_time = counted("transform", "penstock_transform_mode", labels, 1.0)  # it counts every 15 s
    assert broken(stick, real_time).status == 0

    def say(facts: Facts) -> None:
        instance(facts, "transform").unhealthy = "large: batch 7 has made no progress for 900 s"

    assert first_of(broken(say, stick)) == "processes-hung"


def test_pauses() -> None:
    """Broken: a forgotten pause is not named, or a pause of an hour counts as a fault."""

    def pause(age_s: float, reason: str = "operator") -> Change:
        def change(facts: Facts) -> None:
            at = int((NOW - age_s) * 1000)
            facts.broker.pauses = {"shop/crm": Pause("paused", reason, "ann", at, "an outage")}
            fail_attempts(facts)

        return change

    found = broken(pause(3600.0))
    assert (found.status, [note.check.name for note in found.notes]) == (0, ["paused"])
    found = broken(pause(5 * DAY_S))
    assert first_of(found) == "paused"
    assert "by ann" in found.causes[0].finding.what
    assert first_of(broken(pause(60.0, "410"))) == "receiver-gone"


def test_records_that_are_gone_or_soon_will_be() -> None:
    """Broken: a partition that waits for a person waits unseen, or retention deletes unread events unannounced."""

    def lose(facts: Facts) -> None:
        facts.broker.gaps["shop.crm", TopicPartition("orders", 2)] = 10, 50

    found = broken(lose)
    assert first_of(found) == "records-missing"
    assert "partition 2: reads 10, stored from 50" in found.causes[0].finding.evidence

    def age(facts: Facts) -> None:  # retention 7 d; the log keeps unread records for 14
        stored = int((NOW - 13 * DAY_S) * 1000)
        facts.broker.lags["shop.crm", "orders"] = {0: Lag(5, int(13 * DAY_S * 1000), stored)}
        facts.broker.later["shop.crm", "orders"] = {0: Lag(5, int(13 * DAY_S * 1000), stored)}

    found = broken(age)
    assert (first_of(found), symptoms_of(found)) == ("stalled", {"retention"})


def test_loss_and_the_observer() -> None:
    """Broken: loss is not named, or an observer that is away."""

    def lose(facts: Facts) -> None:
        reasons = ["7 of 100 events are missing in 2 minutes"]
        facts.observer.pipes = ({"pipe": "shop", "health": "unstable", "reasons": reasons},)

    found = broken(lose)
    assert (first_of(found), "7 of 100" in found.causes[0].finding.what) == ("loss", True)

    def leave(facts: Facts) -> None:
        facts.observer.problem = "connection refused"

    assert first_of(broken(leave)) == "observer-away"
    found = broken(leave, dead("observer"))
    assert (first_of(found), symptoms_of(found)) == ("processes-dead", {"observer-away"})


def test_a_fleet_that_does_not_run() -> None:
    """Broken: after the supervisor's death five services are named, and not the supervisor."""

    def kill_all(facts: Facts) -> None:
        assert facts.supervisor is not None
        facts.supervisor.status = "gone"
        for one in facts.instances:
            dead(one.service)(facts)
        facts.observer.problem = "connection refused"

    found = broken(kill_all)
    assert (first_of(found), len(found.causes)) == ("fleet-down", 1)

    def stop(facts: Facts) -> None:
        facts.state, facts.stopped, facts.instances, facts.supervisor = None, True, [], None

    found = broken(stop)
    assert (first_of(found), len(found.causes)) == ("fleet-down", 1)

    def stop_later(facts: Facts) -> None:
        stop(facts)
        facts.broker.letters = (Letters("shop.dead", "shop", "crm", "expel", "http_400", "", 3, "shop.dead:0:1", NOW),)

    found = broken(stop_later)  # a stopped fleet gives no event up: these were refused before
    assert [cause.check.name for cause in found.causes] == ["fleet-down", "dead-letters"]

    def misspell(facts: Facts) -> None:
        stop(facts)
        facts.mistakes = ("pipes.yaml:3: sources: there is no stream ordrs",)

    found = broken(misspell)
    assert (first_of(found), symptoms_of(found)) == ("configuration", {"fleet-down"})


def test_a_list_of_processes_without_a_service() -> None:
    """Broken: a service that Kubernetes does not start at all is missed."""

    def remove(facts: Facts) -> None:
        facts.instances = [one for one in facts.instances if one.service != "expel"]

    assert "expel" in broken(remove).causes[0].finding.what

    def remove_observer(facts: Facts) -> None:
        facts.instances = [one for one in facts.instances if one.service != "observer"]
        facts.observer.address, facts.observer.pipes = "", ()  # the address of an observer elsewhere need not be known
        count(instance(facts, "ingest"), "penstock_fleet_expected", {"service": "observer", "pipe": ""}, 1, 1)

    assert "observer" in broken(remove_observer).causes[0].finding.what

    expect_registry = counted("ingest", "penstock_fleet_expected", {"service": "registry", "pipe": ""}, 1)
    assert "registry" in broken(expect_registry).causes[0].finding.what

    def compact(facts: Facts) -> None:
        assert facts.pipes is not None
        streams = {name: one.model_copy(update={"compact": True}) for name, one in facts.pipes.streams.items()}
        facts.pipes = facts.pipes.model_copy(update={"streams": streams})

    assert "table" in broken(compact).causes[0].finding.what


def test_commands_at_a_broker_with_a_prefix() -> None:
    """Broken: the doctor's command asks for a stream, or connects to a port, that is not there."""
    facts = healthy()
    facts.broker.url = "kinesis://eu-west-1?prefix=acme."
    count(instance(facts, "ingest"), "penstock_broker_shard_throttles_total", {"topic": "orders", "shard": "1"}, 1, 9)
    [throttled] = find_throttled(facts)
    assert throttled.first == "aws kinesis describe-stream-summary --stream-name acme.orders"
    facts.broker.url, facts.broker.problem, facts.broker.missing = (
        "kafka://h:9092?prefix=acme.",
        "no answer",
        ("orders",),
    )
    [gone], [missing] = find_gone(facts), find_missing_topics(facts)
    assert gone.first == "nc -vz h 9092"
    assert "--broker 'kafka://h:9092?prefix=acme.'" in missing.first


def test_a_span_for_a_person() -> None:
    """Broken: somebody reads of 1 minutes, of 0 minutes, or counts days in hours."""
    assert [format_span(seconds) for seconds in (0.4, 61, 119, 120, 7199, 7200, 172_800)] == [
        *("0 s", "61 s", "119 s", "2 minutes", "120 minutes", "2 hours", "2 days"),
    ]
