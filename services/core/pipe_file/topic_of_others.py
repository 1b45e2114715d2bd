"""The parts of the pipe file about topics of others: topics on Kafka that Penstock neither creates nor changes."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from services.core.broker.several.brokers import DEFAULT
from services.core.pipe_file.webhook import StrictModel


def _field_path(value: str) -> str:
    if not value or any(not part for part in value.split(".")):
        raise ValueError("a field name is needed; nested fields are joined by dots. Try: id or meta.id")
    return value


def _topic_name(value: str) -> str:
    if value in (".", ".."):
        raise ValueError("is no name that Kafka allows. Try: the name that kafka-topics --list shows")
    return value


NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
"""At most 63 lower-case letters, digits, - and _. No dots: they separate the parts of topic names."""

FieldPath = Annotated[str, AfterValidator(_field_path), Field(max_length=200)]
"""A field of the JSON payload; nested fields joined by dots."""

TopicName = Annotated[str, AfterValidator(_topic_name), Field(pattern=r"^[A-Za-z0-9._-]{1,249}$")]
"""The name of a topic on the Kafka cluster, without the prefix of the fleet: any name that Kafka allows."""


class FromHeader(StrictModel):
    """A value in a header of the Kafka record."""

    header: str = Field(
        min_length=1,
        max_length=200,
        description="The name of the header. Of several headers with this name the first one counts.",
        examples=["invoice-id"],
    )


Place = FieldPath | FromHeader
"""Where a record of a topic of others has a value."""


class TopicTarget(StrictModel):
    """A topic of others, as a destination."""

    name: TopicName = Field(
        description="The name of the topic on the Kafka cluster, without the prefix of the fleet. It must exist.",
        examples=["erp.orders"],
    )
    on: Name | None = Field(
        None,
        description="The broker of `brokers` that the topic is on, a Kafka. Absent: the fleet's own, that of `--broker`.",
        examples=["msk"],
    )
    format: Literal["cloudevents", "plain"] = Field(
        "cloudevents",
        description="cloudevents: the payload, and the event's attributes as headers (the Kafka binding of CloudEvents, binary "
        "mode). plain: only the key and the payload.",
        examples=["plain"],
    )

    @property
    def home(self) -> str:
        """The name of the broker that it is on."""
        return self.on or DEFAULT
