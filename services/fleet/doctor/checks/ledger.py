"""Checks of the observer's own work: it speaks, its alarms arrive, it reads all reports and letters, minutes become final."""

from collections import defaultdict
from collections.abc import Iterator

from services.core.pipe_file.topic_names import lane_name
from services.core.units import format_count
from services.fleet.doctor.checks.counters import Moves, find_moves, log_command
from services.fleet.doctor.diagnosis import Finding, about
from services.fleet.doctor.facts import Facts, Instance

STARTING_S = 90.0
"""A younger observer may not have joined its group yet."""
CHANGE_S = 180.0
"""After the death of the observer that speaks, another one speaks within this time."""
MOST_OPEN, WATCHED_S = 10, 900.0
"""The metric counts the open ones of the last 15 minutes; the last two or three are open always."""
_FLOW = ("ingest", "transform", "expel", "retrier", "observer")
SHOWN = 5


def find_no_speaker(facts: Facts) -> Iterator[Finding]:
    """Observers answer, and none of them speaks: in both readings, and not because the speaker has just changed."""
    found = [entry for entry in facts.gauges("penstock_observer_speaks") if entry[0].service == "observer"]
    observers = [one for one, _, _, _ in found]
    if not found or any(before or value for _, _, before, value in found):
        return
    if any(facts.is_young(one, STARTING_S) or _stepped_down(facts, one) for one in observers):
        return
    said = [text for one in observers for text in one.said("speaker_unknown")]
    yield Finding(
        "No observer speaks: no alarm is sent, and no snapshot is written.",
        [f"penstock_observer_speaks is 0 in {', '.join(one.name for one in observers)}", *said[-1:]],
        log_command(observers[0], "speaker_unknown|stands_by"),
        about("observer"),
    )


def _stepped_down(facts: Facts, one: Instance) -> bool:
    return any(line.event == "stands_by" and line.at > facts.now - CHANGE_S for line in one.lines)


def find_unread_letters(facts: Facts) -> Iterator[Finding]:
    """Topics of dead letters that an observer cannot read."""
    topics: dict[str, Instance] = {}
    for one, labels, before, value in facts.gauges("penstock_observer_topic_up"):
        if not value and not before:
            topics.setdefault(labels["topic"], one)
    for topic, one in topics.items():
        yield Finding(
            f"The observer cannot read the dead letters of {topic}: its causes of failures are old.",
            [f"penstock_observer_topic_up of {one.name} is 0", *one.said("dead_letters_unreadable", topic=topic)],
            "penstock log verify" if facts.broker.is_log else log_command(one, "dead_letters_unreadable"),
            about("observer", f"topic {topic}"),
        )


def find_untold(facts: Facts) -> Iterator[Finding]:
    """Alarms that `alarm_url` did not accept, or that had no room in the queue."""
    moves = _newest(find_moves(facts, "penstock_ledger_alarms_untold_total", "alarm_not_sent"), "reason")
    for (reason,), one in moves.items():
        again = "they are sent again" if reason == "refused" else "they are only in its log"
        yield Finding(
            f"Alarms of the observer do not reach alarm_url ({reason}): {again}.",
            one.evidence,
            "curl -sv ALARM_URL -o /dev/null   # alarm_url in the observer's settings; does its receiver know alarm_secret?",
            about("alarms"),
            is_note=one.is_old,
        )


def find_gone_reports(facts: Facts) -> Iterator[Finding]:
    """Reports that retention deleted, or that were damaged, before the observer read them."""
    moves = find_moves(facts, "penstock_ledger_reports_gone_total", "reports_gone", "reports_damaged")
    for one in _newest(one for one in moves if one.instance.service == "observer").values():
        yield Finding(
            f"{format_count(one.total, 'report')} were gone before the observer read them: loss of that time may be false.",
            [one.when, *one.evidence[1:]],
            "penstock loss show PIPE   # then look for single events of that time: penstock event ID",
            about("reports"),
            is_note=one.is_old,
        )


def find_unjudged(facts: Facts) -> Iterator[Finding]:
    """Minutes that the observer forgot before their loss was known."""
    moves = find_moves(facts, "penstock_ledger_unjudged_minutes_total", "minute_unjudged")
    for (pipe, destination), one in _newest(moves, "pipe", "destination").items():
        lane = lane_name(pipe, destination) if destination else pipe
        yield Finding(
            f"Minutes of {lane} were forgotten before their loss was known: it was behind or silent for a day.",
            one.evidence,
            f"penstock group show {lane}   # then look for events of that time: penstock event ID"
            if destination
            else "penstock status   # then look for events of that time: penstock event ID",
            about(f"unjudged {lane}"),
            is_note=one.is_old,
        )


def find_open_minutes(facts: Facts) -> Iterator[Finding]:
    """Destinations of which most of the newest minutes are not final, where no pause and no open circuit breaker explains it."""
    lanes: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    for one, labels, before, value in facts.gauges("penstock_ledger_open_minutes"):
        if not facts.is_young(one, WATCHED_S):
            lanes[labels["pipe"], labels["destination"]].append(min(value, value if before is None else before))
    for (pipe, destination), counts in lanes.items():
        where = {"pipe": pipe, "destination": destination}
        if max(counts) <= MOST_OPEN or facts.observer.catching_up or pipe in facts.broker.pauses:
            continue
        if facts.total("penstock_transform_paused", pipe=pipe) or facts.total("penstock_expel_breaker_state", **where):
            continue
        lane = lane_name(pipe, destination)
        yield Finding(
            f"{max(counts):.0f} of the last 15 minutes of {lane} are not final: loss in them raises no alarm.",
            [*_reasons(facts, pipe)[:SHOWN], "its column `state` names the step that is behind or silent"],
            f"penstock loss show {pipe}",
            about(lane, f"pipe {pipe}", *_FLOW),
        )


def _reasons(facts: Facts, pipe: str) -> list[str]:
    """Why the observer does not call the pipe healthy."""
    found = [one.get("reasons") for one in facts.observer.pipes if one.get("pipe") == pipe]
    return [str(reason) for reasons in found if isinstance(reasons, list | tuple) for reason in reasons]


def find_drifts(facts: Facts) -> Iterator[Finding]:
    """Payload fields that have changed compared with the hour before: as the observer sees it now, else by its counter."""
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for pipe, text in facts.observer.drifts:
        texts[pipe].append(text)
    is_old = False
    if not facts.observer.pipes:
        for (pipe,), one in _newest(find_moves(facts, "penstock_ledger_drifts_total", "drift"), "pipe").items():
            texts[pipe], is_old = one.evidence, one.is_old
    for pipe, evidence in texts.items():
        yield Finding(
            f"Payload fields of {pipe} have changed. No event is lost.",
            evidence[:SHOWN],
            f"ask the sender of {pipe}'s events whether it is meant; after a deploy of its transform, compare the results",
            about(f"fields {pipe}"),
            is_note=is_old,
        )


def _newest(moves: Iterator[Moves], *labels: str) -> dict[tuple[str, ...], Moves]:
    """One for each value of these labels: several observers count the same. What is recent comes before what is old."""
    found: dict[tuple[str, ...], Moves] = {}
    for one in moves:
        key = tuple(one.labels[name] for name in labels)
        known = found.get(key)
        if known is None or (known.is_old, -known.count) > (one.is_old, -one.count):
            found[key] = one
    return found


def describe_reports(facts: Facts, node: str) -> list[str]:
    """What the processes of a node say about their own reports: one that writes none shows why the observer hears nothing."""
    found = {
        one.name: f"{one.name} answers, and has written {value:.0f} reports, "
        f"{grown:.0f} of them in the last {facts.seconds():.0f} s"
        for one, _, value, grown in facts.series("penstock_ledger_reports_total", node=node)
    }
    silent = [one.name for one in facts.of(node) if one.answers and one.name not in found]
    return [*found.values(), *(f"{name} answers, and has written no report: is `ledger` off?" for name in silent)]
