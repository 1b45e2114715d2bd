"""Pipe definitions: streams, pipes (sources -> transform -> destinations, many to many) and the names they imply.

The YAML file is validated by these models; `penstock schema` publishes their JSON Schema, which editors complete by.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from services.core.units import Duration, Size
from services.core.yaml_source import BadConfiguration, Document, KeyPath, Problem, load_yaml, validate_document

NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
LANE_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}/[a-z0-9][a-z0-9_-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""Lower-case letters, digits, - and _; at most 63. No dots: those separate the parts of topic names."""

LaneName = Annotated[str, Field(pattern=LANE_PATTERN)]
"""`pipe/destination`."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _pointer(value: str) -> str:
    if not value or any(not part for part in value.split(".")):
        raise ValueError("a field name, nested ones joined by dots, is needed. Try: id or meta.id")
    return value


FieldPath = Annotated[str, AfterValidator(_pointer), Field(max_length=200)]
"""A field of the JSON payload; nested fields joined by dots."""


class Stream(_Strict):
    """A broker topic that people name; clients send events to it."""

    partitions: int = Field(4, ge=1, le=1024, description="Partitions of the topic.")
    shards: int | None = Field(
        None,
        ge=1,
        description="On Kinesis: shards to begin with, fewer than partitions where an autoscaler is to split them; absent: as "
        "many as partitions.",
    )
    retention: Duration = Field(7 * 86400.0, description="How long events are kept, e.g. 7d.")
    id: FieldPath | None = Field(
        None, description="Payload field with the event id; absent: CloudEvents id, else a new UUIDv7."
    )
    key: FieldPath | None = Field(
        None, description="Payload field with the ordering key; absent: CloudEvents partitionkey, else none."
    )
    time: FieldPath | None = Field(
        None,
        description="Payload field with the event time (RFC 3339 text, or a number of seconds or milliseconds since 1970); "
        "absent: CloudEvents time, else the arrival time.",
    )
    columns: str | None = Field(
        None,
        max_length=20_000,
        description="The payload's columns for transforms, as Spark DDL: 'carrier STRING, dep_delay INT'. "
        "A payload that does not fit goes to the pipe's dead letters.",
    )

    @model_validator(mode="after")
    def _not_more_shards(self) -> Self:
        if self.shards is not None and self.shards > self.partitions:
            raise ValueError(f"shards: {self.shards} are more than the {self.partitions} partitions that they hold")
        return self


class Transform(_Strict):
    """What happens between source and destinations: one SQL query, or one Python function DataFrame -> DataFrame.

    See `spark/` for the columns that a transform gets and must return.
    """

    sql: str | None = Field(
        None, max_length=100_000, description="A Spark SQL SELECT; each source stream is a view of its name."
    )
    python: str | None = Field(
        None, description="file.py:function or package.module:function; relative to the pipe file."
    )
    mode: Literal["micro-batch", "real-time"] = Field(
        "micro-batch", description="real-time: stateless SQL on Kafka only."
    )
    interval: Duration = Field(0.2, description="At most one micro-batch per interval, e.g. 200ms.")
    max_events: int = Field(
        20_000, ge=1, description="Events per micro-batch at most: a backlog never becomes one giant batch."
    )
    deduplicate_within: Duration | None = Field(
        None,
        description="Drop events whose id was seen within this time (micro-batch only). Absent: receivers see the stable id.",
    )
    watermark: Duration | None = Field(
        None,
        description="For a transform over several events: how far an event's time may lie behind the newest one that its WHERE "
        "lets pass. Gives the column event_time to group or join by; what comes later goes to the dead letters.",
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.sql is None) == (self.python is None):
            raise ValueError("exactly one of sql and python is needed")
        stateful = self.deduplicate_within is not None or self.watermark is not None
        if self.mode == "real-time" and (self.python is not None or stateful):
            raise ValueError("real-time mode takes a stateless sql transform only. Try: mode: micro-batch")
        return self


class Secret(_Strict):
    """Where a signing secret is found; the secret itself never stands in a pipe file."""

    file: Path | None = Field(
        None, description="A file with one whsec_… per line (newest first); not readable by others."
    )
    env: str | None = Field(None, pattern=r"^[A-Z][A-Z0-9_]*$", description="An environment variable that holds it.")

    @model_validator(mode="before")
    @classmethod
    def _not_itself(cls, value: Any) -> Any:
        if not isinstance(value, dict | Secret):
            raise ValueError("the secret itself must not stand here. Try: secret: {file: webhook.secret}")  # noqa: TRY004
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.file is None) == (self.env is None):
            raise ValueError("exactly one of file and env is needed. Try: secret: {file: webhook.secret}")
        return self


class Batching(_Strict):
    """How events are put together for one request."""

    max_events: int = Field(100, ge=1, le=10_000)
    max_bytes: Size = 1_000_000
    max_wait: Duration = Field(0.05, description="How long a request waits to fill up.")


class LocalRetry(_Strict):
    """Short retries inside expel, full-jitter exponential; beyond them an event goes to retry-in or dead letters."""

    attempts: int = Field(4, ge=1, le=20, description="Attempts in all, the first included.")
    base: Duration = 0.2
    max_wait: Duration = 5.0


def _at_most_a_week(seconds: float) -> float:
    if seconds > 7 * DAY_S:
        raise ValueError("a wait between two rounds is at most 7d")
    return seconds


HOUR_S, DAY_S = 3600.0, 86400.0
SCHEDULE = [5.0, 300.0, 0.5 * HOUR_S, 2 * HOUR_S, 5 * HOUR_S, 10 * HOUR_S, 14 * HOUR_S, 20 * HOUR_S, 24 * HOUR_S]
"""Standard Webhooks' example: ten rounds of attempts over about 75 h. Seconds."""


class Webhook(_Strict):
    """An HTTP endpoint that receives signed batches (Standard Webhooks)."""

    url: str = Field(max_length=2000, description="https://… or http://…")
    secret: Secret | None = None
    body: Literal["cloudevents", "json", "ndjson"] = "cloudevents"
    batch: Batching = Batching()
    retry: LocalRetry = LocalRetry()
    schedule: list[Annotated[Duration, AfterValidator(_at_most_a_week)]] = Field(
        SCHEDULE,
        max_length=32,
        description="When local retries are over: the waits before each further round of attempts, each within 20 % and never "
        "less than the receiver asks for; after the last round dead letters. Empty: dead letters at once.",
    )
    concurrency: int = Field(8, ge=1, le=256, description="Requests under way at once.")
    rate: int | None = Field(None, ge=1, description="Events a second at most.")
    timeout: Duration = Field(10.0, description="For one request, answer included.")
    order: Literal["none", "key"] = Field("none", description="key: events of one key are delivered in order.")
    headers: dict[str, str] = Field(
        default_factory=dict, max_length=20, description="Sent with each request; no secrets here."
    )


class Destination(_Strict):
    """Where a pipe's events go: exactly one of webhook and stream."""

    name: Name
    webhook: Webhook | None = None
    stream: Name | None = Field(None, description="Another stream of this file.")
    start: Literal["earliest", "latest"] = Field("earliest", description="Where a new destination begins.")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.webhook is None) == (self.stream is None):
            raise ValueError("exactly one of webhook and stream is needed")
        return self


class Pipe(_Strict):
    """Sources, an optional transform, destinations."""

    sources: list[Name] = Field(min_length=1, max_length=32)
    transform: Transform | None = None
    destinations: list[Destination] = Field(min_length=1, max_length=1000)


class Removed(_Strict):
    """What becomes of the events that still wait for a destination which this file no longer has: exactly one of these."""

    deliver_to: LaneName | None = Field(
        None, description="pipe/destination of this file that gets them, e.g. the same one under its new name."
    )
    bury: str | None = Field(
        None, min_length=1, max_length=500, description="They go to the pipe's dead letters; this text says why."
    )
    drop: str | None = Field(
        None, min_length=1, max_length=500, description="Nobody gets them; this text says why, in the audit."
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(choice is not None for choice in (self.deliver_to, self.bury, self.drop)) != 1:
            raise ValueError("exactly one of deliver_to, bury and drop is needed")
        return self


def pipe_version(pipe: Pipe) -> str:
    """Twelve hex digits that stand for this definition: another one, however little it differs, has others."""
    return hashlib.sha256(pipe.model_dump_json().encode()).hexdigest()[:12]


class PipeFile(_Strict):
    """The whole file."""

    version: Literal[1] = 1
    streams: dict[Name, Stream] = Field(min_length=1)
    pipes: dict[Name, Pipe] = Field(default_factory=dict)
    removed: dict[LaneName, Removed] = Field(
        default_factory=dict,
        description="By pipe/destination: what becomes of events that still wait for destinations which are gone.",
    )


def find_broken_references(data: object) -> list[tuple[KeyPath, str]]:
    """(path of the key, message) for each name that fits nothing, stands twice or makes a loop.

    `data` is a pipe file as plain data, or a dump of the model. What has the wrong shape is passed over: the model names it.
    """
    streams = _mapping(_mapping(data).get("streams"))
    pipes = _mapping(_mapping(data).get("pipes"))
    problems: list[tuple[KeyPath, str]] = [
        ((section, RESERVED), f"{RESERVED!r} is reserved for our own topics. Try: another name")
        for section, names in (("streams", streams), ("pipes", pipes))
        if RESERVED in names
    ]
    feeds: dict[str, set[str]] = {}
    for name, pipe in pipes.items():
        sources = [source for source in _items(_mapping(pipe).get("sources")) if isinstance(source, str)]
        destinations = [_mapping(destination) for destination in _items(_mapping(pipe).get("destinations"))]
        problems += [(("pipes", name, *path), text) for path, text in _check_pipe(sources, destinations, streams)]
        for index, destination in enumerate(destinations):
            target = destination.get("stream")
            if isinstance(target, str) and _reaches(feeds, target, set(sources)):
                path = ("pipes", name, "destinations", index, "stream")
                problems.append((path, f"{target!r} leads back to the pipe's own source: a loop"))
                continue
            for source in sources:
                feeds.setdefault(source, set()).add(str(target))
    return problems + _check_removed(_mapping(_mapping(data).get("removed")), pipes)


def _check_removed(removed: Mapping[str, object], pipes: Mapping[str, object]) -> list[tuple[KeyPath, str]]:
    lanes = {
        f"{name}/{destination.get('name')}": "webhook" in destination
        for name, pipe in pipes.items()
        for destination in map(_mapping, _items(_mapping(pipe).get("destinations")))
    }
    problems: list[tuple[KeyPath, str]] = []
    for lane, choice in removed.items():
        target = _mapping(choice).get("deliver_to")
        if lane in lanes:
            problems.append((("removed", lane), "is a destination of this file, which gets what waits for it itself"))
        if isinstance(target, str) and not lanes.get(target):
            known = ", ".join(sorted(name for name, is_webhook in lanes.items() if is_webhook)) or "there is none"
            problems.append((("removed", lane, "deliver_to"), f"{target!r} is no webhook of this file: {known}"))
    return problems


def _reaches(feeds: Mapping[str, set[str]], start: str, goals: set[str]) -> bool:
    """Whether events in stream `start` come to one of the streams `goals` by the pipes seen so far."""
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        stream = waiting.pop()
        if stream in goals:
            return True
        if stream not in seen:
            seen.add(stream)
            waiting.extend(feeds.get(stream, ()))
    return False


def _check_pipe(
    sources: Sequence[str], destinations: Sequence[Mapping[str, object]], streams: Mapping[str, object]
) -> Iterator[tuple[KeyPath, str]]:
    known = f"is not among streams: {', '.join(sorted(map(str, streams)))}"
    for index, source in enumerate(sources):
        if source not in streams:
            yield ("sources", index), f"{source!r} {known}"
        if source in sources[:index]:
            yield ("sources", index), f"{source!r} stands twice"
    names: set[object] = set()
    for index, destination in enumerate(destinations):
        name, stream = destination.get("name"), destination.get("stream")
        if isinstance(name, str) and name in names:
            yield ("destinations", index, "name"), f"{name!r} stands twice"
        if isinstance(name, str):
            names.add(name)
        if isinstance(stream, str) and stream not in streams:
            yield ("destinations", index, "stream"), f"{stream!r} {known}"


def _mapping(data: object) -> Mapping[str, object]:
    return data if isinstance(data, Mapping) else {}


def _items(data: object) -> Sequence[object]:
    return data if isinstance(data, list) else ()


def _retention(pipe: Pipe, streams: Mapping[str, Stream]) -> float:
    """Seconds for which the pipe's longest-keeping known source keeps events."""
    return max((streams[source].retention for source in pipe.sources if source in streams), default=0.0)


def output_topic(pipe: str) -> str:
    """Where a pipe's transform writes."""
    return f"{pipe}.out"


def dead_letter_topic(pipe: str) -> str:
    """Where a pipe's dead letters are."""
    return f"{pipe}.dead"


def retry_topic(pipe: str) -> str:
    """Where the global retrier writes events of this pipe that are due again; its lanes in expel read it."""
    return f"{pipe}.retry"


def event_topics(pipes: "PipeFile") -> list[str]:
    """Where events flow: streams and the outputs of transforms; not what Penstock keeps for itself."""
    outputs = [output_topic(name) for name, pipe in pipes.pipes.items() if pipe.transform is not None]
    return [*pipes.streams, *outputs]


def parked_topic(pipe: str) -> str:
    """Where the events of paused destinations of this pipe wait for ever; its lanes in expel write and read it."""
    return f"{pipe}.parked"


RESERVED = "penstock"
"""No pipe and no stream has this name: topics beginning with it are the fleet's own."""
RETRY_IN = f"{RESERVED}.retry-in"
"""Where expel hands events over to the global retrier (`retry_state`)."""
RETRIER_DEAD = f"{RESERVED}.dead"
"""Dead letters of the global retrier: what is no retry record, or whose pipe is gone."""
AUDIT = f"{RESERVED}.audit"
"""What operators did with dead letters, for ever; one partition."""
CONTROL = f"{RESERVED}.control"
"""What is paused (`pauses`), for ever; one partition."""
RETRIER_GROUP = f"{RESERVED}.retrier"
"""The global retriers' consumer group."""
DELAYS_S = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""How long the delay topics hold a record, ascending."""


def delay_topic(seconds: int) -> str:
    """Where an event waits so long; seconds is one of DELAYS_S."""
    return f"{RESERVED}.delay-{seconds}s"


def is_of_retrier(topic: str) -> bool:
    """Whether events wait there for the global retrier, or come back from it."""
    return topic == RETRY_IN or topic.startswith(f"{RESERVED}.delay-") or topic.endswith(".retry")


def is_retried(destination: Destination) -> bool:
    """Whether its events may be handed over to the global retrier. Never where keys are in order: those wait in their stream."""
    webhook = destination.webhook
    return webhook is not None and bool(webhook.schedule) and webhook.order != "key"


def needs_retrier(pipes: PipeFile) -> bool:
    """Whether any destination of the file may use the global retrier."""
    return any(is_retried(destination) for pipe in pipes.pipes.values() for destination in pipe.destinations)


def lane_name(pipe: str, destination: str) -> str:
    """As `removed`, the control topic and the observer's API name a destination of a pipe."""
    return f"{pipe}/{destination}"


def lanes_of(pipes: PipeFile) -> frozenset[str]:
    """Every destination of the file, which delivers what waits for it, as `lane_name`."""
    return frozenset(
        lane_name(name, destination.name) for name, pipe in pipes.pipes.items() for destination in pipe.destinations
    )


def delivery_topics(name: str, pipe: Pipe) -> list[str]:
    """What expel reads for this pipe: the transform's output, or the sources themselves."""
    return [output_topic(name)] if pipe.transform is not None else list(pipe.sources)


def delivery_group(pipe: str, destination: str) -> str:
    """The consumer group of one destination: each has offsets, lag and pace of its own."""
    return f"{pipe}.{destination}"


def read_pipes(path: Path) -> tuple[Document, PipeFile, list[Problem]]:
    """A pipe file of the right shape, and its references that are broken, for callers that go on checking. Blocking.

    Raises BadConfiguration, with the broken references, too, when the shape is wrong.
    """
    try:
        document = load_yaml(path)
    except BadConfiguration as error:
        if isinstance(error.__cause__, FileNotFoundError):
            missing = Problem(str(path), "", "there is no such file. Try: penstock init, or -f with another")
            raise BadConfiguration([missing]) from None
        raise
    if document.data is None:
        raise BadConfiguration([document.problem((), "is empty. Try: penstock init")])
    problems = [document.problem(key, message) for key, message in find_broken_references(document.data)]
    try:
        file = validate_document(document, PipeFile)
    except BadConfiguration as error:
        raise BadConfiguration(error.problems + problems) from None
    return document, file, problems


def load_pipes(path: Path) -> PipeFile:
    """Read and validate a pipe file. Blocking. Raises BadConfiguration naming file, line and key of every mistake."""
    _, file, problems = read_pipes(path)
    if problems:
        raise BadConfiguration(problems)
    return file
