"""Checks of the events: refused at ingest, dead letters, events that wait without progress, loss."""

from collections import defaultdict
from collections.abc import Iterator

from services.core.pipe_file.topic_names import RETRIER_DEAD, RETRIER_GROUP, lane_name
from services.core.units import format_count
from services.fleet.doctor.checks.counters import format_span, log_command
from services.fleet.doctor.checks.ledger import describe_reports
from services.fleet.doctor.diagnosis import Finding, about
from services.fleet.doctor.facts import Facts

OLD_S = 300.0
STALLED_S = 60.0
"""A lane whose oldest event waits for so long, and whose position has not moved between the readings, makes no progress."""
_QUOTA = {
    "over-quota": "an API key sends more than its quota",
    "stream-full": "a stream's capacity is used up",
}
_OURS = ("broker-unavailable", "outcome-unknown", "stream-not-ready", "storage-full", "overloaded", "internal")
SHOWN = 5
STARTING_S = 90.0
"""A younger process may not have joined its groups yet."""
DUE_S = 180.0


def find_quota(facts: Facts) -> Iterator[Finding]:
    """Events that ingest refuses with 429."""
    for reason, what in _QUOTA.items():
        streams = _refused(facts, reason)
        total = facts.total("penstock_ingest_requests_refused_total", reason=reason)
        grown = sum(streams.values()) + facts.growth("penstock_ingest_requests_refused_total", reason=reason)
        if not grown:
            continue
        names = ", ".join(streams) or "requests as a whole"
        keys = "" if facts.state is None or facts.state.keys is None else f" --keys {facts.state.keys}"
        first = f"penstock keys list{keys}" if reason == "over-quota" else "penstock status"
        yield Finding(
            f"Ingest refuses events with 429: {what}.",
            [
                f"{grown:.0f} refused in {facts.seconds():.0f} s ({reason}), of {names}",
                f"{total:.0f} whole requests refused since the start of ingest",
            ],
            f"{first}   # then raise the quota, or ask the sender to send less",
            about("quota"),
        )


_WITHOUT = {
    "id": "such an event gets a new id, so a repeated one is another event",
    "key": "such an event has no key, and so no order",
    "time": "such an event gets the time of its arrival",
}


def find_absent_fields(facts: Facts) -> Iterator[Finding]:
    """Fields for the id, key or time of a stream that events lacked since the start of ingest. A note where some have it."""
    for name, stream in facts.pipes.streams.items() if facts.pipes is not None else ():
        events = facts.total("penstock_ingest_events_accepted_total", stream=name)
        events += facts.total("penstock_ingest_events_refused_total", stream=name)
        for use, place in (("id", stream.id), ("key", stream.key), ("time", stream.time)):
            absent = facts.total("penstock_ingest_fields_absent_total", stream=name, use=use)
            if isinstance(place, str) and absent:
                who = "No event" if absent >= events else "Not every event"
                yield Finding(
                    f"{who} of {name} has the field {place}, which the pipe file names for its {use}.",
                    [f"absent in {absent:.0f} of {events:.0f} since the start of ingest: {_WITHOUT[use]}"],
                    f"correct `{use}` of {name} in the pipe file, or ask the sender for the field",
                    about(f"fields {name}"),
                    is_note=absent < events,
                )


def find_refused(facts: Facts) -> Iterator[Finding]:
    """Events that ingest refuses because of us: statuses 5xx."""
    for reason in _OURS:
        streams = _refused(facts, reason)
        requests = facts.growth("penstock_ingest_requests_refused_total", reason=reason)
        if not sum(streams.values()) + requests:
            continue
        yield Finding(
            f"Ingest refuses events: {reason}.",
            [
                f"{name}: {format_count(int(count), 'event')} in {facts.seconds():.0f} s"
                for name, count in streams.items()
            ],
            "penstock status"
            if reason != "overloaded"
            else "penstock status   # then more processes: penstock up --ingest",
            about("ingest"),
            runbook="PenstockIngestRefuses" if reason in ("overloaded", "internal") else "",
        )


def _refused(facts: Facts, reason: str) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for _, labels, _, grown in facts.series("penstock_ingest_events_refused_total", reason=reason):
        if grown:
            found[labels["stream"]] += grown
    return found


def find_letters(facts: Facts) -> Iterator[Finding]:
    """Dead letters of the last quarter of an hour that nobody has redriven or discarded yet."""
    for one in facts.broker.letters:
        if one.node == "transform":
            continue  # `poison` has them
        lane = f"{one.pipe}/{one.destination}"
        yield Finding(
            f"{format_count(one.count, 'new dead letter')} of {lane}: {one.reason}.",
            [f"in {one.topic} within 15 minutes, not redriven", f"e.g. {one.example}: {one.detail[:300]}"],
            f"penstock dead list --pipe {one.pipe} --destination {one.destination} --reason {one.reason} --since 15m"
            if one.topic != RETRIER_DEAD
            else "penstock dead list --since 15m",
            about(lane, "retrier") if one.topic == RETRIER_DEAD else about(lane),
            runbook="PenstockRetrierDeadLettersGrow" if one.topic == RETRIER_DEAD else "",
            past_at=one.newest_at,
        )


def find_unclaimed(facts: Facts) -> Iterator[Finding]:
    """Events that wait for destinations which the pipe file no longer has."""
    for metric in ("penstock_expel_events_unclaimed_total", "penstock_retrier_events_unclaimed_total"):
        if count := facts.total(metric):
            yield Finding(
                f"{format_count(int(count), 'event')} wait for a destination that the pipe file no longer has.",
                [metric],
                "penstock check   # it names the destination; then decide under `removed` in the pipe file",
            )


def find_unreported(facts: Facts) -> Iterator[Finding]:
    """Reports to the observer that the broker does not store: no offset is committed until it does."""
    found: defaultdict[str, float] = defaultdict(float)
    for _, labels, _, grown in facts.series("penstock_ledger_report_failures_total"):
        if grown:
            found[labels["node"]] += grown
    for node, count in found.items():
        yield Finding(
            f"The reports of {node} are not stored, so it commits nothing.",
            [f"{count:.0f} failures in {facts.seconds():.0f} s"],
            "penstock log verify" if facts.broker.is_log else "the broker's log; the topic penstock.telemetry",
            about(node),
        )


def find_lanes_down(facts: Facts) -> Iterator[Finding]:
    """Lanes that do not deliver, and are not paused."""
    for one, labels, value, _ in facts.series("penstock_expel_lane_up"):
        lane = f"{labels['pipe']}/{labels['destination']}"
        others = facts.total("penstock_expel_lane_up", pipe=labels["pipe"], destination=labels["destination"])
        if not value and not others and lane not in facts.broker.pauses and one.answer != "not ready":
            yield Finding(
                f"{lane} does not deliver: its lane is down.",
                [f"penstock_expel_lane_up of {one.name} is 0"],
                f"penstock group show {lane}",
                about(lane, "expel"),
            )


def find_unserved(facts: Facts) -> Iterator[Finding]:
    """Pipes with destinations of which no expel has a lane, though one answers that it is ready."""
    expels = [one for one in facts.of("expel") if (one.second or one.first) is not None]
    if facts.pipes is None or not expels or any(one.answer != "ready" for one in facts.of("expel")):
        return
    if any(facts.is_young(one, STARTING_S) for one in expels):
        return
    served = {labels["pipe"] for _, labels, _, _ in facts.series("penstock_expel_lane_up")}
    for name, pipe in facts.pipes.pipes.items():
        if pipe.destinations and name not in served:
            lanes = [lane_name(name, destination.name) for destination in pipe.destinations]
            others = f"it has lanes of {', '.join(sorted(served))}" if served else "it has no lane at all"
            yield Finding(
                f"No expel delivers to the destinations of {name}.",
                [f"{', '.join(one.name for one in expels)} is ready, and {others}"],
                "compare the pipe file of expel with this one, and its `serve` (PENSTOCK_EXPEL_SERVE); then restart expel",
                about(f"pipe {name}", "expel", *lanes),
            )


def find_retrier_down(facts: Facts) -> Iterator[Finding]:
    """No retrier reads, in both readings. Every service has the metric."""
    found = [entry for entry in facts.gauges("penstock_retrier_up") if entry[0].service == "retrier"]
    retriers = [one for one, _, _, _ in found]
    if not found or any(before or value for _, _, before, value in found):
        return
    if any(facts.is_young(one, STARTING_S) for one in retriers):
        return
    errors = [line.text[:300] for one in retriers for line in one.lines if line.level in ("warning", "error")]
    yield Finding(
        "No retrier reads: events that wait for another attempt wait longer. None is lost.",
        [
            *(f"{one.name}: {one.reason or 'it says that it is ready'}" for one in retriers),
            *(f"its log: {text}" for text in errors[-2:]),
        ],
        log_command(retriers[0], "warning|error|critical"),
        about("retrier", RETRIER_GROUP, *(one.name for one in retriers)),
    )


def find_retrier_stuck(facts: Facts) -> Iterator[Finding]:
    """The first event that a retrier has read ahead is overdue, in both readings."""
    if not sum(value for one, _, value, _ in facts.series("penstock_retrier_up") if one.service == "retrier"):
        return
    for one, _, before, value in facts.gauges("penstock_retrier_next_due_timestamp_seconds"):
        late = facts.now + (one.skew or 0.0) - value
        if one.service != "retrier" or not value or not before or late <= DUE_S:
            continue
        released = facts.growth("penstock_retrier_events_released_total", one)
        failures = facts.growth("penstock_retrier_move_failures_total", one)
        yield Finding(
            f"The retrier gives events back too late: the first has been due for {format_span(late)}.",
            [
                f"{released:.0f} given back, and {failures:.0f} failed appends, in {facts.seconds():.0f} s ({one.name})",
                *one.said("move_failed"),
            ],
            f"{log_command(one, 'move_failed')}   # no such line: restart {one.name}, nothing is lost",
            about("retrier", RETRIER_GROUP, one.name),
        )


def find_stalled(facts: Facts) -> Iterator[Finding]:
    """Groups behind which events wait, and whose position does not move."""
    broker = facts.broker
    for group, topic in broker.lags:
        later, lane = broker.later.get((group, topic)), facts.lane_of(group)
        if later is None or lane in broker.pauses or topic.startswith("penstock.") or topic.endswith(".retry"):
            continue
        # By `millis`, which is also known where a topic keeps only the writer's time. It alone proves no long wait there.
        waiting = [number for number, lag in later.items() if lag.records and lag.millis > STALLED_S * 1000]
        before, after = broker.positions.get((group, topic), {}), broker.positions_later.get((group, topic), {})
        stuck = [number for number in waiting if before.get(number) == after.get(number)]
        if stuck and len(stuck) == len(waiting):
            records = sum(later[number].records for number in stuck)
            yield Finding(
                f"{lane} makes no progress: {format_count(records, 'event')} of {topic} wait for it.",
                [f"its position in partitions {', '.join(map(str, stuck[:SHOWN]))} has not moved for 5 s"],
                f"penstock group show {lane}",
                about(lane, "expel"),
            )
        elif waiting and max(_age_s(facts, later[number].stored) for number in waiting) > OLD_S:
            yield Finding(
                f"{lane} is behind: its oldest event of {topic} has waited for more than five minutes.",
                [f"{format_count(sum(lags.records for lags in later.values()), 'event')} wait; it makes progress"],
                "penstock status",
                about(lane, "expel"),
                runbook="PenstockLagOld",
            )


def _age_s(facts: Facts, stored: int | None) -> float:
    return 0.0 if stored is None else facts.now - stored / 1000


def find_observer(facts: Facts) -> Iterator[Finding]:
    """The observer does not answer, or cannot read the reports: nobody knows about loss, and no alarm is sent."""
    found = facts.observer
    if found.problem and not facts.stopped:
        yield Finding(
            "The observer's API does not answer: loss is not known, and no alarm is sent.",
            [found.problem, "deliveries continue without it; it reads the reports when it is back"],
            "penstock status",
            about("observer"),
        )
    elif found.behind:
        yield Finding(
            f"The observer cannot read the reports: {found.behind}.",
            [f"http://{found.address}/v1/pipes"],
            "tail -50 data/logs/observer-1.log",
            about("observer"),
        )


def find_loss(facts: Facts) -> Iterator[Finding]:
    """Pipes that the observer judges as unstable."""
    for one in facts.observer.pipes:
        pipe, reasons = str(one.get("pipe")), [str(reason) for reason in _list(one.get("reasons"))]
        if one.get("health") != "unstable":
            continue
        lost = [reason for reason in reasons if "missing" in reason]
        silent = [reason for reason in reasons if reason.endswith(" is silent")]
        nodes = [word for word in ("ingest", "transform", "expel", "retrier") if word in " ".join(silent or reasons)]
        if lost:
            yield Finding(
                f"Events of {pipe} are missing: {lost[0]}.",
                [*reasons, *(["the observer is still reading older reports"] if facts.observer.catching_up else [])],
                f"penstock loss show {pipe}",
                about(f"pipe {pipe}"),
            )
        elif silent:
            yield Finding(
                f"The observer hears nothing of a step of {pipe}, so its loss is not known: {'; '.join(silent)}.",
                [text for node in nodes for text in describe_reports(facts, node)],
                "penstock status   # the process of that step: does it run, with `ledger` on?",
                about(f"pipe {pipe}", *nodes),
                runbook="PenstockTelemetrySilent",
            )
        else:
            yield Finding(
                f"{pipe} is unstable: {'; '.join(reasons)}.",
                [f"http://{facts.observer.address}/v1/pipes/{pipe}/health"],
                "penstock status",
                about(f"pipe {pipe}", *nodes),
                runbook="PenstockPipeUnstable",
            )


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def find_edited(facts: Facts) -> Iterator[Finding]:
    """Files that were edited after the start: the fleet runs on its snapshot of the earlier ones."""
    if facts.changed and not facts.stopped:
        # `penstock check` knows the networks of a fleet that runs.
        first = (
            "with the --allow-networks of penstock up; then start it" if facts.has_ended else "then restart the fleet"
        )
        yield Finding(
            "The fleet does not run with the present configuration files: they were changed after its start.",
            [*facts.changed, *(f"a mistake: {text}" for text in facts.mistakes[:SHOWN])],
            f"penstock check   # {first} to use the files, or undo the edit",
        )
