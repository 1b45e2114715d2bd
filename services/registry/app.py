"""The registry as a service: the log of schemas, the APIs, the page, a management port. It needs no broker."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import structlog
from aiohttp import web

from services.core import metrics
from services.core.backoff import Backoff
from services.core.http.address import is_loopback, parse_address
from services.core.http.page_files import load_files
from services.core.pipe_file.pipes import load_pipes
from services.core.process.expected import show_expected
from services.core.process.lifecycle import Supervision
from services.core.process.management import serve_management
from services.core.process.startup import Readiness, tune_garbage_collector
from services.core.security.key_watch import watch_keys
from services.core.yaml_source import BadConfiguration, Problem
from services.registry.catalog import Catalog
from services.registry.confluent_api import ConfluentApi
from services.registry.fast_reads import Reads, serve_reads
from services.registry.http import MAX_BODY_BYTES, Access, answer
from services.registry.object_log import ObjectLog
from services.registry.objects import StoreUnavailable, open_objects
from services.registry.own_api import OwnApi
from services.registry.page import add_page
from services.registry.registrar import Registrar
from services.registry.settings import RegistrySettings

OPENAPI = Path(__file__).with_name("openapi.json")

log = structlog.get_logger()


async def start(settings: RegistrySettings, supervision: Supervision) -> None:
    """Run until the stop; there is nothing to drain. Raises BadConfiguration, OSError."""
    pipes = await asyncio.to_thread(load_pipes, settings.pipes)
    show_expected(pipes, ledger=settings.ledger, registry=True)  # of two, the one that is left says so
    if not settings.schemas:
        hint = "if this setting is false in all services, PenstockComponentDown ends one day after the last registry stopped. "
        hint += "Try: PENSTOCK_SCHEMAS=true for all services"
        log.warning("setting_schemas_is_false", hint=hint)
    loopback = is_loopback(parse_address(settings.listen)[0])
    access = Access(frozenset(settings.names.split(",")) - {""}, loopback=loopback)
    keys = watch_keys("registry", settings.keys, access) if settings.keys is not None else None
    if keys is not None:
        await keys.load()
    elif not loopback:
        message = f"other machines can reach {settings.listen}, so clients need keys. Try: --keys keys.yaml"
        raise BadConfiguration([Problem("registry", "keys", message)])
    openapi = await asyncio.to_thread(OPENAPI.read_bytes)
    page = await asyncio.to_thread(load_files, "services.registry.page")
    readiness, stopping = Readiness(), supervision.stopping
    catalog = Catalog()
    entries = ObjectLog(open_objects(settings.store), catalog.clear, catalog.apply)
    registrar = Registrar(catalog, entries)
    reads = Reads(catalog, access)

    def forget() -> None:
        registrar.forget()
        reads.forget()

    entries.on_reload = forget
    metrics.REGISTRY_ENTRIES.set_function(lambda: entries.number)
    metrics.REGISTRY_SCHEMAS.set_function(lambda: len(catalog.by_id))
    async with AsyncExitStack() as stack:
        management = await stack.enter_async_context(serve_management(settings.management, readiness.why_not))
        log.info("started", management=management)
        if not await load_when_reachable(entries, readiness, stopping):
            return
        log.info("loaded", store=entries.url, entries=entries.number, schemas=len(catalog.by_id))
        tune_garbage_collector()
        if keys is not None:
            supervision.run(keys.run(stopping), "keys")
        checking = supervision.run(entries.run(stopping), "store")
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[answer, access.check])
        app.add_routes([*ConfluentApi(registrar).routes(), *OwnApi(registrar, pipes, openapi).routes()])
        add_page(app, page)
        address = await stack.enter_async_context(_listen(settings.listen, app, reads))
        log.info("listening", address=address)
        readiness.check, readiness.reason = lambda: _why_not_ready(entries), None
        await stopping.wait()
        readiness.reason = "stopping"
        await checking


async def load_when_reachable(entries: ObjectLog, readiness: Readiness, stopping: asyncio.Event) -> bool:
    """Load the log, again and again until the store answers. False: `stopping` came first."""
    retry = Backoff(0.2, 5.0)
    while not stopping.is_set():
        try:
            await _load(entries)
        except StoreUnavailable as error:
            readiness.set_reason(f"the store cannot be read: {error}")
            if retry.fail():
                log.warning("store_unavailable", error=str(error), hint="the store is read again")
            await retry.wait(stopping)
        else:
            return True
    return False


async def _load(entries: ObjectLog) -> None:
    """Nothing of what is loaded is garbage, and looking for some takes a third of the time."""
    gc.disable()
    try:
        await entries.load()
    finally:
        gc.enable()


def _why_not_ready(entries: ObjectLog) -> str | None:
    if entries.incomplete:
        return next(iter(entries.damage.values()), "the store is being read again")
    return None


@asynccontextmanager
async def _listen(listen: str, app: web.Application, reads: Reads) -> AsyncIterator[str]:
    try:
        async with serve_reads(app, reads, listen) as bound:
            yield bound
    except OSError as error:
        raise OSError(
            f"{listen}: {error.strerror}. Try: another --listen, or end the process that listens there"
        ) from error
