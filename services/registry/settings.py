"""Settings of the registry."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from services.core.http.address import Address, HostNames
from services.core.process.settings import Settings
from services.registry.objects import check_url


class RegistrySettings(Settings):
    """Keeps the schemas of streams, and refuses a schema that would break a reader."""

    section: ClassVar[str] = "registry"

    listen: Address = Field(
        "127.0.0.1:8084", description="host:port of the API and the page. Without keys: loopback only."
    )
    store: str = Field(
        "file:///var/lib/penstock/schemas",
        description="URL of the store of the schemas: file:///folder, s3://bucket/prefix, gs://bucket/prefix or "
        "az://account/container/prefix. Several registries may share a store.",
    )
    keys: Path | None = Field(
        None, description="The keys file that `penstock keys` writes. Without one, clients need no key."
    )
    names: HostNames = Field(
        "",
        description="Host names of the API for clients beyond loopback, comma-separated; IP addresses are always accepted.",
    )

    @field_validator("store")
    @classmethod
    def _store(cls, url: str) -> str:
        check_url(url)
        return url
