"""The pipe file: streams, and pipes (sources -> transform -> destinations, many to many).

These models check the file. `penstock schema` prints their JSON Schema for editors.
"""

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from services.core.broker.connect import open_broker
from services.core.pipe_file.references import find_broken_references
from services.core.pipe_file.stream import Stream
from services.core.pipe_file.table import Table
from services.core.pipe_file.topic_of_others import NAME_PATTERN as NAME_PATTERN
from services.core.pipe_file.topic_of_others import Name, TopicTarget
from services.core.pipe_file.transform import Transform
from services.core.pipe_file.webhook import StrictModel, Webhook
from services.core.version import newer_format
from services.core.yaml_source import (
    BadConfiguration,
    Document,
    Problem,
    load_yaml,
    readable_part,
    validate_document,
    with_meant_keys,
)


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
        description="The output of the pipe's transform that the destination gets. Absent: every result of the transform.",
        examples=["large"],
    )
    start: Literal["earliest", "latest"] = Field(
        "earliest",
        description="The position at which a new destination begins. earliest: it receives all stored events. "
        "latest: only new ones.",
    )
    renamed_from: Name | None = Field(
        None,
        description="Its former name in this pipe. It continues at the former position, and gets the events that wait for the "
        "former name. May stay here for ever.",
        examples=["invoices"],
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        self.require_one_of("webhook", "stream", "topic")
        return self


class Pipe(StrictModel):
    """Sources, an optional transform, destinations."""

    sources: list[Name] = Field(
        min_length=1, max_length=32, description="The streams that the pipe reads.", examples=[["orders"]]
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
        description="Its former name, only without a transform. Its destinations continue at their former positions, and get the "
        "events that wait for the former names. May stay here for ever.",
        examples=["shop"],
    )


class Removed(StrictModel):
    """The decision about events that wait for a destination which this file no longer has: exactly one of these."""

    deliver_to: LaneName | None = Field(
        None,
        description="The pipe/destination of this file that gets the events. For a new name of the same destination, use "
        "`renamed_from` instead.",
        examples=["large-orders/billing"],
    )
    bury: str | None = Field(
        None,
        min_length=1,
        max_length=500,
        description="The events go to the pipe's dead letters. This text is the reason.",
        examples=["the receiver was closed"],
    )
    drop: str | None = Field(
        None,
        min_length=1,
        max_length=500,
        description="Nobody gets the events. This text is the reason, in the audit.",
        examples=["events of a test"],
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        self.require_one_of("deliver_to", "bury", "drop")
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
    document, file, shape, references = _read(path)
    if shape or file is None:
        raise BadConfiguration(shape + references)
    return document, file, references


def read_what_is_right(path: Path) -> tuple[Document, PipeFile | None, list[Problem]]:
    """As `read_pipes`, but a wrong shape is among the problems, and the pipe file is without the parts that have it (None: too
    little is left). So further checks find their mistakes in the same run. Raises BadConfiguration when nothing can be read."""
    document, file, shape, references = _read(path)
    return document, file, shape + references


def _read(path: Path) -> tuple[Document, PipeFile | None, list[Problem], list[Problem]]:
    """The file without its mistakes in shape, these mistakes, and the broken references. Raises BadConfiguration."""
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
        return document, validate_document(document, PipeFile), [], _broken_references(document, document.data)
    except BadConfiguration as error:
        references = _broken_references(document, with_meant_keys(document.data, PipeFile))
        return document, readable_part(document.data, PipeFile), error.problems, references


def _broken_references(document: Document, data: object) -> list[Problem]:
    return [document.problem(key, message) for key, message in find_broken_references(data)]


def load_pipes(path: Path) -> PipeFile:
    """Read and check a pipe file. Blocking. Raises BadConfiguration with file, line and key of every mistake."""
    _, file, problems = read_pipes(path)
    if problems:
        raise BadConfiguration(problems)
    return file
