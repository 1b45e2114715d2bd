"""The pipe file's `tables`: reference data that transforms join with their events. A part of the model in `pipes.py`."""

from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from services.core.pipe_file.webhook import Secret, StrictModel
from services.core.units import Duration

_SCHEME = "jdbc:postgresql://"
_URL_OPTIONS = (
    *("ssl", "sslmode", "sslrootcert", "sslcert", "sslkey", "sslnegotiation", "channelBinding", "gssEncMode"),
    *("ApplicationName", "currentSchema", "options", "preferQueryMode", "prepareThreshold"),
    *("connectTimeout", "loginTimeout", "socketTimeout", "tcpKeepAlive"),
    *("targetServerType", "loadBalanceHosts", "hostRecheckSeconds"),
)
"""Of the driver. None has a secret: the URL is in Spark's plans and in logs. None names a class to load."""


def _without_secret(url: str) -> str:
    """Never shows the URL, nor the value of an option: it may have a password."""
    if not url.startswith(_SCHEME):
        raise ValueError(f"a URL of PostgreSQL is needed. Try: {_SCHEME}db.example.org:5432/shop")
    place, _, options = url.partition("?")  # as the driver divides it
    names = [name if equals else "…" for name, equals, _ in (one.partition("=") for one in options.split("&") if one)]
    if "@" in place or {name.lower() for name in names} & {"user", "password"}:
        raise ValueError(
            "user and password must not be in the URL. Try: user: …, and password: {file: database.secret}"
        )
    if "sslpassword" in map(str.lower, names):
        raise ValueError("sslpassword must not be in the URL. Try: sslkey=… with a key in PKCS-8 without a password")
    if other := [name for name in names if name not in _URL_OPTIONS]:
        shown = ", ".join(name if name.isidentifier() and len(name) < 50 else "…" for name in other)
        raise ValueError(f"the URL has options that are not known here: {shown}. Try: {', '.join(_URL_OPTIONS)}")
    return url


def _without_credentials(place: str) -> str:
    """Never shows the place: it may have a key."""
    parts = urlsplit(place)
    if parts.scheme in ("s3", "s3n"):
        raise ValueError(f"{parts.scheme}:// is not known to Spark. Try: s3a://bucket/customers")
    if "@" in parts.netloc:
        raise ValueError("credentials must not be in the URI. Try: s3a://bucket/customers, and AWS's own variables")
    return place


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
        description="Its columns, as Spark DDL. Other columns are ignored. Content with a value that does not fit is not used.",
        examples=["id STRING, name STRING"],
    )
    parquet: Annotated[str, AfterValidator(_without_credentials)] | None = Field(
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

    @property
    def is_on_this_host(self) -> bool:
        """Whether it is a file or folder, which the executors of a cluster do not see."""
        return self.parquet is not None and urlsplit(self.parquet).scheme in ("", "file")

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        self.require_one_of("parquet", "jdbc", remedy="{parquet: customers.parquet, columns: …}")
        return self


def not_on_cluster(master: str) -> str:
    """Why a table that `is_on_this_host` is refused. master: Spark's, of a cluster."""
    return (
        f"the executors of {master} are on other hosts, and this is a folder of this host. "
        "Try: an object store (s3a://bucket/customers), or jdbc"
    )
