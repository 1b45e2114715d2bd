"""Checks of the autoscaler: it decides, the platform does what it asks, and its limits are wide enough."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from services.core.units import format_count
from services.fleet.doctor.checks.counters import RECENT_S, find_moves, format_span, log_command
from services.fleet.doctor.diagnosis import Finding, about
from services.fleet.doctor.facts import Facts, Instance

SILENT_S, REMOVED_S = 300.0, 86400.0
"""An autoscaler decides every 15 s. One that has been away for a day was removed on purpose."""
MANY_FAILURES = 3
MANY_DECISIONS, MOST_AT_MAX = 10, 0.8
_GROUP = re.compile(r"(?:.*-)?(ingest|expel|retrier)")
"""As the alert reads the name of a group."""


@dataclass(frozen=True, slots=True)
class _Group:
    """size: the ordered number of instances. failed: those that the autoscaler has given up waiting for, for a person."""

    name: str
    size: int
    starting: int
    failed: tuple[str, ...] = ()


def find_away(facts: Facts) -> Iterator[Finding]:
    """No autoscaler is in the list of processes, and the observer had its reports until a while ago.

    One in the list that does not answer is found with the other processes. An autoscaler without groups reports nothing.
    """
    newest = max((one.at_ms / 1000 for one in facts.observer.groups), default=0.0)
    if not facts.of("autoscaler") and SILENT_S < facts.now - newest < REMOVED_S:
        yield Finding(
            "The autoscaler has reported nothing for a while: every service and stream keeps its size.",
            [
                f"the observer has its last decision from {format_span(facts.now - newest)} ago",
                "the list has no autoscaler",
            ],
            "restart the autoscaler; its log or the platform's events say why it ended",
            about("autoscaler"),
        )


def find_failures(facts: Facts) -> Iterator[Finding]:
    """Requests to the platform, or looks at a stream, that fail again and again."""
    metrics: tuple[tuple[str, str, dict[str, str]], ...] = (
        ("penstock_autoscaler_group_failures_total", "group", {}),
        ("penstock_autoscaler_shard_decisions_total", "stream", {"decision": "failed"}),
    )
    events = ("group_not_reached", "freeze_unknown", "shards_failed")
    for metric, label, labels in metrics:
        counts: dict[str, tuple[int, Instance, list[str]]] = {}
        for one in find_moves(facts, metric, *events, **labels):
            name = one.labels[label]
            before = counts.get(name, (0, one.instance, []))[0]
            count = one.total if one.last == facts.now else one.count  # it fails now, and has failed before
            counts[name] = (before + (0 if one.is_old else count), one.instance, one.evidence)
        for name, (count, instance, evidence) in counts.items():
            if count >= MANY_FAILURES:
                yield Finding(
                    f"Requests of the autoscaler for {name} fail, so it keeps its size.",
                    evidence,
                    log_command(instance, "|".join(events)),
                    about(f"{label} {name}"),
                )


def find_full_streams(facts: Facts) -> Iterator[Finding]:
    """Streams that need more shards or partitions, which the autoscaler may not add."""
    for one, labels, before, value in facts.gauges("penstock_autoscaler_stream_refused"):
        name = labels["stream"]
        if not value or not before:
            continue
        lines = [
            line
            for line in one.lines
            if line.event in ("shards_decided", "partitions_decided", "update_refused")
            and line.fields.get("stream") == name
        ]
        yield Finding(
            f"{name} needs more shards or partitions, and the autoscaler may not add them.",
            [str(line.fields.get("reason") or line.text)[:300] for line in lines[-1:]]
            or [f"penstock_autoscaler_stream_refused of {one.name} is 1"],
            log_command(one, "(shards|partitions)_decided|update_refused"),
            about(f"stream {name}"),
        )


def find_full_groups(facts: Facts) -> Iterator[Finding]:
    """Groups that need more instances than their maximum: most decisions of ten minutes by its log, else the last one."""
    words = {one.group: one.words for one in facts.observer.groups if _is_fresh(facts, one.at_ms)}
    by_log: dict[str, list[str]] = {}
    for instance in facts.of("autoscaler"):
        for line in instance.lines:
            if line.event == "group_decision" and line.at > facts.now - RECENT_S:
                by_log.setdefault(str(line.fields.get("group")), []).append(str(line.fields.get("reason")))
    last = {one.group: one.reason for one in facts.observer.groups if _is_fresh(facts, one.at_ms)}
    for name in sorted(last.keys() | by_log.keys()):
        reasons = by_log.get(name, [])
        share = reasons.count("at_max") / len(reasons) if reasons else float(last.get(name) == "at_max")
        if share <= MOST_AT_MAX or 0 < len(reasons) < MANY_DECISIONS:
            continue
        known = (
            f"{reasons.count('at_max')} of its {len(reasons)} decisions of ten minutes" if reasons else "its last one"
        )
        yield Finding(
            f"{name} needs more instances than its maximum.",
            [*filter(None, [words.get(name, "")]), f"decisions of the autoscaler that say so: {known}"],
            "penstock scaling show   # a hot partition or failed instances? Else raise `max` of the group",
            about(f"group {name}"),
        )


def find_missing(facts: Facts) -> Iterator[Finding]:
    """Instances that the platform was asked to run, and that do not answer. One that was ordered lately may not be there yet: the
    autoscaler calls it failed after `failed_after`."""
    for group in _groups(facts):
        match = _GROUP.fullmatch(group.name)
        if match is None or not group.failed:
            continue
        every = facts.of(match[1])
        answering = sum(one.answers for one in every)
        missing = group.size - group.starting - answering
        if answering and missing > 0:
            silent = [one.name for one in every if not one.answers]
            yield Finding(
                f"{format_count(missing, 'instance')} of {group.name} are missing: of {group.size} ordered {answering} answer.",
                [*group.failed, f"{group.starting} more are starting"],
                "the platform's events: kubectl -n penstock get events --sort-by=.lastTimestamp | tail -20",
                about(match[1], *silent),
            )


def _groups(facts: Facts) -> list[_Group]:
    """As the observer heard of them; without its API as the autoscaler's metrics have them."""
    reports = [one for one in facts.observer.groups if _is_fresh(facts, one.at_ms)]
    if reports:
        return [_Group(one.group, one.size, one.starting, one.failed) for one in reports if not one.dry_run]
    found = []
    for _, labels, before, value in facts.gauges("penstock_autoscaler_group_instances"):
        name, size = labels["group"], int(min(value, value if before is None else before))
        starting, failed = (
            int(facts.total("penstock_autoscaler_group_members", group=name, state=state))
            for state in ("starting", "failed")
        )
        found.append(_Group(name, size, starting, (f"the autoscaler counts {failed} as failed",) if failed else ()))
    return found


def _is_fresh(facts: Facts, at_ms: int) -> bool:
    return facts.now - at_ms / 1000 <= SILENT_S
