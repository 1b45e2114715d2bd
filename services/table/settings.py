"""Settings of the table service."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from services.core.http.address import Address, is_loopback, parse_address
from services.core.process.settings import Settings
from services.core.units import Duration
from services.core.yaml_source import BadConfiguration, Problem


class TableSettings(Settings):
    """Serves compacted streams as tables, over HTTP."""

    section: ClassVar[str] = "table"

    listen: Address = Field("127.0.0.1:8082", description="host:port of the tables. Without keys: loopback only.")
    keys: Path | None = Field(
        None,
        description="The keys file that `penstock keys` writes. A key needs the scope read. Without one: no key needed.",
    )
    data: Path = Field(
        Path("/var/lib/penstock-table"),
        description="The folder of the tables, on a local disk. Each process needs its own.",
    )
    snapshot_from: str | None = Field(
        None,
        pattern=r"^https?://[^/@\s?#]+$",
        description="Another replica, or a balancer of them, e.g. http://table:80. A table without a file copies from there.",
    )
    snapshot_key: Path | None = Field(
        None,
        description="A file with an API key of the scope read for `snapshot_from`, not readable by others.",
    )
    wait: Duration = Field(5.0, ge=0, le=60, description="How long a read with at_least waits for the table, e.g. 5s.")
    behind: Duration = Field(
        10.0,
        gt=0,
        description="A table that is further behind its stream is not ready, and answers with 503, e.g. 10s.",
    )
    max_connections: int = Field(1000, ge=1, description="Most open connections. Further ones are closed.")
    max_changes: int = Field(100, ge=1, description="Most clients that follow changes. Further ones get 503.")

    def address(self) -> tuple[str, int]:
        """Host and port of `listen`. Raises BadConfiguration when others could reach it without a key."""
        host, port = parse_address(self.listen)
        if self.keys is None and not is_loopback(host):
            problem = f"without API keys only this machine may read, and {host} is not a loopback address. "
            problem += "Try: listen: 127.0.0.1:8082, or keys: keys.yaml made by `penstock keys create --scope read`"
            raise BadConfiguration([Problem("table", "listen", problem)])
        return host, port
