"""TLS to receivers, against certificates made here: broken, events go to whoever sits in between, or to nobody."""

import asyncio
import socket
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from prometheus_client import REGISTRY

from services.core.http import client as http_client
from services.core.http.client import HttpClient
from services.core.http.failure import classify
from services.core.http.net_guard import NetPolicy, parse_networks
from services.core.http.resolver import AddressInfo, Resolver
from services.core.pipe_file.webhook import Tls, Webhook
from services.core.security.credentials import BadCredential, LiveValue, read_credentials, read_tls, watch_credentials
from tests.support.authority import Authority
from tests.support.serving import serve_on_loopback

LOCAL = NetPolicy(allow=parse_networks("127.0.0.0/8"))
NAME = "receiver.test"


def _lookup(*_arguments: object, **_options: object) -> list[AddressInfo]:
    return [(2, 1, 6, "", ("127.0.0.1", 0))]


OURS = Resolver(_lookup)
"""Every name is this machine's."""


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of NAME, self-signed, with its key in the same file."""
    path = tmp_path_factory.mktemp("tls") / "receiver.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={NAME}", "-addext", f"subjectAltName=DNS:{NAME}"]
    subprocess.run([*command, "-keyout", path, "-out", f"{path}.crt"], check=True, capture_output=True)
    path.write_bytes(path.read_bytes() + Path(f"{path}.crt").read_bytes())
    return path


@pytest.fixture
def trusted(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if an authority of this machine had signed it."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    http_client._tls_context.cache_clear()
    yield
    http_client._tls_context.cache_clear()


@asynccontextmanager
async def open_client(
    certificate: Path, host: str, *, tls: LiveValue[ssl.SSLContext] | None = None, clients: Path | None = None
) -> AsyncIterator[tuple[HttpClient, list[bytes]]]:
    """A client of a receiver with this certificate, which it reaches under the name `host`; and what that was sent.

    clients: the authority of the certificates that the receiver asks for.
    """
    bodies: list[bytes] = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(text="thanks")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(clients)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/hook", handle)
    async with serve_on_loopback(app, tls=context) as port:
        url = f"https://{host}:{port}/hook"
        find_tls = None if tls is None else lambda: tls.current
        with HttpClient(url, policy=LOCAL, resolver=OURS, timeout=20, headers={}, tls=find_tls) as client:
            yield client, bodies


@pytest.mark.usefixtures("trusted")
async def test_a_trusted_receiver_gets_everything(certificate: Path) -> None:
    """Broken: no https receiver can be reached, or a body larger than a TLS record arrives in part."""
    body = b"x" * 3_000_000
    async with open_client(certificate, NAME) as (client, bodies):
        for _ in range(2):
            assert (await client.post(b"", body))[:3] == (200, None, b"thanks")
        assert bodies == [body, body]
        assert len(client._idle) == 1


@pytest.mark.usefixtures("trusted")
async def test_a_certificate_of_another_name_is_refused(certificate: Path) -> None:
    """Broken: anybody with a valid certificate of their own gets our events."""
    async with open_client(certificate, "other.test") as (client, bodies):
        with pytest.raises(ssl.SSLCertVerificationError) as caught:
            await client.post(b"", b"{}")
        assert bodies == []
    failure = classify(caught.value)
    assert (failure.reason, failure.recoverable) == ("tls", True)


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The authority that receivers and we have in common."""
    return Authority(tmp_path_factory.mktemp("company") / "ours")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("company") / "other")


async def held(folder: Path, **files: Path) -> LiveValue[ssl.SSLContext]:
    return LiveValue((await asyncio.to_thread(read_tls, Tls.model_validate(files), folder))[1])


async def test_a_receiver_with_a_companys_own_authority(company: Authority, certificate: Path, tmp_path: Path) -> None:
    """Broken: a receiver inside a company cannot be reached, or `ca` also trusts others."""
    tls = await held(tmp_path, ca=company.ca)
    async with open_client(company.sign(NAME), NAME, tls=tls) as (client, bodies):
        assert (await client.post(b"", b"{}")).status == 200
        assert bodies == [b"{}"]
    async with open_client(certificate, NAME, tls=tls) as (client, bodies):
        assert "self-signed certificate" in await refusal(client)
        assert bodies == []


async def refusal(client: HttpClient) -> str:
    """The detail of the failure."""
    with pytest.raises(OSError) as caught:
        await client.post(b"", b"{}")
    failure = classify(caught.value)
    assert (failure.reason, failure.recoverable) == ("tls", True)
    return failure.detail


async def test_the_cause_is_named(company: Authority, tmp_path: Path) -> None:
    """Broken: nobody can see whether the name, the date or the authority of a receiver's certificate is wrong."""
    tls = await held(tmp_path, ca=company.ca)
    async with open_client(company.sign("old.test", days=-1), "old.test", tls=tls) as (client, _):
        assert (
            await refusal(client)
            == "no trusted TLS connection: the server's certificate is refused: certificate has expired"
        )
    async with open_client(company.sign(NAME), "other.test", tls=tls) as (client, _):
        assert "Hostname mismatch, certificate is not valid for 'other.test'" in await refusal(client)


async def test_a_client_certificate(company: Authority, tmp_path: Path) -> None:
    """Broken: receivers that ask for a certificate refuse every event."""
    tls = await held(tmp_path, ca=company.ca, certificate=company.sign("penstock.test"))
    async with open_client(company.sign(NAME), NAME, tls=tls, clients=company.ca) as (client, _):
        assert (await client.post(b"", b"{}")).status == 200


def refuse_once(listener: socket.socket, context: ssl.SSLContext) -> None:
    """As most servers: an alert says why. (asyncio's servers only close the connection.)"""
    with context.wrap_socket(listener.accept()[0], server_side=True, do_handshake_on_connect=False) as connection:
        with pytest.raises(ssl.SSLError):
            connection.do_handshake()
        socket.socket.shutdown(connection, socket.SHUT_WR)
        while socket.socket.recv(connection, 65536):
            pass


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_client_certificate_that_is_refused(
    version: ssl.TLSVersion, company: Authority, other: Authority, tmp_path: Path
) -> None:
    """Broken: nobody can see that a receiver wants a certificate, or another one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(company.sign(NAME))
    context.load_verify_locations(company.ca)
    context.verify_mode, context.minimum_version, context.maximum_version = ssl.CERT_REQUIRED, version, version
    wrong = {
        "unknown ca": {"certificate": other.sign("penstock.test")},
        "certificate expired": {"certificate": company.sign("late.test", days=-1)},
        "certificate required" if version is ssl.TLSVersion.TLSv1_3 else "handshake failure": {},
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(600)
        url = f"https://{NAME}:{listener.getsockname()[1]}/hook"
        for why, files in wrong.items():
            find_tls = partial(getattr, await held(tmp_path, ca=company.ca, **files), "current")
            with HttpClient(url, policy=LOCAL, resolver=OURS, timeout=20, headers={}, tls=find_tls) as client:
                refusing = asyncio.create_task(asyncio.to_thread(refuse_once, listener, context))
                said = await refusal(client)
                assert said.endswith(f": the server wants a client certificate, or refuses ours: {why}")
                await refusing


async def test_the_end_of_certificates_is_shown(company: Authority, tmp_path: Path) -> None:
    """Broken: a certificate expires at night, and no alert came before."""
    pair = company.sign(NAME)
    content = {"ca": str(company.ca), "certificate": str(pair)}
    webhook = Webhook.model_validate({"url": f"https://{NAME}/", "tls": content})
    credentials, mistakes = await asyncio.to_thread(read_credentials, webhook, tmp_path, {})
    assert mistakes == []
    (watch,) = watch_credentials("late/ends", webhook, tmp_path, credentials)
    await watch.load()
    for key, path in (("tls.certificate", pair), ("tls.ca", company.ca)):
        command = ["openssl", "x509", "-in", str(path), "-noout", "-enddate"]
        text = (await asyncio.to_thread(subprocess.run, command, capture_output=True, check=True)).stdout.decode()
        shown = REGISTRY.get_sample_value(
            "penstock_certificate_expiry_timestamp_seconds", {"name": "late/ends", "key": key}
        )
        assert shown == ssl.cert_time_to_seconds(text.strip().removeprefix("notAfter="))


async def test_new_files_are_used_for_new_connections(company: Authority, other: Authority, tmp_path: Path) -> None:
    """Broken: a renewed certificate needs a restart, or a kept connection goes on with the authority of before for ever."""
    (tmp_path / "ca.pem").write_bytes(company.ca.read_bytes())
    webhook = Webhook.model_validate({"url": f"https://{NAME}/", "tls": {"ca": "ca.pem"}})
    credentials, mistakes = await asyncio.to_thread(read_credentials, webhook, tmp_path, {})
    assert (mistakes, credentials.value) == ([], None)
    (watch,) = watch_credentials("late/tls", webhook, tmp_path, credentials)
    await watch.load()
    assert credentials.tls is not None
    assert _days_left("late/tls", "tls.ca") > 0
    async with open_client(company.sign(NAME), NAME, tls=credentials.tls) as (client, bodies):
        for _ in range(2):
            await client.post(b"", b"1")
            await watch.load()
        (tmp_path / "ca.pem").write_bytes(b"damaged")
        with pytest.raises(BadCredential, match="no certificate in PEM form"):
            await watch.load()
        await client.post(b"", b"2")
        assert len(client._idle) == 1
        (tmp_path / "ca.pem").write_bytes(other.ca.read_bytes())
        await watch.load()
        await refusal(client)
        assert bodies == [b"1", b"1", b"2"]


def _days_left(name: str, key: str) -> float:
    until = REGISTRY.get_sample_value("penstock_certificate_expiry_timestamp_seconds", {"name": name, "key": key})
    assert until is not None
    return (until - time.time()) / 86400


async def test_the_end_of_our_certificate_is_shown(company: Authority, tmp_path: Path) -> None:
    """Broken: a certificate expires, and no alert came before; or one that has expired counts as the one before."""
    for days in (30, -1):
        (tmp_path / "own.pem").write_bytes(company.sign("own.test", days=days).read_bytes())
        (tmp_path / "own.pem").chmod(0o600)
        if days == 30:
            webhook = Webhook.model_validate({"url": f"https://{NAME}/", "tls": {"certificate": "own.pem"}})
            credentials, mistakes = await asyncio.to_thread(read_credentials, webhook, tmp_path, {})
            assert mistakes == []
            (watch,) = watch_credentials("own/tls", webhook, tmp_path, credentials)
        await watch.load()
        assert _days_left("own/tls", "tls.certificate") == pytest.approx(days, abs=0.1)


async def test_an_untrusted_certificate_is_refused(certificate: Path) -> None:
    """Broken: anybody at all gets our events."""
    async with open_client(certificate, NAME) as (client, bodies):
        with pytest.raises(ssl.SSLCertVerificationError):
            await client.post(b"", b"{}")
        assert bodies == []
