"""A registry on a free port, over a store in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import ClientSession, web

from services.core.http.page_files import load_files
from services.core.pipe_file.pipes import PipeFile
from services.core.security.keys import ApiKey, KeyRing
from services.registry.app import OPENAPI
from services.registry.catalog import Catalog
from services.registry.confluent_api import ConfluentApi
from services.registry.fast_reads import Reads, serve_reads
from services.registry.http import MAX_BODY_BYTES, Access, answer
from services.registry.object_log import ObjectLog
from services.registry.objects import Objects
from services.registry.own_api import OwnApi
from services.registry.page import add_page
from services.registry.registrar import Registrar
from tests.support.memory_objects import MemoryObjects

PIPES = PipeFile.model_validate(
    {
        "streams": {"clicks": {}, "orders": {}},
        "pipes": {"web": {"sources": ["clicks"], "destinations": [{"name": "copy", "stream": "orders"}]}},
    }
)

_OPENAPI, _PAGE = OPENAPI.read_bytes(), load_files("services.registry.page")


@dataclass
class Client:
    """Asks a registry. base: its URL."""

    base: str
    session: ClientSession
    registrar: Registrar
    access: Access
    key: str | None = None

    async def ask(
        self, method: str, path: str, body: object = None, *, status: int = 200, headers: dict[str, str] | None = None
    ) -> Any:
        """The JSON of the answer, which must have this status."""
        head = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        async with self.session.request(
            method, self.base + path, json=body, headers={**head, **(headers or {})}
        ) as found:
            content = await found.read()
            assert found.status == status, (found.status, content)
            return orjson.loads(content)

    async def register(self, subject: str, schema: str, *, status: int = 200) -> Any:
        return await self.ask("POST", f"/subjects/{subject}/versions", {"schema": schema}, status=status)


@asynccontextmanager
async def running_registry(
    objects: Objects | None = None, keys: list[ApiKey] | None = None, pipes: PipeFile = PIPES
) -> AsyncIterator[Client]:
    """As `app.start` puts it together, without settings and management port."""
    catalog, access = Catalog(), Access()
    access.ring = None if keys is None else KeyRing(keys)
    log = ObjectLog(objects or MemoryObjects(), catalog.clear, catalog.apply)
    await log.load()
    registrar = Registrar(catalog, log)
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer, access.check])
    app.add_routes([*ConfluentApi(registrar).routes(), *OwnApi(registrar, pipes, _OPENAPI).routes()])
    add_page(app, _PAGE)
    async with serve_reads(app, Reads(catalog, access), "127.0.0.1:0") as address, ClientSession() as session:
        yield Client(f"http://{address}", session, registrar, access)
