"""Checks of the broker: gone, without topics, throttled, with missing or damaged records, about to delete unread events."""

from collections import defaultdict
from collections.abc import Iterator
from shlex import quote
from urllib.parse import urlsplit

from services.core.broker.connect import prefix_of
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.topic_names import lane_name
from services.core.provision import wanted_topics
from services.core.units import format_count
from services.fleet.doctor.checks.counters import find_moves, format_span, log_command
from services.fleet.doctor.diagnosis import Finding, about
from services.fleet.doctor.facts import Facts

_SAID = ("the broker cannot be opened", "broker is not reachable")
NEARLY_S = 0.75
"""Share of the retention after which unread events are in danger."""
SHOWN = 5


def find_gone(facts: Facts) -> Iterator[Finding]:
    """It does not answer us, or does not answer the services."""
    broker = facts.broker
    unready = [one for one in facts.instances if one.answer == "not ready"]
    others = tuple(f"broker {name} of the pipe file" for name in broker.silent)
    said = [
        f"{one.name}: {one.reason}"
        for one in unready
        if any(word in one.reason for word in _SAID) and not any(other in one.reason for other in others)
    ]
    if broker.problem:
        evidence = [*said, *(f"{one.name}: {one.reason}" for one in unready)]
        own = "every service answers that it is ready: only this machine cannot reach it, or they will notice soon"
        yield Finding(
            f"The broker {broker.url} cannot be used: {broker.problem}.",
            list(dict.fromkeys(evidence))[:SHOWN] or [own],
            _first(facts),
        )
    elif said and len(said) * 2 > len(facts.instances):
        yield Finding(f"The services cannot reach the broker {broker.url}.", said[:SHOWN], _first(facts))


def _first(facts: Facts) -> str:
    kind, _, rest = facts.broker.url.partition("://")
    if facts.broker.hint:
        return facts.broker.hint
    if kind == "log":
        return f"ls -la {rest}/topics; penstock log verify"
    if kind == "kafka":
        host, _, port = rest.partition("?")[0].split(",")[0].rpartition(":")
        own = (
            f"; tail -50 {facts.data}/kafka/*.log" if facts.data is not None and (facts.data / "kafka").exists() else ""
        )
        return f"nc -vz {host} {port}{own}"
    return "aws kinesis list-streams"


def find_silent(facts: Facts) -> Iterator[Finding]:
    """Other brokers of the pipe file that cannot be used. The rest of the fleet works without them."""
    pipes = facts.pipes
    for name, why in facts.broker.silent.items():
        assert pipes is not None
        streams = [stream for stream, one in pipes.streams.items() if one.home == name]
        lanes = [
            lane_name(pipe, one.name)
            for pipe, found in pipes.pipes.items()
            for one in found.destinations
            if (one.topic is not None and one.topic.home == name) or set(streams) & set(found.sources)
        ]
        host, _, port = urlsplit(pipes.brokers[name]).netloc.partition(",")[0].rpartition(":")
        yield Finding(
            f"Broker {name} of the pipe file cannot be used; {', '.join([*streams, *lanes][:SHOWN])} must wait for it.",
            [why, *(["do not restart services meanwhile: they would wait for it, too"] if streams else [])],
            f"nc -vz {host} {port}; then ask the owner of that cluster"
            if host
            else f"penstock check -f {facts.pipes_path}",
            about(*lanes, *(["ingest"] if streams else [])),
            runbook="PenstockIngestNotReady" if streams else "PenstockDestinationDown",
        )


def find_refused_access(facts: Facts) -> Iterator[Finding]:
    """Kafka refuses new connections: a login, a certificate, or a file of ours that cannot be used. Open connections go on."""
    events = "kafka_access_refused", "kafka_access_accepted"
    for one in find_moves(facts, "penstock_broker_access_refused_total", *events):
        if one.lines and one.lines[-1].event == "kafka_access_accepted":
            continue
        said = [str(line.fields.get("problem", line.text))[:300] for line in one.lines[-1:]]
        yield Finding(
            f"Kafka refuses new connections of {one.instance.name}: its login or a certificate.",
            [f"{one.count} {one.when}", *said],
            said[0].partition("Try: ")[2] if said and "Try: " in said[0] else log_command(one.instance, events[0]),
            about(one.instance.name),
            is_note=one.is_old,
        )


def find_missing_topics(facts: Facts) -> Iterator[Finding]:
    """Topics of the pipe file that the broker does not have."""
    if missing := facts.broker.missing:
        yield Finding(
            f"{format_count(len(missing), 'topic')} of the pipe file {'is' if len(missing) == 1 else 'are'} missing.",
            [", ".join(missing[: 3 * SHOWN])],
            f"penstock apply --broker {quote(facts.broker.url)} -f {facts.pipes_path}",
        )


def find_throttled(facts: Facts) -> Iterator[Finding]:
    """Shards of Kinesis that refuse writes or reads because of their limits; a quota of Kafka."""
    waits: defaultdict[str, float] = defaultdict(float)
    for one, _, _, grown in facts.series("penstock_broker_quota_wait_seconds_total"):
        waits[one.service] += grown
    said = [line.text for one in facts.instances for line in one.lines if "s of silence" in line.text]
    if sum(waits.values()) > 0.1 * facts.seconds() or said:
        waited = [
            f"{service} must wait {wait:.0f} s, asked in {facts.seconds():.0f} s"
            for service, wait in waits.items()
            if wait
        ]
        yield Finding(
            "A quota of Kafka is too small for the load: it makes our services wait.",
            [*waited, *said[-1:]],
            "ask the administrators of the cluster for a larger producer_byte_rate",
            about("ingest", "expel", "retrier", "observer"),
            runbook="PenstockBrokerQuota",
        )
    for metric, what in (
        ("penstock_broker_shard_throttles_total", "writes"),
        ("penstock_broker_shard_read_throttles_total", "reads"),
    ):
        topics: defaultdict[str, float] = defaultdict(float)
        for _, labels, _, grown in facts.series(metric):
            topics[labels["topic"]] += grown
        for topic, grown in topics.items():
            if grown:
                yield Finding(
                    f"Kinesis throttles {what} of {topic}.",
                    [f"{grown:.0f} refused in {facts.seconds():.0f} s"],
                    f"aws kinesis describe-stream-summary --stream-name {prefix_of(facts.broker.url)}{topic}",
                    about("ingest" if what == "writes" else "expel", f"topic {topic}"),
                )


def find_missing_records(facts: Facts) -> Iterator[Finding]:
    """Records that a group had not read, and that are gone: its partition waits for a person."""
    gone: defaultdict[tuple[str, str], float] = defaultdict(float)
    for _, labels, value, _ in facts.series("penstock_broker_gap_records_total"):
        gone[labels["group"], labels["topic"]] += value
    places: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for (group, source), (position, start) in facts.broker.gaps.items():
        places[group, source.topic].append(f"partition {source.partition}: reads {position}, stored from {start}")
    for group, topic in sorted(gone.keys() | places.keys()):
        count = gone.get((group, topic), 0.0)
        if not count and (group, topic) not in places:
            continue
        evidence = [*places[group, topic][:SHOWN], *([f"{count:.0f} records are gone"] if count else [])]
        lane = facts.lane_of(group)
        yield Finding(
            f"Records of {topic} that {group} had not read are gone; those partitions wait for a person.",
            evidence,
            f"penstock group show {lane}",
            about(lane),
        )


def find_damage(facts: Facts) -> Iterator[Finding]:
    """Stored records that cannot be read."""
    count = facts.growth("penstock_broker_damaged_records_total")
    said = [
        f"{one.name}: {one.reason}"
        for one in facts.instances
        if "damaged" in one.reason.lower() and "checkpoint" not in one.reason
    ]
    if facts.broker.damage or said:
        yield Finding(
            "Stored records are damaged.",
            [*facts.broker.damage, *said][:SHOWN],
            "penstock log verify" if facts.broker.is_log else "the disks of the brokers; another replica may be intact",
        )
    elif count:
        yield Finding(
            "Damaged records went to the dead letters as stored bytes.",
            [f"{count:.0f} in {facts.seconds():.0f} s"],
            "penstock dead list --reason damaged_batch",
        )
    for _, labels, value, _ in facts.series("penstock_broker_logs_cut_off_total"):
        if value:
            yield Finding(
                f"Kafka lost the end of {labels['topic']}, with acknowledged events.",
                [f"{value:.0f} partitions, noticed by {labels['group']}"],
                "grep kafka_log_cut_off data/logs/expel-*.log",
                about(facts.lane_of(labels["group"])),
                runbook="PenstockLogCutOff",
            )
    for _, labels, value, _ in facts.series("penstock_broker_partitions_tag_missing"):
        if value:
            yield Finding(
                f"The Kinesis stream {labels['topic']} lacks its tag penstock:partitions.",
                ["keys may move to other partitions"],
                f"aws kinesis list-tags-for-stream --stream-name {prefix_of(facts.broker.url)}{labels['topic']}",
                runbook="PenstockPartitionsUntold",
            )


def find_retention(facts: Facts) -> Iterator[Finding]:
    """Unread events that retention deletes soon. The log keeps them for twice the retention."""
    if facts.pipes is None:
        return
    kept = _retention_ms(facts.pipes)
    for (group, topic), lags in facts.broker.lags.items():
        limit = kept.get(topic)
        stored = [lag.stored for lag in lags.values() if lag.records and lag.stored is not None]
        if limit is None or not stored:
            continue
        if facts.broker.is_log:
            limit *= 2
        age = facts.now * 1000 - min(stored)
        if age > NEARLY_S * limit:
            left = max(0.0, limit - age)
            yield Finding(
                f"Retention deletes events of {topic} that {group} has not read, in {format_span(left / 1000)}.",
                [f"the oldest is stored for {format_span(age / 1000)}, and kept for {format_span(limit / 1000)}"],
                f"penstock group show {facts.lane_of(group)}",
                about(facts.lane_of(group)),
            )
    for _, labels, value, _ in facts.series("penstock_broker_lag_seconds"):
        limit = kept.get(labels["topic"])
        if labels["group"] in facts.pipes.pipes and limit and value * 1000 > NEARLY_S * limit:
            yield Finding(
                f"Retention deletes events of {labels['topic']} that the transform of {labels['group']} has not read.",
                [f"the oldest waits for {format_span(value)}, and is kept for {format_span(limit / 1000)}"],
                "penstock status",
                about(f"pipe {labels['group']}", "transform"),
            )


def _retention_ms(pipes: PipeFile) -> dict[str, float]:
    return {
        spec.name: float(spec.retention_ms)
        for spec in wanted_topics(pipes, has_retrier=True)
        if spec.retention_ms is not None
    }
