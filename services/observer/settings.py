"""Settings of the observer: what every service has, and where its API listens."""

from typing import ClassVar

from pydantic import Field

from services.core.address import Address
from services.core.settings import Settings


class ObserverSettings(Settings):
    """Shows what could not be delivered, and why, on an HTTP API."""

    section: ClassVar[str] = "observer"

    listen: Address = Field(
        "127.0.0.1:8081", description="host:port of the API; it asks nobody who they are. Port 0: any free one."
    )
