"""TLS to receivers, against certificates made here: broken, events go to whoever sits in between, or to nobody."""

import ssl
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from services.core.net_guard import NetPolicy, parse_networks
from services.expel.webhook import client as http_client
from services.expel.webhook.client import HttpClient
from services.expel.webhook.resolver import AddressInfo, Resolver
from services.expel.webhook.sender import classify

LOCAL = NetPolicy(allow=parse_networks("127.0.0.0/8"))
NAME = "receiver.test"


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
async def open_client(certificate: Path, host: str) -> AsyncIterator[tuple[HttpClient, list[bytes]]]:
    """A client of a receiver with this certificate, which it reaches under the name `host`; and what that was sent."""
    bodies: list[bytes] = []

    async def handle(request: web.Request) -> web.Response:
        bodies.append(await request.read())
        return web.Response(text="thanks")

    def lookup(*_arguments: object, **_options: object) -> list[AddressInfo]:
        return [(2, 1, 6, "", ("127.0.0.1", 0))]

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_post("/hook", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
        url = f"https://{host}:{runner.addresses[0][1]}/hook"
        with HttpClient(url, policy=LOCAL, resolver=Resolver(lookup), timeout=20, headers={}) as client:
            yield client, bodies
    finally:
        await runner.cleanup()


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


async def test_an_untrusted_certificate_is_refused(certificate: Path) -> None:
    """Broken: anybody at all gets our events."""
    async with open_client(certificate, NAME) as (client, bodies):
        with pytest.raises(ssl.SSLCertVerificationError):
            await client.post(b"", b"{}")
        assert bodies == []
