"""Settings of expel. Each is a flag, a PENSTOCK_EXPEL_… variable and a key under `expel:`, in that order."""

from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from services.core.http.net_guard import NetPolicy, Network, parse_endpoints, parse_networks
from services.core.process.settings import Settings
from services.core.units import Duration, Size


def _names(value: Any) -> Any:
    return tuple(name.strip() for name in value.split(",") if name.strip()) if isinstance(value, str) else value


def _networks(value: Any) -> Any:
    return parse_networks(value) if isinstance(value, str) else value


def _endpoints(value: Any) -> Any:
    return parse_endpoints(value) if isinstance(value, str) else value


class ExpelSettings(Settings):
    """Delivers the events of pipes to their destinations."""

    section: ClassVar[str] = "expel"

    serve: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        (), description="Names of the pipes that this instance serves, comma-separated; empty: all pipes of the file."
    )
    allow_networks: Annotated[tuple[Network, ...], BeforeValidator(_networks)] = Field(
        (),
        description="Private networks that webhooks may reach, e.g. 127.0.0.0/8,10.1.0.0/16; empty: public addresses only.",
    )
    own_addresses: Annotated[tuple[tuple[str, int], ...], BeforeValidator(_endpoints)] = Field(
        (("127.0.0.1", 8080),),
        description="host:port of our own ingest, comma-separated; refused as destinations, because that would be a loop.",
    )
    buffer: Size = Field(
        32_000_000,
        description="Bytes of events in flight over all destinations, shared evenly; each gets at least one full request.",
    )
    lane_events: int = Field(
        10_000,
        ge=100,
        le=1_000_000,
        description="The most events per destination that are in flight, or delivered and not committed. So many may be "
        "delivered twice after a crash, or ten times as many if one slow event holds back the commit.",
    )
    commit_interval: Duration = Field(
        0.5,
        description="The longest time between two commits; a lane with many uncommitted events commits earlier.",
    )

    @property
    def policy(self) -> NetPolicy:
        """Where webhooks may go."""
        return NetPolicy(self.allow_networks, self.own_addresses)
