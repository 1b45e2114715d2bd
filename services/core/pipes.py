"""The pipe file: streams, pipes (sources -> transform -> destinations, many to many), and the names of their topics.

These models check the file. `penstock schema` prints their JSON Schema for editors.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator

from services.core.pipe_references import RESERVED, find_broken_references, former_lanes
from services.core.units import Duration, Size
from services.core.version import newer_format
from services.core.yaml_source import BadConfiguration, Document, Problem, load_yaml, validate_document

NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
LANE_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}/[a-z0-9][a-z0-9_-]{0,62}$"
REMOVED_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}(/[a-z0-9][a-z0-9_-]{0,62})?$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""At most 63 lower-case letters, digits, - and _. No dots: they separate the parts of topic names."""

LaneName = Annotated[str, Field(pattern=LANE_PATTERN)]
"""`pipe/destination`."""

RemovedName = Annotated[str, Field(pattern=REMOVED_PATTERN)]
"""`pipe/destination`, or `pipe`."""


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _pointer(value: str) -> str:
    if not value or any(not part for part in value.split(".")):
        raise ValueError("a field name is needed; nested fields are joined by dots. Try: id or meta.id")
    return value


FieldPath = Annotated[str, AfterValidator(_pointer), Field(max_length=200)]
"""A field of the JSON payload; nested fields joined by dots."""


class Stream(_Strict):
    """A topic that people name. Clients send events to it."""

    partitions: int = Field(
        4,
        ge=1,
        le=1024,
        description="Partitions of the topic, at least: at most so many instances work at once. Events of one key are in one "
        "partition. A topic that has more keeps them.",
        examples=[8],
    )
    max_partitions: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="On Kafka: the autoscaler may add partitions up to this number, if no event ever had a key. Absent: it only "
        "reports that more are needed.",
        examples=[32],
    )
    shards: int | None = Field(
        None,
        ge=1,
        description="On Kinesis: the number of shards at the beginning; fewer than partitions if an autoscaler will split them. "
        "Absent: as many as partitions.",
        examples=[2],
    )
    retention: Duration = Field(7 * 86400.0, description="How long events are kept.", examples=["30d"])
    id: FieldPath | None = Field(
        None,
        description="Payload field with the event id. Without this key in the pipe file, or without the field in the event: "
        "CloudEvents id, else a new UUIDv7. Only for events that clients send: those of another pipe keep their id.",
        examples=["meta.id"],
    )
    key: FieldPath | None = Field(
        None,
        description="Payload field with the ordering key. Without this key in the pipe file, or without the field in the event: "
        "CloudEvents partitionkey, else none. Only for events that clients send: those of another pipe keep their key.",
        examples=["customer.id"],
    )
    time: FieldPath | None = Field(
        None,
        description="Payload field with the event time (RFC 3339 text, or a number of seconds or milliseconds since 1970). "
        "Without this key in the pipe file, or without the field in the event: CloudEvents time, else the arrival time. "
        "Only for events that clients send: those of another pipe keep their time.",
        examples=["placed_at"],
    )
    columns: str | None = Field(
        None,
        max_length=20_000,
        description="The payload's columns for transforms, as Spark DDL. "
        "A payload that does not fit goes to the pipe's dead letters.",
        examples=["carrier STRING, dep_delay INT"],
    )

    @model_validator(mode="after")
    def _not_more_shards(self) -> Self:
        if self.shards is not None and self.shards > self.partitions:
            raise ValueError(f"{self.shards} shards are more than {self.partitions} partitions")
        return self

    @model_validator(mode="after")
    def _can_grow(self) -> Self:
        if self.max_partitions is None:
            return self
        if self.max_partitions < self.partitions:
            raise ValueError(f"max_partitions {self.max_partitions} is less than {self.partitions} partitions")
        if self.key is not None:
            raise ValueError(
                "max_partitions and key exclude each other: more partitions would break the order of keys. Try: more partitions "
                "from the beginning, without max_partitions"
            )
        return self


class Transform(_Strict):
    """One SQL query, or one Python function DataFrame -> DataFrame. `docs/transforms.md` has its input and output columns."""

    sql: str | None = Field(
        None,
        max_length=100_000,
        description="A Spark SQL SELECT; each source stream is a view of its name.",
        examples=["SELECT event, id, price FROM orders WHERE price >= 100"],
    )
    python: str | None = Field(
        None,
        description="A function from DataFrame to DataFrame: file.py:function, relative to the pipe file, "
        "or package.module:function.",
        examples=["transforms.py:with_speed"],
    )
    mode: Literal["micro-batch", "real-time"] = Field(
        "micro-batch",
        description="micro-batch: for every transform. real-time: shorter lag, for stateless SQL on Kafka only.",
    )
    interval: Duration = Field(0.2, description="At most one micro-batch per interval.", examples=["1s"])
    max_events: int = Field(
        20_000, ge=1, description="The most events per micro-batch, also when there is a backlog.", examples=[100_000]
    )
    deduplicate_within: Duration | None = Field(
        None,
        description="Drop events whose id occurred within this time before (micro-batch only). Absent: keep them; receivers can "
        "recognise them by their id.",
        examples=["1h"],
    )
    watermark: Duration | None = Field(
        None,
        description="For a transform over several events: how much older an event may be than the newest one that passed the "
        "WHERE clause. Older events go to the dead letters. Adds the column event_time, to group or join by.",
        examples=["10m"],
    )

    decimals: Literal["number", "string"] = Field(
        "number",
        description="How DECIMAL columns of the result are written. number: as JSON numbers, which most receivers read as floats "
        "of 15 to 17 digits. string: as JSON texts with all digits, also in structs, arrays and maps.",
        examples=["string"],
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.sql is None) == (self.python is None):
            raise ValueError("exactly one of sql and python is needed")
        stateful = self.deduplicate_within is not None or self.watermark is not None
        if self.mode == "real-time" and (self.python is not None or stateful):
            raise ValueError("real-time mode supports only stateless sql transforms. Try: mode: micro-batch")
        return self


class Secret(_Strict):
    """The place of a secret. The secret itself is never in a pipe file."""

    file: Path | None = Field(
        None,
        description="A file that other users cannot read. It is read again when it changes. A signing secret's file has one "
        "whsec_… per line (newest first), any other file one line.",
        examples=["webhook.secret"],
    )
    env: str | None = Field(
        None,
        pattern=r"^[A-Z][A-Z0-9_]*$",
        description="An environment variable with the secret.",
        examples=["BILLING_SECRET"],
    )

    @model_validator(mode="before")
    @classmethod
    def _not_itself(cls, value: Any) -> Any:
        if not isinstance(value, dict | Secret):
            raise ValueError(  # noqa: TRY004
                "the secret itself must not be here, only its place. Try: {file: webhook.secret} or {env: WEBHOOK_SECRET}"
            )
        return value

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.file is None) == (self.env is None):
            raise ValueError("exactly one of file and env is needed. Try: {file: webhook.secret}")
        return self


class Tls(_Strict):
    """The authorities that we trust, and the certificate that we show (mTLS). PEM files; they are read again when they change."""

    ca: Path | None = Field(
        None,
        description="The certificates of the authorities that are trusted, in place of the system's. E.g. a company's own CA.",
        examples=["company-ca.pem"],
    )
    certificate: Path | None = Field(
        None,
        description="Our client certificate, with the intermediate certificates behind it.",
        examples=["expel.pem"],
    )
    key: Path | None = Field(
        None,
        description="The private key of our certificate, without a password; not readable by others. "
        "Absent: it is in the certificate's file.",
        examples=["expel.key"],
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.certificate is None and self.key is not None:
            raise ValueError("a key needs its certificate. Try: certificate: expel.pem")
        if self.certificate is None and self.ca is None:
            raise ValueError("ca, or certificate and key, are needed. Try: {ca: company-ca.pem}")
        return self


class SecretHeader(_Strict):
    """A header whose value is secret."""

    name: str = Field(max_length=100, description="The header's name.", examples=["X-Api-Key"])
    value: Secret = Field(
        description="The place of the whole value, e.g. of Basic and the base64 of user:password.",
        examples=[{"file": "api-key.secret"}],
    )


class OAuth(_Strict):
    """OAuth 2.0 client credentials (RFC 6749, 4.4): requests carry a token from the token server."""

    token_url: str = Field(
        max_length=2000,
        description="The token server's URL: https://… or http://…",
        examples=["https://login.example.org/oauth2/token"],
    )
    client_id: str = Field(
        min_length=1, max_length=500, description="The name of the client at the token server.", examples=["penstock"]
    )
    client_secret: Secret = Field(
        description="The place of the client's secret.", examples=[{"file": "oauth-client.secret"}]
    )
    scope: str | None = Field(
        None,
        max_length=2000,
        description="The requested scopes, separated by spaces.",
        examples=["events.write"],
    )
    audience: str | None = Field(
        None,
        max_length=2000,
        description="The receiver's name, for servers that ask for it.",
        examples=["billing"],
    )
    resource: str | None = Field(
        None,
        max_length=2000,
        description="The receiver's URI (RFC 8707).",
        examples=["https://billing.example.org"],
    )
    tls: Tls | None = Field(
        None,
        description="For the token server, as `tls` is for the receiver.",
        examples=[{"ca": "company-ca.pem"}],
    )


class Auth(_Strict):
    """The proof of our identity in each request: exactly one of bearer, header and oauth."""

    bearer: Secret | None = Field(
        None,
        description="The place of a token, sent as Authorization: Bearer.",
        examples=[{"file": "receiver.token"}],
    )
    header: SecretHeader | None = Field(
        None,
        description="A header with a secret value, e.g. an API key.",
        examples=[{"name": "X-Api-Key", "value": {"file": "api-key.secret"}}],
    )
    oauth: OAuth | None = Field(
        None,
        description="A token from a token server, by OAuth client credentials.",
        examples=[
            {
                "token_url": "https://login.example.org/oauth2/token",
                "client_id": "penstock",
                "client_secret": {"file": "oauth-client.secret"},
            }
        ],
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(kind is not None for kind in (self.bearer, self.header, self.oauth)) != 1:
            raise ValueError("exactly one of bearer, header and oauth is needed. Try: {bearer: {file: receiver.token}}")
        return self


class Batching(_Strict):
    """Limits of one request."""

    max_events: int = Field(
        100,
        ge=1,
        le=10_000,
        description="The most events in a request. 1: each event in a request of its own.",
        examples=[1],
    )
    max_bytes: Size = Field(1_000_000, description="The most bytes in a request's body.", examples=["256KB"])
    max_wait: Duration = Field(0.05, description="How long a request waits for more events.", examples=["1s"])


class LocalRetry(_Strict):
    """Short retries inside expel, with exponential waits and full jitter. After them the schedule begins."""

    attempts: int = Field(4, ge=1, le=20, description="Number of attempts, including the first.", examples=[2])
    base: Duration = Field(
        0.2,
        description="The longest wait before the second attempt; it doubles with each further one.",
        examples=["1s"],
    )
    max_wait: Duration = Field(5.0, description="The longest wait before any of these attempts.", examples=["10s"])


def _at_most_a_week(seconds: float) -> float:
    if seconds > 7 * DAY_S:
        raise ValueError("a wait between two rounds is at most 7d")
    return seconds


HOUR_S, DAY_S = 3600.0, 86400.0
SCHEDULE = [5.0, 300.0, 0.5 * HOUR_S, 2 * HOUR_S, 5 * HOUR_S, 10 * HOUR_S, 14 * HOUR_S, 20 * HOUR_S, 24 * HOUR_S]
"""The example of Standard Webhooks: ten rounds of attempts over about 75 h. In seconds."""


class Webhook(_Strict):
    """An HTTP endpoint that receives signed batches (Standard Webhooks)."""

    url: str = Field(
        max_length=2000,
        description="https://… or http://… Private addresses must be allowed with `--allow-networks`.",
        examples=["https://billing.example.org/hook"],
    )
    secret: Secret | None = Field(
        None,
        description="The place of the secret that signs requests. Absent: requests are not signed.",
        examples=[{"file": "webhook.secret"}],
    )
    auth: Auth | None = Field(
        None,
        description="The proof of our identity for receivers that ask for one.",
        examples=[{"bearer": {"file": "receiver.token"}}],
    )
    tls: Tls | None = Field(
        None,
        description="For receivers with an own CA, or that ask for a client certificate.",
        examples=[{"ca": "company-ca.pem"}],
    )
    body: Literal["cloudevents", "json", "ndjson"] = Field(
        "cloudevents",
        description="cloudevents: an array of CloudEvents with id, source and time. json: an array of the payloads. ndjson: one "
        "payload per line.",
    )
    batch: Batching = Field(Batching(), description="Limits of one request.", examples=[{"max_events": 1}])
    retry: LocalRetry = Field(
        LocalRetry(),
        description="Short retries, before those of `schedule`.",
        examples=[{"attempts": 2}],
    )
    schedule: list[Annotated[Duration, AfterValidator(_at_most_a_week)]] = Field(
        SCHEDULE,
        max_length=32,
        description="The waits before each further round of attempts, after the local retries. Each varies by up to 20 %, and is "
        "never shorter than the receiver requests. After the last round: dead letters. Empty: dead letters at once.",
        examples=[["10s", "5m", "1h"]],
    )
    concurrency: int = Field(8, ge=1, le=256, description="The most requests in flight.", examples=[2])
    rate: int | None = Field(
        None, ge=1, description="The most events per second, of each expel process. Absent: no limit.", examples=[500]
    )
    timeout: Duration = Field(10.0, description="Time limit of one request, including its answer.", examples=["30s"])
    order: Literal["none", "key"] = Field(
        "none",
        description="key: events of one key are delivered in order; the key is the stream's `key`. none: in any order.",
    )
    headers: dict[str, str] = Field(
        default_factory=dict,
        max_length=20,
        description="Sent with each request; no secrets here: they belong in auth.",
        examples=[{"X-Tenant": "shop"}],
    )

    @field_validator("order", mode="before")
    @classmethod
    def _require_order(cls, value: object) -> object:
        if value not in ("none", "key"):
            raise ValueError("must be 'none' or 'key'; the key is the stream's `key`")
        return value


class Destination(_Strict):
    """A receiver of a pipe's events: exactly one of webhook and stream."""

    name: Name = Field(description="Its name, unique in the pipe.", examples=["billing"])
    webhook: Webhook | None = Field(
        None, description="An HTTP endpoint.", examples=[{"url": "https://billing.example.org/hook"}]
    )
    stream: Name | None = Field(None, description="Another stream of this file.", examples=["large-orders"])
    start: Literal["earliest", "latest"] = Field(
        "earliest",
        description="The position at which a new destination begins. earliest: it receives all stored events. "
        "latest: only new ones.",
    )
    renamed_from: Name | None = Field(
        None,
        description="Its former name in this pipe. It continues at the position of that one, and gets the events that wait for "
        "it. May stay here for ever.",
        examples=["invoices"],
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.webhook is None) == (self.stream is None):
            raise ValueError("exactly one of webhook and stream is needed")
        return self


class Pipe(_Strict):
    """Sources, an optional transform, destinations."""

    sources: list[Name] = Field(
        min_length=1, max_length=32, description="The streams whose events it carries.", examples=[["orders"]]
    )
    transform: Transform | None = Field(
        None,
        description="Absent: the events are delivered as they are.",
        examples=[{"sql": "SELECT event, id, price FROM orders"}],
    )
    destinations: list[Destination] = Field(
        min_length=1,
        max_length=1000,
        description="The receivers. Each of them gets every event.",
        examples=[[{"name": "billing", "webhook": {"url": "https://billing.example.org/hook"}}]],
    )
    renamed_from: Name | None = Field(
        None,
        description="Its former name, only without a transform. Its destinations continue at the positions of the former ones, "
        "and get the events that wait for them. May stay here for ever.",
        examples=["shop"],
    )


class Removed(_Strict):
    """The decision about events that wait for a destination which this file no longer has: exactly one of these."""

    deliver_to: LaneName | None = Field(
        None,
        description="The pipe/destination of this file that gets them. For a new name of the same destination, write "
        "`renamed_from` there.",
        examples=["large-orders/billing"],
    )
    bury: str | None = Field(
        None,
        min_length=1,
        max_length=500,
        description="They go to the pipe's dead letters. This text is the reason.",
        examples=["the receiver was closed"],
    )
    drop: str | None = Field(
        None,
        min_length=1,
        max_length=500,
        description="Nobody gets them. This text is the reason, in the audit.",
        examples=["events of a test"],
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if sum(choice is not None for choice in (self.deliver_to, self.bury, self.drop)) != 1:
            raise ValueError("exactly one of deliver_to, bury and drop is needed")
        return self


def pipe_version(pipe: Pipe) -> str:
    """Twelve hex digits that identify this definition. Former names are no part of it."""
    former: Any = {"renamed_from": True, "destinations": {"__all__": {"renamed_from"}}}
    return hashlib.sha256(pipe.model_dump_json(exclude=former).encode()).hexdigest()[:12]


class PipeFile(_Strict):
    """The whole file."""

    version: Literal[1] = Field(1, description="The version of this format.")

    @field_validator("version", mode="before")
    @classmethod
    def _not_newer(cls, found: object) -> object:
        if type(found) is int and found > 1:
            raise ValueError(newer_format("the pipe file", found, 1))
        return found

    streams: dict[Name, Stream] = Field(
        min_length=1, description="By name. Clients send events to a stream.", examples=[{"orders": {"id": "id"}}]
    )
    pipes: dict[Name, Pipe] = Field(
        default_factory=dict,
        description="By name. A pipe carries the events of streams to destinations.",
        examples=[{"copy": {"sources": ["orders"], "destinations": [{"name": "archive", "stream": "archive"}]}}],
    )
    removed: dict[RemovedName, Removed] = Field(
        default_factory=dict,
        description="By pipe/destination, or by pipe: the decision about events that wait for a destination or pipe which this "
        "file no longer has.",
        examples=[{"large-orders/billing": {"bury": "the receiver was closed"}}],
    )


def output_topic(pipe: str) -> str:
    """The topic of the transform's output."""
    return f"{pipe}.out"


def dead_letter_topic(pipe: str) -> str:
    """The topic of the pipe's dead letters."""
    return f"{pipe}.dead"


def retry_topic(pipe: str) -> str:
    """The topic to which the global retrier writes events that are due again. The pipe's lanes in expel read it."""
    return f"{pipe}.retry"


def event_topics(pipes: "PipeFile") -> list[str]:
    """The topics of events: the streams and the outputs of transforms."""
    outputs = [output_topic(name) for name, pipe in pipes.pipes.items() if pipe.transform is not None]
    return [*pipes.streams, *outputs]


def parked_topic(pipe: str) -> str:
    """The topic in which events of paused destinations wait. The pipe's lanes in expel write and read it."""
    return f"{pipe}.parked"


RETRY_IN = f"{RESERVED}.retry-in"
"""The topic by which expel hands events over to the global retrier (`retry_state`)."""
RETRIER_DEAD = f"{RESERVED}.dead"
"""The global retrier's dead letters: records that are no retry records, or whose pipe is gone."""
AUDIT = f"{RESERVED}.audit"
"""Operators' actions on dead letters and on groups (`audit`)."""
CONTROL = f"{RESERVED}.control"
"""Pauses and resumes of destinations and transforms (`pauses`); freezes of groups of instances (`freezes`); the bookmark of the
waiting events (`waiting`)."""
RETRIER_GROUP = f"{RESERVED}.retrier"
"""The consumer group of the global retriers."""
DELAYS_S = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
"""The waits of the delay topics, ascending."""


def delay_topic(seconds: int) -> str:
    """The topic in which an event waits so long. seconds: one of DELAYS_S."""
    return f"{RESERVED}.delay-{seconds}s"


def is_of_retrier(topic: str) -> bool:
    """Whether events in this topic wait with the global retrier, or were written by it."""
    return topic == RETRY_IN or topic.startswith(f"{RESERVED}.delay-") or topic.endswith(".retry")


def is_retried(destination: Destination) -> bool:
    """Whether its events may be handed over to the global retrier. Events of an ordered destination wait in their stream."""
    webhook = destination.webhook
    return webhook is not None and bool(webhook.schedule) and webhook.order != "key"


def needs_retrier(pipes: PipeFile) -> bool:
    """Whether any destination of the file may use the global retrier."""
    return any(is_retried(destination) for pipe in pipes.pipes.values() for destination in pipe.destinations)


def lane_name(pipe: str, destination: str) -> str:
    """The name of a lane in `removed`, in the control topic and in the observer's API."""
    return f"{pipe}/{destination}"


def lanes_of(pipes: PipeFile) -> frozenset[str]:
    """The lanes of all destinations of the file."""
    return frozenset(
        lane_name(name, destination.name) for name, pipe in pipes.pipes.items() for destination in pipe.destinations
    )


def renames_of(pipes: PipeFile) -> dict[str, str]:
    """The lane of each former name (`renamed_from`). Of several former names of one lane the latest is first."""
    found: dict[str, str] = {}
    for name, pipe in pipes.pipes.items():
        for one in pipe.destinations:
            for former in former_lanes(name, pipe.renamed_from, one.name, one.renamed_from):
                found.setdefault(former, lane_name(name, one.name))
    return found


def removed_lanes(pipes: PipeFile) -> dict[str, Removed]:
    """The decision about each lane that the file no longer has and names: those of `removed`, and former names."""
    renamed = {old: Removed(deliver_to=new) for old, new in renames_of(pipes).items()}
    return renamed | {lane: choice for lane, choice in pipes.removed.items() if "/" in lane}


def removed_pipes(pipes: PipeFile) -> dict[str, Removed]:
    """The decision about each whole pipe in `removed`. It counts for lanes of that pipe without an entry of their own."""
    return {name: choice for name, choice in pipes.removed.items() if "/" not in name}


def claims_of(pipes: PipeFile) -> Callable[[str], bool]:
    """Answers whether the file has a lane, or says what becomes of its events."""
    lanes, of_pipes = lanes_of(pipes) | removed_lanes(pipes).keys(), removed_pipes(pipes).keys()
    return lambda lane: lane in lanes or lane.partition("/")[0] in of_pipes


def delivery_topics(name: str, pipe: Pipe) -> list[str]:
    """The topics that expel reads for this pipe: the transform's output, or the sources."""
    return [output_topic(name)] if pipe.transform is not None else list(pipe.sources)


def delivery_group(pipe: str, destination: str) -> str:
    """The consumer group of one destination."""
    return f"{pipe}.{destination}"


def read_pipes(path: Path) -> tuple[Document, PipeFile, list[Problem]]:
    """A pipe file of the right shape and its broken references, for callers that check more. Blocking.

    Raises BadConfiguration when the shape is wrong; it includes the broken references.
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
    """Read and check a pipe file. Blocking. Raises BadConfiguration with file, line and key of every mistake."""
    _, file, problems = read_pipes(path)
    if problems:
        raise BadConfiguration(problems)
    return file
