"""The pipe file: streams, and pipes (sources -> transform -> destinations, many to many).

These models check the file. `penstock schema` prints their JSON Schema for editors.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from services.core.broker.connect import open_broker
from services.core.broker.several.brokers import DEFAULT
from services.core.pipe_references import find_broken_references
from services.core.pipe_table import Table
from services.core.pipe_topic import NAME_PATTERN as NAME_PATTERN
from services.core.pipe_topic import FromHeader, Name, Place, TopicName, TopicTarget
from services.core.pipe_webhook import StrictModel, Webhook
from services.core.units import Duration
from services.core.version import newer_format
from services.core.yaml_source import BadConfiguration, Document, Problem, load_yaml, validate_document, with_meant_keys


def _broker_url(value: str) -> str:
    """Raises ValueError, which quotes no secret."""
    open_broker(value)
    return value


LANE_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}/[a-z0-9][a-z0-9_-]{0,62}$"
REMOVED_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}(/[a-z0-9][a-z0-9_-]{0,62})?$"
BrokerUrl = Annotated[str, AfterValidator(_broker_url), Field(max_length=2000)]
"""The URL of a further broker."""

LaneName = Annotated[str, Field(pattern=LANE_PATTERN)]
"""`pipe/destination`."""

RemovedName = Annotated[str, Field(pattern=REMOVED_PATTERN)]
"""`pipe/destination`, or `pipe`."""


class Stream(StrictModel):
    """A topic that people name. Clients send events to it, or others write to it (`topic`)."""

    topic: TopicName | None = Field(
        None,
        description="On Kafka: a topic that is there already, by its name on the cluster. Others write to it. Penstock only "
        "reads it: it creates, changes and deletes nothing there, and ingest accepts no events for it. `id`, `key`, `time`, "
        "`type`, `format` and `tombstones` say how a record becomes an event.",
        examples=["billing.invoices"],
    )
    on: Name | None = Field(
        None,
        description="The broker of `brokers` that it lives on. Absent: the fleet's own, that of `--broker`.",
        examples=["msk"],
    )
    partitions: int = Field(
        4,
        ge=1,
        le=1024,
        description="The least number of partitions of the topic. It limits the instances that work at once. Events of one key "
        "are in one partition. A topic that has more partitions keeps them.",
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
    retention: Duration = Field(
        7 * 86400.0,
        description="How long events are kept. With `compact`: how long also those that a newer event of their key replaced.",
        examples=["30d"],
    )
    compact: bool = Field(
        False,
        description="Keep the newest event of each key for ever: the stream is a table (docs/tables.md). Each event needs a key. "
        "Not on Kinesis. Cannot be changed later.",
        examples=[True],
    )
    id: Place | None = Field(
        None,
        description="Payload field with the event id. An id names one event, not the thing that the event is about: a second "
        "event with the same id is a duplicate, which receivers drop. Without this key in the pipe file, or without the field in "
        "the event: CloudEvents id, else a new UUIDv7. Only for events that clients send: those of another pipe keep their id. "
        "With `topic` a header is possible, too: `{header: NAME}`. Without a value there the id is TOPIC-PARTITION-OFFSET.",
        examples=["meta.id"],
    )
    key: Place | None = Field(
        None,
        description="Payload field with the ordering key. Without this key in the pipe file, or without the field in the event: "
        "CloudEvents partitionkey, else none. Only for events that clients send: those of another pipe keep their key. "
        "With `topic` a header is possible, too: `{header: NAME}`. Without a value there it is the key of the record.",
        examples=["customer.id"],
    )
    time: Place | None = Field(
        None,
        description="Payload field with the event time (RFC 3339 text, or a number of seconds or milliseconds since 1970). "
        "Without this key in the pipe file, or without the field in the event: CloudEvents time, else the arrival time. "
        "Only for events that clients send: those of another pipe keep their time. "
        "With `topic` a header is possible, too: `{header: NAME}`. Without a value there it is the timestamp of the record.",
        examples=["placed_at"],
    )
    type: Place | None = Field(
        None,
        description="Only with `topic`: payload field or header with the CloudEvents type. Without a value there: the header "
        "ce_type, else penstock.STREAM.",
        examples=[{"header": "event-type"}],
    )
    format: Literal["json", "text", "bytes"] = Field(
        "json",
        description="Only with `topic`: the kind of the values of its records. A value that is not JSON, or not text in UTF-8, "
        "goes to the dead letters.",
        examples=["text"],
    )
    tombstones: Literal["skip", "deliver"] = Field(
        "skip",
        description="Only with `topic`: records without a value, by which a key is deleted from a compacted topic. skip: they "
        "are counted as filtered. deliver: they are events with the payload null.",
        examples=["deliver"],
    )
    columns: str | None = Field(
        None,
        max_length=20_000,
        description="The payload's columns for transforms, as Spark DDL. A payload that does not fit goes to the pipe's dead "
        "letters: 19.999 does not fit DECIMAL(12,2). A DECIMAL also takes a number in a JSON text. Fields that are not declared "
        "here are no columns: a transform reads them from `value`, and a result made of columns does not have them.",
        examples=["carrier STRING, dep_delay INT"],
    )

    @property
    def home(self) -> str:
        """The name of the broker that it lives on."""
        return self.on or DEFAULT

    @model_validator(mode="after")
    def _fits_its_topic(self) -> Self:
        places = {"id": self.id, "key": self.key, "time": self.time, "type": self.type}
        if self.topic is None:
            if found := sorted(self.model_fields_set & {"type", "format", "tombstones"}):
                raise ValueError(
                    f"{found[0]} is only for a topic of others. Try: topic: NAME beside it, or no {found[0]}"
                )
            if headers := [name for name, place in places.items() if isinstance(place, FromHeader)]:
                raise ValueError(f"{headers[0]}: only a topic of others has headers. Try: a field of the payload")
            return self
        if found := sorted(self.model_fields_set & {"partitions", "max_partitions", "shards", "retention", "compact"}):
            raise ValueError(f"{found[0]} and topic exclude each other: whoever owns the topic decides about it")
        fields = [name for name, place in places.items() if isinstance(place, str)]
        if self.format != "json" and fields:
            raise ValueError(f"a payload of format {self.format} has no fields. Try: {fields[0]}: {{header: NAME}}")
        return self

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
        if self.key is not None or self.compact:
            other = "compact" if self.compact else "key"
            raise ValueError(
                f"max_partitions and {other} exclude each other: more partitions would break the order of keys. Try: more "
                "partitions from the beginning, without max_partitions"
            )
        return self


class Output(StrictModel):
    """One of several outputs of a transform: the results that its filter takes."""

    where: str | None = Field(
        None,
        min_length=1,
        max_length=20_000,
        description="A Spark SQL condition over the columns of the result. A result for which it is false or NULL is not in this "
        "output. Absent: all results.",
        examples=["amount > 1000"],
    )
    renamed_from: Name | None = Field(
        None,
        description="Its former name. Stored events that were given to that output are in this one. May stay here for ever.",
        examples=["big"],
    )


_NOT_REAL_TIME = {
    "python": "Spark runs only SQL there",
    "deduplicate_within": "Spark keeps no ids of former events there",
    "watermark": "Spark takes each event by itself there",
}
"""The keys of a transform that real-time mode cannot have, and why."""


class Transform(StrictModel):
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
    mode: Literal["auto", "micro-batch", "real-time"] = Field(
        "auto",
        description="micro-batch: for every transform. real-time: shorter lag, for stateless SQL on Kafka only. auto: real-time "
        "where possible, else micro-batch.",
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

    tables: list[Name] = Field(
        default_factory=list,
        max_length=16,
        description="The tables of this file that it reads. SQL: each is a view of its name. Python: each is an argument, after "
        "the sources.",
        examples=[["customers"]],
    )
    outputs: dict[Name, Output] = Field(
        default_factory=dict,
        max_length=32,
        description="By name: outputs with filters of their own, for destinations that name one in `from`. A result may be in "
        "several. A result in none of them is dropped, unless a destination has no `from`.",
        examples=[{"large": {"where": "amount > 1000"}, "all": {}}],
    )

    @property
    def may_be_real_time(self) -> bool:
        """As far as the pipe file shows."""
        stateless = self.sql is not None and self.deduplicate_within is None and self.watermark is None
        open_mode = self.mode == "auto" and "interval" not in self.model_fields_set
        return stateless and (open_mode or self.mode == "real-time")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.sql is None) == (self.python is None):
            raise ValueError("exactly one of sql and python is needed")
        for key, reason in _NOT_REAL_TIME.items():
            if self.mode == "real-time" and getattr(self, key) is not None:
                remedy = f"Try: mode: micro-batch, or the transform without {key}"
                raise ValueError(f"{key} and mode: real-time exclude each other: {reason}. {remedy}")
        return self


class Destination(StrictModel):
    """A receiver of a pipe's events: exactly one of webhook, stream and topic."""

    name: Name = Field(description="Its name, unique in the pipe.", examples=["billing"])
    webhook: Webhook | None = Field(
        None, description="An HTTP endpoint.", examples=[{"url": "https://billing.example.org/hook"}]
    )
    stream: Name | None = Field(None, description="Another stream of this file.", examples=["large-orders"])
    topic: TopicTarget | None = Field(
        None,
        description="On Kafka: a topic of others, which Penstock does not create.",
        examples=[{"name": "erp.orders", "format": "plain"}],
    )
    output: Name | None = Field(
        None,
        alias="from",
        description="The output of the pipe's transform that it gets. Absent: every result of the transform.",
        examples=["large"],
    )
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
        if sum(one is not None for one in (self.webhook, self.stream, self.topic)) != 1:
            raise ValueError("exactly one of webhook, stream and topic is needed")
        return self


class Pipe(StrictModel):
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
        description="The receivers. Each of them gets every result of the transform, or, with `from`, those of one output. "
        "Without a transform each gets every event.",
        examples=[[{"name": "billing", "webhook": {"url": "https://billing.example.org/hook"}}]],
    )
    renamed_from: Name | None = Field(
        None,
        description="Its former name, only without a transform. Its destinations continue at the positions of the former ones, "
        "and get the events that wait for them. May stay here for ever.",
        examples=["shop"],
    )


class Removed(StrictModel):
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
    former: Any = {
        "renamed_from": True,
        "transform": {"outputs": {"__all__": {"renamed_from"}}},
        "destinations": {"__all__": {"renamed_from"}},
    }
    return hashlib.sha256(pipe.model_dump_json(exclude=former).encode()).hexdigest()[:12]


class PipeFile(StrictModel):
    """The whole file."""

    version: Literal[1] = Field(1, description="The version of this format.")

    @field_validator("version", mode="before")
    @classmethod
    def _not_newer(cls, found: object) -> object:
        if type(found) is int and found > 1:
            raise ValueError(newer_format("the pipe file", found, 1))
        return found

    brokers: dict[Name, BrokerUrl] = Field(
        default_factory=dict,
        description="By name. Further brokers on which streams and topics of others may be (`on`): the embedded log, Kafka or "
        "Kinesis, each by a URL as in `--broker`. All other topics are on the fleet's own broker (docs/brokers.md).",
        examples=[{"msk": "kafka://b-1.example.org:9098?security=/etc/penstock/msk.yaml"}],
    )
    streams: dict[Name, Stream] = Field(
        min_length=1, description="By name. Clients send events to a stream.", examples=[{"orders": {"id": "id"}}]
    )
    tables: dict[Name, Table] = Field(
        default_factory=dict,
        description="By name. Reference data that transforms join with their events.",
        examples=[{"customers": {"parquet": "customers.parquet", "columns": "id STRING, name STRING"}}],
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


def own_streams(pipes: PipeFile) -> dict[str, Stream]:
    """The streams whose topics are ours: ingest writes to them, `penstock apply` creates them."""
    return {name: stream for name, stream in pipes.streams.items() if stream.topic is None}


def is_retried(destination: Destination) -> bool:
    """Whether its events may be handed over to the global retrier. Events of an ordered destination wait in their stream."""
    webhook = destination.webhook
    return webhook is not None and bool(webhook.schedule) and webhook.order != "key"


def needs_retrier(pipes: PipeFile) -> bool:
    """Whether any destination of the file may use the global retrier."""
    return any(is_retried(destination) for pipe in pipes.pipes.values() for destination in pipe.destinations)


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
    try:
        file = validate_document(document, PipeFile)
    except BadConfiguration as error:
        raise BadConfiguration(
            error.problems + _broken_references(document, with_meant_keys(document.data, PipeFile))
        ) from None
    return document, file, _broken_references(document, document.data)


def _broken_references(document: Document, data: object) -> list[Problem]:
    return [document.problem(key, message) for key, message in find_broken_references(data)]


def load_pipes(path: Path) -> PipeFile:
    """Read and check a pipe file. Blocking. Raises BadConfiguration with file, line and key of every mistake."""
    _, file, problems = read_pipes(path)
    if problems:
        raise BadConfiguration(problems)
    return file
