"""Settings of the observer: what every service has, and where its API listens."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.core.address import Address
from services.core.settings import Settings
from services.core.units import Duration


class ObserverSettings(Settings):
    """Shows how late and how complete each pipe is, what could not be delivered, and why: an HTTP API and a page."""

    section: ClassVar[str] = "observer"

    listen: Address = Field(
        "127.0.0.1:8081", description="host:port of the API; it asks nobody who they are. Port 0: any free one."
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
