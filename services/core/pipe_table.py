"""The pipe file's `tables`: reference data that transforms join with their events. A part of the model in `pipes.py`."""

from typing import Annotated, Self
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, Field, model_validator

from services.core.pipe_webhook import Secret, StrictModel
from services.core.units import Duration

_SCHEME = "jdbc:postgresql://"


def _without_secret(url: str) -> str:
    """Never shows the URL: it may have a password."""
    if not url.startswith(_SCHEME):
        raise ValueError(f"a URL of PostgreSQL is needed. Try: {_SCHEME}db.example.org:5432/shop")
    parts = urlsplit(url.removeprefix("jdbc:"))
    if "@" in parts.netloc or {name.lower() for name, _ in parse_qsl(parts.query, keep_blank_values=True)} & {
        "user",
        "password",
    }:
        raise ValueError(
            "user and password must not be in the URL. Try: user: …, and password: {file: database.secret}"
        )
    return url


class Jdbc(StrictModel):
    """A query on a database, which a transform service sends at each refresh."""

    url: Annotated[str, AfterValidator(_without_secret)] = Field(
        max_length=2000,
        description="jdbc:postgresql://host:port/database, with options of the driver, e.g. ?sslmode=verify-full.",
        examples=["jdbc:postgresql://db.example.org:5432/shop"],
    )
    query: str = Field(
        max_length=20_000,
        description="A SELECT in the database's own SQL.",
        examples=["SELECT id, name FROM customers"],
    )
    user: str = Field(max_length=200, description="A user who may read only.", examples=["penstock"])
    password: Secret | None = Field(
        None, description="The place of the password. Absent: none is sent.", examples=[{"file": "database.secret"}]
    )


class Table(StrictModel):
    """Reference data: small, and kept in memory. Transforms that name it see it as a view. Exactly one of parquet and jdbc."""

    columns: str = Field(
        max_length=20_000,
        description="Its columns, as Spark DDL. Others are left out. A table with a value that does not fit is not taken over.",
        examples=["id STRING, name STRING"],
    )
    parquet: str | None = Field(
        None,
        max_length=2000,
        description="A file or folder: a path, relative to the pipe file, or a URI, e.g. s3a://bucket/customers.",
        examples=["customers.parquet"],
    )
    jdbc: Jdbc | None = Field(
        None,
        description="A query on a database.",
        examples=[
            {
                "url": "jdbc:postgresql://db.example.org:5432/shop",
                "query": "SELECT id, name FROM customers",
                "user": "penstock",
                "password": {"file": "database.secret"},
            }
        ],
    )
    refresh: Duration = Field(
        60.0,
        ge=1.0,
        description="How often it is read again. After a failure the last content stays, and the next attempt is sooner.",
        examples=["5m"],
    )
    max_rows: int = Field(
        100_000,
        ge=1,
        le=1_000_000,
        description="A larger table is refused, and the last content stays.",
        examples=[500_000],
    )

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if (self.parquet is None) == (self.jdbc is None):
            raise ValueError("exactly one of parquet and jdbc is needed. Try: {parquet: customers.parquet, columns: …}")
        return self
