"""A pipe's `transform` and its outputs. A part of the model in `pipes.py`."""

from typing import Literal, Self

from pydantic import Field, model_validator

from services.core.pipe_file.topic_of_others import Name
from services.core.pipe_file.webhook import StrictModel
from services.core.units import Duration


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
        description="Its former name: stored events of the former output are in this one. May stay here for ever.",
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
        "if possible, else micro-batch.",
    )
    interval: Duration = Field(0.2, description="At most one micro-batch per interval.", examples=["1s"])
    max_events: int = Field(
        20_000, ge=1, description="The most events per micro-batch, also when there is a backlog.", examples=[100_000]
    )
    deduplicate_within: Duration | None = Field(
        None,
        description="Drop an event if another event of its stream had the same id within this time before (micro-batch only). "
        "Absent: keep it; receivers can recognise it by its id.",
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
        description="The tables of this file that the transform reads. SQL: each is a view of its name. Python: each is an "
        "argument, after the sources.",
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
        stateless = all(getattr(self, key) is None for key in _NOT_REAL_TIME)
        open_mode = self.mode == "auto" and "interval" not in self.model_fields_set
        return stateless and (open_mode or self.mode == "real-time")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        self.require_one_of("sql", "python")
        for key, reason in _NOT_REAL_TIME.items():
            if self.mode == "real-time" and getattr(self, key) is not None:
                remedy = f"Try: mode: micro-batch, or the transform without {key}"
                raise ValueError(f"{key} and mode: real-time exclude each other: {reason}. {remedy}")
        return self
