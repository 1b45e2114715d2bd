"""Who gets in: keys, scopes, other tenants' streams, quotas; and what everything else under the port answers."""

from collections.abc import AsyncIterator

import orjson
import pytest

from services.core.security.keys import ApiKey, KeyRing, make_key
from services.ingest.access import Access
from tests.support.clock import Clock
from tests.support.raw_http import make_request
from tests.unit.ingest.service import Service, running

CREATED = "2026-01-02T03:04:05Z"


class Keys:
    """A few keys and the tokens that open them."""

    def __init__(self) -> None:
        self.tokens: dict[str, str] = {}
        self.entries: list[ApiKey] = []
        self.add("plain", streams=["plain"])
        self.add("all", streams=["*"])
        self.add("scopeless", streams=["plain"], scopes=("manage",))
        self.add("limited", streams=["plain"], rate=10)
        token, entry = make_key(streams=["plain"], created=CREATED)
        self.tokens["revoked"] = token
        self.entries.append(entry.model_copy(update={"revoked": CREATED}))

    def add(self, name: str, **options: object) -> None:
        """Make one more."""
        self.tokens[name], entry = make_key(created=CREATED, **options)  # type: ignore[arg-type]  # as make_key takes them
        self.entries.append(entry)

    def header(self, name: str) -> str:
        """The Authorization header of a key."""
        return f"Bearer {self.tokens[name]}"


@pytest.fixture
def keys() -> Keys:
    return Keys()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def guarded(keys: Keys, clock: Clock) -> AsyncIterator[Service]:
    async with running(access=Access(KeyRing(keys.entries), clock)) as service:
        yield service


async def test_no_wrong_and_revoked_keys_get_the_same_401(guarded: Service, keys: Keys) -> None:
    """A difference would tell an attacker which ids exist and which keys once worked."""
    right = keys.tokens["plain"]
    prefix, key_id, secret = right.split("_")
    attempts = [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {right}",
        right,
        "Bearer psk",
        "Bearer psk__",
        f"Bearer psk_zzzzzzzz_{secret}",
        f"Bearer {prefix}_{key_id}_{secret[:-1]}{'1' if secret[-1] == '0' else '0'}",
        f"Bearer {prefix}_{key_id}_",
        f"Bearer {prefix}_{key_id}_{secret}x",
        f"Bearer xxx_{key_id}_{secret}",
        "Bearer psk_é_ü",
        keys.header("revoked"),
    ]
    bodies = set()
    for attempt in attempts:
        reply = await guarded.post(b"{}", **({} if attempt is None else {"Authorization": attempt}))
        assert (reply.status, reply.problem) == (401, "no-valid-key")
        assert reply.headers["www-authenticate"] == "Bearer"
        bodies.add(reply.body)
    assert len(bodies) == 1
    assert guarded.stored() == []


async def test_two_authorization_headers_are_401(guarded: Service, keys: Keys) -> None:
    """Proxies and we might pick different ones."""
    line = f"Authorization: {keys.header('plain')}\r\n".encode()
    head = b"POST /v1/streams/plain/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
    assert (await guarded.send(head + line + line + b"\r\n{}")).status == 401
    assert (await guarded.send(head + line + b"\r\n{}")).status == 200


async def test_a_valid_key_gets_in(guarded: Service, keys: Keys) -> None:
    """With its own streams, or with all; the scheme's name has no case."""
    assert (await guarded.post(b"{}", Authorization=keys.header("plain"))).status == 200
    assert (await guarded.post(b"{}", Authorization=keys.header("plain").replace("Bearer", "bearer"))).status == 200
    assert (await guarded.post(b"{}", "orders", Authorization=keys.header("all"))).status == 200


async def test_another_tenants_stream_is_404_as_if_it_did_not_exist(guarded: Service, keys: Keys) -> None:
    """Whether a stream exists is the tenant's business; without a key nobody learns it either."""
    others = await guarded.post(b"{}", "orders", Authorization=keys.header("plain"))
    missing = await guarded.post(b"{}", "missing", Authorization=keys.header("plain"))
    assert (others.status, others.problem) == (404, "stream-not-found")
    assert others.body == missing.body
    assert (await guarded.post(b"{}", "missing")).status == 401


async def test_a_key_without_the_scope_is_403(guarded: Service, keys: Keys) -> None:
    """A management key is no sender's key."""
    reply = await guarded.post(b"{}", Authorization=keys.header("scopeless"))
    assert (reply.status, reply.problem) == (403, "scope-missing")


@pytest.mark.parametrize("name", ["key", "api_key", "token", "access_token", "x"])
async def test_a_key_in_the_url_is_401_even_with_a_good_header(guarded: Service, keys: Keys, name: str) -> None:
    """URLs are logged by every proxy on the way; a key that was in one must be replaced."""
    path = f"/v1/streams/plain/events?{name}={keys.tokens['plain']}"
    for headers in ({}, {"Authorization": keys.header("plain")}):
        reply = await guarded.send(make_request(path, b"{}", **headers))
        assert (reply.status, reply.problem) == (401, "key-in-url")
        assert keys.tokens["plain"].encode() not in reply.body


async def test_over_quota_is_429_until_the_debt_is_paid(guarded: Service, keys: Keys, clock: Clock) -> None:
    """10 events a second: a batch may overdraw, the next request waits; other keys are not touched."""
    mine = keys.header("limited")
    assert (await guarded.post(orjson.dumps([{}] * 30), Authorization=mine)).status == 200
    reply = await guarded.post(b"{}", Authorization=mine)
    assert (reply.status, reply.problem) == (429, "over-quota")
    assert int(reply.headers["retry-after"]) in (2, 3)
    assert (await guarded.post(b"{}", Authorization=keys.header("plain"))).status == 200
    clock.now += 1.9
    assert (await guarded.post(b"{}", Authorization=mine)).status == 429
    clock.now += 0.2
    assert (await guarded.post(b"{}", Authorization=mine)).status == 200
    clock.now += 3600
    for _ in range(10):
        assert (await guarded.post(b"{}", Authorization=mine)).status == 200
    assert (await guarded.post(b"{}", Authorization=mine)).status in (200, 429)


async def test_keys_may_change_while_running(guarded: Service, keys: Keys) -> None:
    """A revoked key must stop working without a restart."""
    assert (await guarded.post(b"{}", Authorization=keys.header("plain"))).status == 200
    guarded.access.ring = KeyRing([])
    assert (await guarded.post(b"{}", Authorization=keys.header("plain"))).status == 401


@pytest.mark.parametrize(
    ("method", "path", "status", "problem"),
    [
        ("POST", "/v1/streams/missing/events", 404, "stream-not-found"),
        ("POST", "/v1/streams/../events", 404, "stream-not-found"),
        ("POST", "/v1/streams/plain/events/", 404, "not-found"),
        ("POST", "/v1/streams/PLAIN/events", 404, "stream-not-found"),
        ("POST", "/v1/streams/plain", 404, "not-found"),
        ("POST", "/elsewhere", 404, "not-found"),
        ("POST", "//v1/streams/plain/events", 404, "not-found"),
        ("GET", "/v1/streams/plain/events", 405, "method-not-allowed"),
        ("PUT", "/v1/streams/plain/events", 405, "method-not-allowed"),
        ("OPTIONS", "/v1/streams/plain/events", 405, "method-not-allowed"),
        ("POST", "/openapi.json", 405, "method-not-allowed"),
        ("DELETE", "/", 405, "method-not-allowed"),
    ],
)
async def test_other_paths_and_methods(service: Service, method: str, path: str, status: int, problem: str) -> None:
    """Each gets its problem, and 405 says what is allowed."""
    reply = await service.send(make_request(path, b"{}", method=method))
    assert (reply.status, reply.problem) == (status, problem)
    assert ("allow" in reply.headers) == (status == 405)


async def test_the_path_may_be_encoded_or_absolute(service: Service) -> None:
    """RFC 9110: a server must take the absolute form; %70 is p."""
    for path in (
        "/v1/streams/%70lain/events",
        "http://localhost/v1/streams/plain/events",
        "/v1/streams/plain/events?a=b",
    ):
        assert (await service.send(make_request(path, b"{}"))).status == 200


async def test_the_documents(service: Service) -> None:
    """A person who opens the port finds the way; HEAD has no body."""
    reply = await service.send(make_request("/", method="GET"))
    assert reply.json()["openapi"] == "/openapi.json"
    reply = await service.send(make_request("/openapi.json", method="GET"))
    assert reply.json()["openapi"].startswith("3.1")


@pytest.mark.parametrize(
    ("target", "name", "status"),
    [
        ("/v1/streams/plain/events", "localhost:8080", 200),
        ("/v1/streams/plain/events", "[::1]", 200),
        ("http://127.0.0.1/v1/streams/plain/events", "localhost", 200),
        ("/v1/streams/plain/events", "evil.example", 421),
        ("/v1/streams/plain/events", "localhost.evil.example:8080", 421),
        ("http://evil.example/v1/streams/plain/events", "localhost", 421),
        ("http://127.0.0.1/v1/streams/plain/events", "evil.example", 421),
    ],
)
async def test_without_keys_only_this_machines_own_names_are_answered(
    service: Service, target: str, name: str, status: int
) -> None:
    """Broken: a page on the web whose name was made to mean 127.0.0.1 (DNS rebinding) sends events into keyless ingest."""
    request = make_request(target, b"{}").replace(b"Host: localhost", b"Host: " + name.encode())
    reply = await service.send(request)
    assert reply.status == status
    assert status == 200 or reply.problem == "bad-host"
    assert len(service.stored()) == (status == 200)


async def test_with_keys_any_name_is_answered(guarded: Service, keys: Keys) -> None:
    """Behind a load balancer the name is the operator's; a page on the web does not have the key."""
    request = make_request("/v1/streams/plain/events", b"{}", Authorization=keys.header("plain"))
    assert (await guarded.send(request.replace(b"Host: localhost", b"Host: ingest.example"))).status == 200
