"""Checks of the transforms: lost or damaged checkpoints, events that they cannot process, queries that do not run."""

from collections import defaultdict
from collections.abc import Iterator

from services.core.pipe_file.topic_names import output_topic
from services.core.times import format_time
from services.core.units import format_count
from services.fleet.doctor.checks.counters import Moves, find_moves, format_span, log_command
from services.fleet.doctor.diagnosis import Finding, about
from services.fleet.doctor.facts import Checkpoint, Facts, Instance, LogLine

_CHECKPOINT_WORDS = ("checkpoint", "penstock.json")
STUCK_RECORDS = 1
FIRST_START_S = 240.0
"""`penstock up` waits so long for a start, unless `ready_within` says otherwise."""
REAL_TIME_S = 20.0
"""In real-time mode a transform counts what it read, and moves its position, every 15 s. Closer readings show nothing."""
NEW_S = 3600.0
FAILED_S = 120.0
MANY_FAILURES = 2
OLD_REFRESHES, OLD_S = 5, 60.0
"""A table is too old after so many of its refreshes, and so many seconds more."""
ENDED = "batch_begun_before_and_not_done"
"""The log event of a batch whose process ended before the batch was done."""
LATE = "late"
"""The reason of a dead letter that was behind the watermark."""
STARTING = "starting"
"""How /readyz begins to speak of a query that has not failed in this process yet."""


def find_checkpoints(facts: Facts) -> Iterator[Finding]:
    """A checkpoint that is damaged, or gone although the transform has written results."""
    failed = dict(_failures(facts))
    said = failed | {
        pipe: text for pipe, text in _problems(facts) if pipe not in failed or not text.startswith(STARTING)
    }
    for one in facts.checkpoints:
        problem = said.pop(one.pipe, "")
        parts = about(f"pipe {one.pipe}", "transform")
        mark = facts.broker.marks.get(one.pipe)
        if mark is not None and mark.has_begun and not one.has_identity and not one.made:
            yield Finding(
                f"The checkpoint of the transform of {one.pipe} is gone.",
                [f"{one.path} has none, but {mark.text}", "the transform does not start without it"],
                f"ls -la {one.path.parent}   # then restore it from a backup, or: penstock group reset {one.pipe} --to-earliest",
                parts,
            )
        elif any(word in problem for word in _CHECKPOINT_WORDS):
            yield Finding(
                f"The checkpoint of the transform of {one.pipe} cannot be used.",
                [problem, str(one.path)],
                f"ls -la {one.path}   # then as its runbook says: restore it, or penstock group reset",
                parts,
            )
        elif one.made is None and mark is not None and not mark.has_begun:
            continue  # an operator reset it; it has not begun since
        elif one.made is None and facts.broker.ends.get(output_topic(one.pipe)) and one.pipe not in facts.broker.pauses:
            count = facts.broker.ends[output_topic(one.pipe)]
            yield Finding(
                f"The checkpoint of the transform of {one.pipe} is gone.",
                [
                    f"{one.path} has none, and {output_topic(one.pipe)} has {format_count(count, 'result')}",
                    "a start without it transforms all stored events again",
                ],
                "stop the fleet (Ctrl-C) before the transform starts again, then restore the folder from the backup",
                parts,
            )
        elif (made := _made_anew(facts, one)) is not None:
            yield Finding(
                f"The checkpoint of the transform of {one.pipe} is new, and its results are older: it was lost.",
                [
                    f"{one.path} was made at {format_time(int(made * 1000))}, a result in {output_topic(one.pipe)} is older",
                    "the transform reads all stored events again; receivers get their results twice, with the same ids",
                ],
                f"penstock pause {one.pipe}   # then restore the checkpoint from the backup, or let it go on",
                parts,
            )
    for pipe, problem in said.items():  # checkpoints elsewhere
        if any(word in problem for word in _CHECKPOINT_WORDS):
            yield Finding(
                f"The checkpoint of the transform of {pipe} cannot be used.",
                [problem],
                "its runbook: restore it, or start over",
                about(f"pipe {pipe}", "transform"),
            )


def _made_anew(facts: Facts, one: Checkpoint) -> float | None:
    """When a checkpoint was made within the last hour that replaces a lost one: it is newer than results. A reset is no loss."""
    made, result = one.made, one.first_result
    if made is None or result is None or one.is_reset:
        return None
    return made if made > facts.now - NEW_S and made > result else None


def _problems(facts: Facts) -> Iterator[tuple[str, str]]:
    """By pipe: the reason why its query does not run, as the services give it."""
    for one in facts.of("transform"):
        yield from problems_of(facts, one)


def problems_of(facts: Facts, one: Instance) -> Iterator[tuple[str, str]]:
    """By pipe: the reason why its query does not run, as this transform process gives it (`pipe: reason; pipe: reason`)."""
    known = facts.pipes.pipes if facts.pipes is not None else {}
    for part in one.reason.split("; ") if one.service == "transform" else ():
        pipe, _, problem = part.partition(": ")
        if pipe in known and problem:
            yield pipe, problem


def _failures(facts: Facts) -> Iterator[tuple[str, str]]:
    """By pipe: why its query failed in the last minutes, as the log says it: between two starts of the process nobody answers."""
    for one in facts.of("transform"):
        for line in () if one.answer == "ready" else one.lines:
            if line.event == "query_failed" and line.at > facts.now - FAILED_S and "pipe" in line.fields:
                yield str(line.fields["pipe"]), str(line.fields.get("error", ""))


def find_poison(facts: Facts) -> Iterator[Finding]:
    """Events on which a transform fails, or which end its process: new dead letters of the transform, batches in parts.

    A finding is about the whole service only if a batch ended the process. After a dead letter the transform continues.
    """
    count: defaultdict[str, list[str]] = defaultdict(list)
    ended: set[str] = set()
    reasons: defaultdict[str, set[str]] = defaultdict(set)
    newest: defaultdict[str, float] = defaultdict(float)
    for one in facts.broker.letters:
        if one.node == "transform":
            example = f", e.g. {one.example}: {one.detail[:200]}" if one.detail else f", e.g. {one.example}"
            count[one.pipe].append(f"{format_count(one.count, 'new dead letter')} ({one.reason}{example})")
            reasons[one.pipe].add(one.reason)
            newest[one.pipe] = max(newest[one.pipe], one.newest_at)
    for instance in facts.of("transform"):
        for line in instance.lines:
            if line.at > facts.now - 900 and _shows_poison(line):
                pipe = str(line.fields.get("pipe", ""))
                count[pipe].append(f"{instance.name}: {line.text[:300]}")
                reasons[pipe].add(line.event)
                newest[pipe] = max(newest[pipe], line.at)
                ended |= {pipe} if line.event == ENDED else set()
    for pipe, evidence in count.items():
        yield Finding(
            f"The transform of {pipe} meets events that are behind its watermark."
            if reasons[pipe] == {LATE}
            else f"The transform of {pipe or 'a pipe'} meets events that it cannot process.",
            evidence[-5:],
            f"penstock dead list --pipe {pipe} --since 15m" if pipe else "penstock dead list --since 15m",
            about(f"pipe {pipe}", f"dead {pipe}/", *(["transform"] if pipe in ended or not pipe else [])),
            past_at=newest[pipe],
        )


def _shows_poison(line: LogLine) -> bool:
    """A batch in parts, or one that ended two processes: a single end may have had any cause."""
    ended = line.fields.get("ended_processes")
    again = line.event == ENDED and isinstance(ended, int) and ended > 1
    return again or line.event == "batch_in_parts"


def find_down(facts: Facts) -> Iterator[Finding]:
    """Queries that do not run, or that fail again and again."""
    said = dict(_problems(facts))
    for one, labels, value, _ in facts.series("penstock_transform_query_up"):
        pipe = labels["pipe"]
        failures = facts.total("penstock_transform_query_failures_total", pipe=pipe)
        is_starting = facts.is_young(one, FIRST_START_S) and not failures
        if value or is_starting or facts.total("penstock_transform_paused", pipe=pipe):
            continue
        yield Finding(
            f"The transform of {pipe} does not run: {said.get(pipe, 'its query is down')}.",
            [f"{format_count(int(failures), 'failure')} since its process was started", *_errors(facts, pipe)],
            f"grep {pipe} {one.log} | tail -20" if one.log is not None else f"the log of {one.name}",
            about(f"pipe {pipe}", "transform"),
        )


def _errors(facts: Facts, pipe: str) -> list[str]:
    lines = [
        line.text[:300]
        for one in facts.of("transform")
        for line in one.lines
        if line.level in ("warning", "error", "critical") and line.fields.get("pipe") == pipe
    ]
    return [f"its log: {text}" for text in lines[-2:]]


def find_stuck(facts: Facts) -> Iterator[Finding]:
    """Records wait, and the query reads none of them: up, and without progress."""
    for one, labels, value, _ in facts.series("penstock_transform_query_up"):
        pipe = labels["pipe"]
        behind = facts.total("penstock_broker_lag_records", group=pipe)
        read = facts.growth("penstock_transform_events_read_total", pipe=pipe)
        is_young = facts.is_young(one, FIRST_START_S)
        live = facts.total("penstock_transform_mode", pipe=pipe, mode="real-time")
        if live and facts.seconds() < REAL_TIME_S:
            continue
        if value and not is_young and one.second is not None and behind > STUCK_RECORDS and not read:
            yield Finding(
                f"The transform of {pipe} reads nothing, and {format_count(int(behind), 'event')} wait for it.",
                [f"no event read in {facts.seconds():.0f} s", *_errors(facts, pipe)],
                f"tail -50 {one.log}" if one.log is not None else f"the log of {one.name}",
                about(f"pipe {pipe}", "transform"),
            )


def find_failing(facts: Facts) -> Iterator[Finding]:
    """Queries that run again after several failures within ten minutes. One that has run for a while since then is a note."""
    found: defaultdict[str, list[Moves]] = defaultdict(list)
    for one in find_moves(facts, "penstock_transform_query_failures_total", "query_failed", "batch_not_reported"):
        if not one.is_old:
            found[one.labels["pipe"]].append(one)
    for pipe, moves in found.items():
        newest = max(moves, key=lambda one: one.last)
        count = sum(one.total if not one.lines and one.last else one.count for one in moves)
        if count < MANY_FAILURES or not facts.total("penstock_transform_query_up", pipe=pipe):
            continue  # of one that does not run `find_down` has the failures
        yield Finding(
            f"The transform of {pipe} has failed {count} times, and runs again.",
            newest.evidence,
            f"{log_command(newest.instance, 'query_failed')}   # then: penstock try {pipe} -f {facts.pipes_path} "
            "--from-stream 100",
            about(f"pipe {pipe}", "transform"),
            is_note=0 < newest.last < facts.now - FAILED_S,
        )


def find_old_tables(facts: Facts) -> Iterator[Finding]:
    """Tables of the pipe file that could not be read for several of their refreshes."""
    tables: dict[str, tuple[Instance, float, float]] = {}
    for one, labels, value, _ in facts.series("penstock_transform_table_age_seconds"):
        name = labels["table"]
        every = max(
            (s for _, _, s, _ in facts.series("penstock_transform_table_refresh_seconds", table=name)), default=0.0
        )
        if every and value > OLD_REFRESHES * every + OLD_S and value > tables.get(name, (one, 0.0, 0.0))[1]:
            tables[name] = one, value, every
    for name, (one, age, every) in tables.items():
        failures = facts.total("penstock_transform_table_refresh_failures_total", table=name)
        yield Finding(
            f"Table {name} was last read {format_span(age)} ago: transforms use its old content.",
            [
                f"it is read every {format_span(every)}, and {format_count(int(failures), 'reading')} failed",
                *one.said("table_not_refreshed", table=name),
            ],
            log_command(one, "table_not_refreshed"),
            about(f"table {name}"),
        )
