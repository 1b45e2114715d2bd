"""Looks at what answers over the network: the observer's API, and the servers of the destinations (without a request)."""

import asyncio
import ssl
from collections import defaultdict
from contextlib import suppress

from yarl import URL

from services.core.certificate import until_of
from services.fleet.doctor.facts import Certificate, Endpoint, Facts
from services.fleet.doctor.looks.bounds import describe
from services.fleet.doctor.looks.files import webhooks_of
from services.fleet.observer_client import Observer, get_json
from services.fleet.problem import CommandFailed

CONNECT_S = 4.0
OBSERVER_S = 6.0


async def look_at_observer(facts: Facts, observer: Observer) -> None:
    """The health of each pipe, as the observer judges it. An observer that does not answer is a fact."""
    found = facts.observer
    found.address = observer.address
    try:
        async with asyncio.timeout(OBSERVER_S):
            body = await get_json(observer, "/v1/pipes", {})
    except CommandFailed as error:
        found.problem = error.what
    except TimeoutError:
        found.problem = f"the observer at {observer.address} does not answer within {OBSERVER_S:g} s"
    else:
        found.pipes = tuple(body.get("pipes", ()))
        found.catching_up = bool(body.get("catching_up"))
        found.behind = str(body.get("problem") or "")


async def look_at_receivers(facts: Facts) -> None:
    """Connect to the server of each destination, with TLS where it has it, and close the connection. No request is sent."""
    assert facts.pipes is not None
    lanes: defaultdict[URL, list[str]] = defaultdict(list)
    for lane, webhook in webhooks_of(facts.pipes):
        with suppress(ValueError):
            url = URL(webhook.url)
            if url.host:
                lanes[url.origin()].append(lane)
    facts.endpoints = tuple(await asyncio.gather(*(_connect(url, tuple(names)) for url, names in lanes.items())))


async def _connect(url: URL, lanes: tuple[str, ...]) -> Endpoint:
    context = None
    if url.scheme == "https":  # to read an expired certificate, too, it is not verified here
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    assert url.host is not None
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(
                url.host, url.port, ssl=context, server_hostname=url.host if context else None
            )
    except TimeoutError:
        return Endpoint(str(url), lanes, f"no connection within {CONNECT_S:g} s")
    except (OSError, ssl.SSLError) as error:
        return Endpoint(str(url), lanes, describe(error))
    try:
        return Endpoint(str(url), lanes, "", _certificate_of(writer, str(url), lanes))
    finally:
        writer.transport.abort()


def _certificate_of(writer: asyncio.StreamWriter, url: str, lanes: tuple[str, ...]) -> Certificate | None:
    tls: ssl.SSLObject | None = writer.get_extra_info("ssl_object")
    der = None if tls is None else tls.getpeercert(binary_form=True)
    if der is None:
        return None
    try:
        return Certificate(f"the certificate of {url}", until_of(der), lanes)
    except ValueError:
        return None
