"""Settings of ingest, and the checks that need more than one of them."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.core.http.address import Address, is_loopback, parse_address
from services.core.process.settings import Settings
from services.core.units import Duration, Size
from services.core.yaml_source import BadConfiguration, Problem
from services.ingest.access import QUOTA_BYTES
from services.ingest.event_fields import MAX_IDS
from services.ingest.json_events import Limits


class IngestSettings(Settings):
    """Receives events over HTTP and stores them durably before it answers."""

    section: ClassVar[str] = "ingest"

    listen: Address = Field("127.0.0.1:8080", description="host:port for events. Without keys: loopback only.")
    reuse_port: bool = Field(True, description="Whether ingest processes may share the port (true or false).")
    keys: Path | None = Field(
        None, description="The keys file that `penstock keys` writes. Without one, clients need no key."
    )
    max_event: Size = Field(
        1_000_000, description="Largest event, e.g. 1MB. Each MB may hold the other clients for 30 ms."
    )
    max_body: Size = Field(5_000_000, description="Largest body of a request, before and after unpacking, e.g. 5MB.")
    max_events: int = Field(10_000, ge=1, le=MAX_IDS, description="Most events in one request.")
    quota_bytes: Size = Field(
        QUOTA_BYTES,
        description="Unpacked bytes of a body that count as one event of the key's rate, if the body has fewer events than that.",
    )
    max_connections: int = Field(1000, ge=1, description="Most open connections. Further ones get 503.")
    max_in_flight: Size = Field(
        32_000_000,
        description="Most bytes of all requests, from arrival until the client has the answer. Further requests get 503.",
    )
    head_timeout: Duration = Field(10.0, description="Time for the head of a request to arrive, e.g. 10s.")
    body_timeout: Duration = Field(30.0, description="Time for the body of a request to arrive, e.g. 30s.")
    idle_timeout: Duration = Field(75.0, description="How long a connection may wait for its next request, e.g. 75s.")

    @property
    def limits(self) -> Limits:
        """What one request may hold."""
        return Limits(self.max_events, self.max_event, self.max_body)

    def address(self) -> tuple[str, int]:
        """Host and port of `listen`. Raises BadConfiguration when others could reach it without a key."""
        host, port = parse_address(self.listen)
        if self.keys is None and not is_loopback(host):
            problem = f"without API keys only this machine may send, and {host} is not a loopback address. "
            problem += "Try: listen: 127.0.0.1:8080, or keys: keys.yaml made by `penstock keys create`"
            raise BadConfiguration([Problem("ingest", "listen", problem)])
        return host, port
