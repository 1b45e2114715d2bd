"""The rights that the users of our services need on a Kafka with an authorizer: the table of docs/kafka.md."""

from collections.abc import Collection
from typing import Literal

from services.core.broker.existing import target_name
from services.core.broker.rights import Kind, Right
from services.core.pipe_file.existing_topics import existing_topics
from services.core.pipe_file.pipes import PipeFile, own_streams
from services.core.pipe_file.topic_names import CONTROL, DELAYS_S, delay_topic, delivery_group, delivery_topics
from services.core.provision import wanted_topics

Service = Literal["ingest", "expel", "retrier", "observer", "table", "autoscaler", "transform", "command line"]

_NEEDED: dict[Service, tuple[tuple[str, Kind, str], ...]] = {
    "ingest": (
        ("Write DescribeConfigs", "topic", "STREAM"),
        ("Write DescribeConfigs", "topic", "penstock.telemetry"),
        ("Read Write DescribeConfigs", "topic", "penstock.control"),
    ),
    "expel": (
        ("Read DescribeConfigs", "topic", "DELIVERED"),
        ("Read", "topic", "DELIVERED-OF-OTHERS"),
        ("Read Write DescribeConfigs", "topic", "TARGET"),
        ("Write DescribeConfigs", "topic", "TARGET-OF-OTHERS"),
        ("Read Write DescribeConfigs", "topic", "PIPE.dead"),
        ("Read DescribeConfigs", "topic", "PIPE.retry"),
        ("Read Write DescribeConfigs", "topic", "PIPE.parked"),
        ("Read Write DescribeConfigs", "topic", "penstock.retry-in"),
        ("Read Write DescribeConfigs", "topic", "penstock.control"),
        ("Write DescribeConfigs", "topic", "penstock.telemetry"),
        ("Read Write DescribeConfigs", "topic", "penstock.groups"),
        ("Read", "group", "PIPE.DESTINATION"),
    ),
    "retrier": (
        ("Read DescribeConfigs", "topic", "penstock.retry-in"),
        ("Read Write DescribeConfigs", "topic", "DELAY"),
        ("Read Write DescribeConfigs", "topic", "PIPE.retry"),
        ("Read DescribeConfigs", "topic", "HOMES"),
        ("Write DescribeConfigs", "topic", "penstock.dead"),
        ("Write DescribeConfigs", "topic", "penstock.telemetry"),
        ("Read Write DescribeConfigs", "topic", "penstock.groups"),
        ("Read", "group", "penstock.retrier"),
    ),
    "observer": (
        ("Read", "topic", "EVERY"),
        ("Read", "topic", "SOURCE-OF-OTHERS"),
        ("Write DescribeConfigs", "topic", "penstock.telemetry"),
        ("Write DescribeConfigs", "topic", "penstock.observer"),
        ("Write DescribeConfigs", "topic", "penstock.audit"),
        ("Read Write DescribeConfigs", "topic", "penstock.groups"),
        ("Read", "group", "penstock.observer"),
        ("Describe", "group", "PIPE.DESTINATION"),
        ("Describe", "group", "penstock.retrier"),
    ),
    "table": (("Read DescribeConfigs", "topic", "TABLE"), ("Read DescribeConfigs", "topic", "HOMES")),
    "autoscaler": (
        ("Read", "topic", "EVERY"),
        ("Read", "topic", "SOURCE-OF-OTHERS"),
        ("Alter", "topic", "STREAM"),
        ("Write DescribeConfigs", "topic", "penstock.audit"),
        ("Describe", "group", "PIPE.DESTINATION"),
        ("Describe", "group", "penstock.retrier"),
    ),
    "transform": (
        ("Read DescribeConfigs", "topic", "SOURCE"),
        ("Read", "topic", "SOURCE-OF-OTHERS"),
        ("Read Write DescribeConfigs", "topic", "PIPE.out"),
        ("Read Write DescribeConfigs", "topic", "PIPE.dead"),
        ("Write DescribeConfigs", "topic", "penstock.telemetry"),
        ("Read Write DescribeConfigs", "topic", "penstock.control"),
    ),
    "command line": (
        ("Create Read Write Alter DescribeConfigs", "topic", "EVERY"),
        ("Read", "topic", "SOURCE-OF-OTHERS"),
        ("Describe", "topic", "TARGET-OF-OTHERS"),
        ("Create Read Write DescribeConfigs", "topic", "penstock.groups"),
        ("Read", "group", "PIPE.DESTINATION"),
        ("Read", "group", "penstock.retrier"),
    ),
}
"""Operations, and of what. Words in capitals stand for several names (`_find_names`). Read and Write contain Describe."""


def rights_of(service: Service, pipes: PipeFile) -> list[Right]:
    """What the user of this service needs for this pipe file."""
    if service == "transform":
        transformed = {name: pipe for name, pipe in pipes.pipes.items() if pipe.transform is not None}
        pipes = pipes.model_copy(update={"pipes": transformed})
    known = _find_names(pipes)
    found = {
        Right(operation, kind, name): None
        for operations, kind, names in _NEEDED[service]
        for name in (known.get(names, []) if _is_placeholder(names) else [names])
        for operation in operations.split()
    }
    return list(found)


def show_rights() -> str:
    """The table, for docs/kafka.md."""
    rows = ["| user of | operations | of |", "|---|---|---|"]
    for service, needed in _NEEDED.items():
        for number, (operations, kind, names) in enumerate(needed):
            rows.append(f"| {'' if number else service} | {', '.join(operations.split())} | {kind} `{names}` |")
    return "\n".join(rows)


def _is_placeholder(names: str) -> bool:
    return names.isupper() or names.startswith("PIPE.")


def _find_names(pipes: PipeFile) -> dict[str, list[str]]:
    """What the words in capitals stand for."""
    topics = [spec.name for spec in wanted_topics(pipes)]
    found: dict[str, list[str]] = {
        "STREAM": list(own_streams(pipes)),
        "EVERY": topics,
        "TABLE": [name for name, stream in pipes.streams.items() if stream.compact],
        "HOMES": [CONTROL] if pipes.brokers else [],
        "DELAY": [topic for topic in map(delay_topic, DELAYS_S) if topic in topics],
    }
    others = existing_topics(pipes).names.keys()
    for name, pipe in pipes.pipes.items():
        delivered = delivery_topics(name, pipe)
        of_pipe: dict[str, Collection[str]] = {
            "SOURCE": [source for source in pipe.sources if source not in others],
            "SOURCE-OF-OTHERS": [source for source in pipe.sources if source in others],
            "DELIVERED": [topic for topic in delivered if topic not in others],
            "DELIVERED-OF-OTHERS": [topic for topic in delivered if topic in others],
            "TARGET-OF-OTHERS": [
                target_name(one.topic.name, one.topic.home) for one in pipe.destinations if one.topic is not None
            ],
            "TARGET": [one.stream for one in pipe.destinations if one.stream is not None],
            "PIPE.DESTINATION": [delivery_group(name, one.name) for one in pipe.destinations],
            **{f"PIPE.{end}": {f"{name}.{end}"} & set(topics) for end in ("out", "dead", "retry", "parked")},
        }
        for each, of_this in of_pipe.items():
            found.setdefault(each, []).extend(of_this)
    return found
