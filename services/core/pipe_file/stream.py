"""The pipe file's `streams`: each is a topic of ours, or one of others. A part of the model in `pipes.py`."""

from typing import Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from services.core.broker.several.brokers import DEFAULT
from services.core.pipe_file.topic_of_others import FromHeader, Name, Place, TopicName
from services.core.pipe_file.webhook import StrictModel
from services.core.units import Duration

NO_SINGLE_FIELD = (
    "send CloudEvents with an id of your own, or make the id in a transform, or leave `id` out "
    "(docs/ingest.md#an-id-of-several-fields)"
)
"""What to do where no single field of the payload names an event."""


class Stream(StrictModel):
    """A topic that people name. Clients send events to it, or others write to it (`topic`)."""

    topic: TopicName | None = Field(
        None,
        description="On Kafka: an existing topic that others write, by its name on the cluster. Penstock only reads this topic, "
        "and ingest accepts no events for it. `id`, `key`, `time`, `type`, `format` and `tombstones` say how a record becomes an "
        "event (docs/existing-topics.md).",
        examples=["billing.invoices"],
    )
    on: Name | None = Field(
        None,
        description="The broker of the stream, by its name in `brokers`. Absent: the fleet's own, that of `--broker`.",
        examples=["msk"],
    )
    partitions: int = Field(
        4,
        ge=1,
        le=1024,
        description="The minimum number of partitions of the topic. It limits the instances that work at once. Events of one key "
        "are in one partition. A topic with more partitions keeps them.",
        examples=[8],
    )
    max_partitions: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="On Kafka: the autoscaler may add partitions up to this number, if no event ever had a key. Absent: it only "
        "reports that more partitions are needed.",
        examples=[32],
    )
    shards: int | None = Field(
        None,
        ge=1,
        description="On Kinesis: the number of shards at the creation; fewer than partitions if an autoscaler will split them. "
        "Absent: as many as partitions.",
        examples=[2],
    )
    retention: Duration = Field(
        7 * 86400.0,
        description="How long events are kept. With `compact`: an event that a newer one has replaced may be removed after this "
        "time.",
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
        "event with the same id is a duplicate, which receivers drop. To combine several fields, see "
        "docs/ingest.md#an-id-of-several-fields. Without this key in the pipe file, or without the field in "
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
        description="Only with `topic`: the format of its records' values. A value that is not JSON, or not text in UTF-8, "
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
        "here are only in `value`, and not in a result of columns.",
        examples=["carrier STRING, dep_delay INT"],
    )

    @property
    def home(self) -> str:
        """The name of the broker that it lives on."""
        return self.on or DEFAULT

    @field_validator("id", "key", "time", "type", mode="before")
    @classmethod
    def _is_no_list(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, list):
            remedy = NO_SINGLE_FIELD if info.field_name == "id" else "the name of one field"
            raise ValueError(f"is one field, not a list: several are not combined. Try: {remedy}")  # noqa: TRY004
        return value

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
