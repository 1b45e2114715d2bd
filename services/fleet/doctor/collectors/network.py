"""Looks at what answers over the network: the observer's API, and the servers of the destinations (without a request)."""

import asyncio
import ssl
from collections import defaultdict
from contextlib import suppress
from urllib.parse import quote

import msgspec
from yarl import URL

from services.core.group_report import GroupReport
from services.core.security.expiry import until_of
from services.fleet.doctor.collectors.bounds import bounded, describe
from services.fleet.doctor.collectors.files import webhooks_of
from services.fleet.doctor.facts import Certificate, Endpoint, Facts
from services.fleet.observer_client import Observer, get_json
from services.fleet.problem import CommandFailed

CONNECT_S = 4.0
OBSERVER_S = 6.0
DETAILS_S = 3.0
_WHERE = ("node", "destination", "text")
"""The words of a drift, for a person."""


async def collect_observer(facts: Facts, observer: Observer) -> None:
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
        await asyncio.gather(
            bounded(facts, "the autoscaler's reports", DETAILS_S, _collect_groups(facts, observer)),
            bounded(facts, "changed payload fields", DETAILS_S, _collect_drifts(facts, observer)),
        )


async def _collect_groups(facts: Facts, observer: Observer) -> None:
    with suppress(CommandFailed):  # an observer of 0.1 has no such path
        body = await get_json(observer, "/v1/scaling", {})
        facts.observer.groups = tuple(msgspec.convert(one, GroupReport) for one in body["groups"])


async def _collect_drifts(facts: Facts, observer: Observer) -> None:
    """Only of pipes that are not healthy: a drift makes a pipe degraded, unless it was planned."""
    found: list[tuple[str, str]] = []
    for one in facts.observer.pipes:
        if one.get("health") == "healthy" or one.get("planned") is not None:
            continue
        pipe = str(one["pipe"])
        body = await get_json(observer, f"/v1/pipes/{quote(pipe, safe='')}/fields", {})
        found += [(pipe, " ".join(filter(None, map(drift.get, _WHERE)))) for drift in body["drifts"]]
    facts.observer.drifts = tuple(found)


async def collect_receivers(facts: Facts) -> None:
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
