"""Settings of the observer: what every service has, and where its API listens."""

import re
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import AfterValidator, Field

from services.core.address import Address
from services.core.settings import Settings
from services.core.units import Duration

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")


def _names(text: str) -> str:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ValueError("names of hosts without a port are needed. Try: observer,observer.example.org")
    return ",".join(names).lower()


class ObserverSettings(Settings):
    """Shows how late and how complete each pipe is, what could not be delivered, and why: an HTTP API and a page."""

    section: ClassVar[str] = "observer"

    listen: Address = Field(
        "127.0.0.1:8081",
        description="host:port of the API. Beyond loopback it asks for a token with every request. Port 0: any free one.",
    )
    token_file: Path | None = Field(
        None,
        description="A file with one token a line, not readable by others: who has one may announce planned actions and, "
        "beyond loopback, read. It is needed there.",
    )
    names: Annotated[str, AfterValidator(_names)] = Field(
        "", description="Names by which clients beyond loopback ask it, comma-separated; addresses need none."
    )
    threshold: float = Field(
        0.01, ge=0, le=1, description="Share of a minute's events that may be missing before it is an alarm, 0 to 1."
    )
    final_after: Duration = Field(
        150.0,
        ge=65,
        description="How long after its end a minute is final at the earliest: late events come within a minute.",
    )
    alarm_url: str | None = Field(
        None,
        pattern="^https?://",
        max_length=2000,
        description="Webhook that alarms are sent to; absent: metrics and log only.",
    )
    alarm_secret: Path | None = Field(
        None, description="A file with one whsec_… per line that signs alarms; not readable by others."
    )
