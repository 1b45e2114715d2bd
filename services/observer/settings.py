"""Settings of the observer."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.core.http.address import Address, HostNames
from services.core.process.settings import Settings
from services.core.units import Duration


class ObserverSettings(Settings):
    """Shows how late and how complete each pipe is, what could not be delivered, and why: an HTTP API and a page."""

    section: ClassVar[str] = "observer"

    listen: Address = Field(
        "127.0.0.1:8081",
        description="host:port of the API. Beyond loopback every request needs a token. Port 0: any free port.",
    )
    token_file: Path | None = Field(
        None,
        description="A file with one token per line, not readable by others. A client with a token may announce planned actions "
        "and, beyond loopback, read. Required beyond loopback.",
    )
    names: HostNames = Field(
        "",
        description="Host names of the API for clients beyond loopback, comma-separated; IP addresses are always accepted.",
    )
    threshold: float = Field(
        0.01, ge=0, le=1, description="The share of a minute's events, 0 to 1, that may be missing without an alarm."
    )
    final_after: Duration = Field(
        150.0,
        ge=65,
        description="The shortest time from the end of a minute until it is final: late events arrive within a minute.",
    )
    alarm_url: str | None = Field(
        None,
        pattern="^https?://",
        max_length=2000,
        description="Webhook that receives the alarms; empty: metrics and log only.",
    )
    alarm_secret: Path | None = Field(
        None, description="A file with one whsec_… per line that signs alarms; not readable by others."
    )
