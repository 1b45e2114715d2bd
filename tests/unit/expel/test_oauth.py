"""Tokens from an OAuth token server: what receivers get, and what happens to events when the server or the receiver refuses."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qs

import pytest
import structlog
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from services.core.broker.connect import open_broker
from services.core.http.client import HttpClient, Response
from services.core.http.failure import Failure
from services.core.http.net_guard import NetPolicy
from services.core.http.resolver import Resolver
from services.core.pipe_file.webhook import OAuth, Secret
from services.core.security import oauth
from services.core.security.authorization import Credential, NoCredential, mask_secret
from services.core.security.credentials import LiveValue
from services.core.security.oauth import MAX_TOKEN_RESPONSE, OAuthClient
from services.core.security.signing import SigningKeys
from services.expel.webhook.body import make_format
from services.expel.webhook.sender import WebhookSender, read_outcome
from tests.support.waiting_events import store, stored
from tests.unit.expel.fake_sender import make_record
from tests.unit.expel.receiver import Received, hang, open_receiver, open_socket_server, wait_until
from tests.unit.expel.running_expel import running_expel, set_up_hook
from tests.unit.expel.test_webhook import LOCAL, deliver, failure, record

SECRET = "s3cret/with+signs%20and spaces"


def make_config(url: str = "https://login.example.org/token", **more: str) -> OAuth:
    return OAuth(token_url=url, client_id="pen stock", client_secret=Secret(env="X"), **more)


class Server:
    """The token server's side of a fake client: answers in turn, the last one for ever. Notes each request."""

    def __init__(self, *answers: Response | OSError) -> None:
        self.answers, self.asked = list(answers), list[tuple[bytes, bytes]]()

    async def post(self, head: bytes, body: bytes) -> Response:
        self.asked.append((head, body))
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        await asyncio.sleep(0)
        if isinstance(answer, OSError):
            raise answer
        return answer


def good(token: str = "T1", **more: object) -> Response:
    return Response(200, body=json.dumps({"access_token": token, "token_type": "Bearer", **more}).encode())


class Case:
    """An OAuthClient over a fake server, with a clock to set."""

    def __init__(self, *answers: Response | OSError, **more: str) -> None:
        self.server, self.now, self.counted = Server(*answers), 1000.0, list[str]()
        self.client = OAuthClient(
            "late/hook",
            make_config(**more),
            LiveValue(SECRET),
            self.server,
            self.counted.append,
            lambda: self.now,
        )

    async def get(self) -> str:
        return (await self.client.get()).secret

    async def fail(self) -> Failure:
        with pytest.raises(NoCredential) as caught:
            await self.client.get()
        return caught.value.failure


async def test_the_request_for_a_token() -> None:
    """Broken: standard servers do not understand our request, and no event is delivered."""
    tested = Case(good(), scope="events:write x", audience="https://api", resource="urn:r")
    assert await tested.get() == "T1"
    ((head, body),) = tested.server.asked
    basic = head.decode().removeprefix("Authorization: Basic ").strip()
    assert base64.b64decode(basic) == b"pen+stock:s3cret%2Fwith%2Bsigns%2520and+spaces"
    assert parse_qs(body.decode()) == {
        "grant_type": ["client_credentials"],
        "scope": ["events:write x"],
        "audience": ["https://api"],
        "resource": ["urn:r"],
    }
    assert tested.counted == ["ok"]


async def test_a_server_that_reads_the_secret_in_the_body() -> None:
    """Broken: servers that do not know Basic never give us a token, or are asked in the wrong way for ever."""
    refused = Response(401, body=b'{"error": "invalid_client"}')
    tested = Case(refused, good("T1", expires_in=10), good("T2"))
    assert await tested.get() == "T1"
    tested.now += 10
    assert await tested.get() == "T2"
    heads = [bool(head) for head, _ in tested.server.asked]
    assert heads == [True, False, False]
    assert parse_qs(tested.server.asked[1][1].decode())["client_secret"] == [SECRET]


async def test_a_token_is_fetched_once_for_many_requests() -> None:
    """Broken: a restart with a backlog floods the token server."""
    tested = Case(good("T1", expires_in=100), good("T2", expires_in=100))
    assert set(await asyncio.gather(*[tested.get() for _ in range(50)])) == {"T1"}
    tested.now += 89.9
    assert await tested.get() == "T1"
    tested.now += 0.2
    during = await asyncio.gather(*[tested.get() for _ in range(50)])  # the old one is still valid
    assert (during[0], set(during)) == ("T2", {"T1", "T2"})
    assert await tested.get() == "T2"
    tested.now += 100
    assert len(set(await asyncio.gather(*[tested.get() for _ in range(50)]))) == 1
    assert len(tested.server.asked) == 3


async def test_a_request_that_is_cancelled_leaves_the_fetch_to_the_next_one() -> None:
    """Broken: after a revoked partition in just that moment, nobody gets a token any more."""
    tested = Case(good())
    first, second = asyncio.create_task(tested.get()), asyncio.create_task(tested.get())
    await asyncio.sleep(0)
    first.cancel()
    assert await second == "T1"


async def test_a_failing_server_is_not_flooded_and_the_token_in_use_stays() -> None:
    """Broken: a short outage of the token server stops deliveries, or our retries keep the server down."""
    tested = Case(good("T1", expires_in=100), Response(503, retry_after="7"), Response(503), OSError("cut"), good("T2"))
    await tested.get()
    tested.now += 95
    assert await tested.get() == "T1"  # asked for the next one in vain
    tested.now += 5
    failed = await tested.fail()
    assert (failed.reason, failed.recoverable, failed.retry_after) == ("no_token", True, 2)
    assert failed.detail == "no token from login.example.org: it answered 503"
    assert len(tested.server.asked) == 2
    for passed, wait in ((2, 2), (2, 4)):
        tested.now += passed
        assert [(await tested.fail()).retry_after for _ in range(20)] == [wait] * 20
    assert tested.counted == ["ok", "http_503", "http_503", "connection"]
    tested.now += 4
    assert await tested.get() == "T2"


async def test_a_refused_token_is_replaced_once() -> None:
    """Broken: a revoked token makes dead letters of good events, or a receiver that refuses everything floods the server."""
    tested = Case(good("T1"), good("T2"), good("T3"))
    old = await tested.client.get()
    renewed = await asyncio.gather(*[tested.client.renew(old) for _ in range(20)])
    assert {credential and credential.secret for credential in renewed} == {"T2"}
    assert await tested.client.renew(await tested.client.get()) is None
    tested.now += oauth.RENEW_EVERY_S
    again = await tested.client.renew(await tested.client.get())
    assert again is not None
    assert again.secret == "T3"


async def test_a_token_server_that_hangs_holds_up_one_request() -> None:
    """Broken: a token server that answers slowly stops deliveries although the token in use is still valid."""
    tested, hanging = Case(good("T1", expires_in=100)), asyncio.Event()
    assert await tested.get() == "T1"
    post = tested.server.post

    async def hang(head: bytes, body: bytes) -> Response:
        await hanging.wait()
        return await post(head, body)

    tested.server.post = hang  # type: ignore[method-assign]
    tested.server.answers = [good("T2")]
    tested.now += 95
    first = asyncio.create_task(tested.get())
    await asyncio.sleep(0)
    async with asyncio.timeout(600):
        assert [await tested.get() for _ in range(3)] == ["T1"] * 3
    tested.now += 5  # from now on it may be refused
    second = asyncio.create_task(tested.get())
    await asyncio.sleep(0)
    assert not second.done()
    hanging.set()
    assert [await first, await second] == ["T2", "T2"]
    assert len(tested.server.asked) == 2


async def test_a_token_that_expired_on_its_way_is_replaced_at_any_time() -> None:
    """Broken: with tokens of a few seconds, a request that was slow makes dead letters."""
    tested = Case(*[good(f"T{number}", expires_in=5) for number in range(1, 5)])
    for number in range(1, 4):
        old = await tested.client.get()
        tested.now += 5
        renewed = await tested.client.renew(old)
        assert renewed is not None
        assert renewed.secret == f"T{number + 1}"


async def test_the_same_token_again_is_not_sent_again() -> None:
    """Broken: every refused request is sent twice, because the token server gives out the token that it gave before."""
    tested = Case(good("T1"))
    old = await tested.client.get()
    assert await asyncio.gather(*[tested.client.renew(old) for _ in range(20)]) == [None] * 20
    assert len(tested.server.asked) == 2


async def test_a_refused_token_and_no_other() -> None:
    """Broken: events are dead letters because the token server was down when the receiver refused the old token."""
    tested = Case(good("T1"), Response(500), good("T2"))
    old = await tested.client.get()
    with pytest.raises(NoCredential) as caught:
        await tested.client.renew(old)
    assert caught.value.failure.recoverable
    tested.now += 1
    assert await tested.get() == "T2"


def say(status: int, content: object, **headers: str) -> Callable[[Received], web.Response]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()
    return lambda _received: web.Response(status=status, body=body, headers=headers)


@asynccontextmanager
async def open_sender(
    hook: str, token_url: str, counted: list[str], policy: NetPolicy = LOCAL, *, timeout: float = 60.0
) -> AsyncIterator[WebhookSender]:
    """The real sender, client and token client, without a lane."""
    form = make_format("cloudevents", "late")
    with (
        HttpClient(
            hook, policy=LOCAL, resolver=Resolver(), timeout=5, headers={"Content-Type": form.content_type}
        ) as client,
        HttpClient(
            token_url,
            policy=policy,
            resolver=Resolver(),
            timeout=timeout,
            headers={"Content-Type": "application/x-www-form-urlencoded"},
            max_body=MAX_TOKEN_RESPONSE,
        ) as tokens,
    ):
        authorization = OAuthClient("late/hook", make_config(token_url), LiveValue(SECRET), tokens, counted.append)
        yield WebhookSender(client, "late", form, SigningKeys(), 1_000_000, authorization)


BAD_LIFETIMES: tuple[object, ...] = (0, -1, "soon", True, [], "")
BAD_LIFETIME = "its answer has an expires_in that is not a number of seconds above 0"
T = {"access_token": "T1", "token_type": "Bearer"}


@pytest.mark.parametrize(
    ("status", "content", "word", "cause"),
    [
        (503, b"<html>busy", "http_503", "it answered 503: <html>busy"),
        (429, b"", "http_429", "it answered 429"),
        (302, b"", "http_302", "it answered 302"),
        (
            400,
            {"error": "invalid_client", "error_description": f"wrong secret {SECRET}"},
            "invalid_client",
            "it answered 400 invalid_client: wrong secret ***",
        ),
        (400, {"error": "invalid_scope"}, "invalid_scope", "it answered 400 invalid_scope"),
        (401, SECRET.encode(), "http_401", "it answered 401: ***"),
        (200, b"<html>", "bad_answer", "its answer is not JSON"),
        (200, [T], "bad_answer", "its answer is not a JSON object"),
        (200, b" " * 100_000, "bad_answer", "its answer is not complete, or has more than 65536 bytes"),
        (200, b"[" * 60_000, "bad_answer", "its answer is not JSON"),
        (200, {"access_token": "a b"}, "bad_answer", "its answer has no access_token"),
        (200, {"access_token": "a\r\nX-Evil: 1"}, "bad_answer", "its answer has no access_token"),
        (200, {"access_token": "a" * 8001}, "bad_answer", "its answer has no access_token"),
        (200, {"error": "no"}, "bad_answer", "its answer has no access_token"),
        (200, T | {"token_type": "mac"}, "bad_answer", "its answer has a token_type other than Bearer"),
        *[(200, {**T, "expires_in": bad}, "bad_answer", BAD_LIFETIME) for bad in BAD_LIFETIMES],
    ],
)
async def test_a_server_that_gives_no_token(status: int, content: object, word: str, cause: str) -> None:
    """Broken: events are dead letters, or sent without a token, because of the token server; or nobody can see why."""
    counted: list[str] = []
    answer = say(status, content, **({"Location": "/elsewhere"} if status == 302 else {}))
    async with open_receiver() as receiver, open_receiver(answer) as server:
        async with open_sender(receiver.url, server.url, counted) as sender:
            outcome = failure(await sender.send(deliver(sender, [record(1)])))
        assert receiver.requests == []
    assert (outcome.reason, outcome.recoverable, outcome.ours, outcome.gone) == ("no_token", True, False, False)
    assert cause in outcome.detail
    assert SECRET not in outcome.detail
    assert counted == [word]


async def test_a_server_that_cannot_be_reached() -> None:
    """Broken: a token server that hangs holds a request for ever, or our token client goes where webhooks may not go."""
    counted: list[str] = []
    async with open_receiver() as receiver, open_socket_server(hang) as hanging:
        async with open_sender(receiver.url, hanging, counted, timeout=0.5) as sender:
            assert failure(await sender.send(deliver(sender, [record(1)]))).reason == "no_token"
        async with open_sender(receiver.url, hanging, counted, NetPolicy()) as sender:
            refused = failure(await sender.send(deliver(sender, [record(1)])))
        async with open_sender(receiver.url, "http://127.0.0.1:1/token", counted) as sender:
            assert failure(await sender.send(deliver(sender, [record(1)]))).reason == "no_token"
    assert "127.0.0.1 is loopback" in refused.detail
    assert counted == ["timeout", "address_refused", "connection"]


@pytest.mark.parametrize(
    "more", [{}, {"expires_in": None}, {"expires_in": "3600"}, {"expires_in": 1e300}, {"x": "y" * 60_000}]
)
async def test_answers_of_lenient_servers(more: dict[str, object]) -> None:
    """Broken: servers whose answers differ from the standard in a harmless way cannot be used."""
    async with open_receiver() as receiver, open_receiver(say(200, {"access_token": "T1", **more})) as server:
        async with open_sender(receiver.url, server.url, []) as sender:
            assert await sender.send(deliver(sender, [record(1)])) is None
            assert await sender.send(deliver(sender, [record(2)])) is None
        assert [request.headers["authorization"] for request in receiver.requests] == ["Bearer T1"] * 2
        assert len(server.requests) == 1


async def test_a_401_to_a_token_waits_after_one_other_token() -> None:
    """Broken: a revoked token makes a dead letter of each event, or a 401 is repeated at once; or the answer shows the token."""
    given = iter(("T1", "T2-secret-token", "T3"))
    accepted = "Bearer T2-secret-token"

    def check(received: Received) -> web.Response:
        sent = received.headers["authorization"]
        return web.Response(status=204) if sent == accepted else web.Response(status=401, text=f"not allowed: {sent}")

    async with (
        open_receiver(check) as receiver,
        open_receiver(lambda _: web.json_response({"access_token": next(given)})) as server,
        open_sender(receiver.url, server.url, []) as sender,
    ):
        assert await sender.send(deliver(sender, [record(1)])) is None
        assert len(receiver.requests) == 2
        accepted = "nobody"
        refused = failure(await sender.send(deliver(sender, [record(2)])))
        assert (refused.reason, refused.recoverable) == ("http_401", True)
        assert refused.detail == "the receiver answered 401: not allowed: Bearer ***"
        assert len(receiver.requests) == 3
        assert len(server.requests) == 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("Bearer"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
token_bodies = (
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("access_token", "token_type", "expires_in", "error", "error_description"), json_values),
    ).map(lambda content: json.dumps(content).encode())
    | st.fixed_dictionaries(
        {"access_token": st.text("abc/.~+", min_size=1)},
        optional={"expires_in": st.integers() | st.floats() | st.text("0123456789", max_size=30)},
    ).map(lambda content: json.dumps(content).encode())
    | st.binary(max_size=200)
)


@given(
    st.lists(
        st.tuples(st.integers(200, 599), token_bodies, st.booleans(), st.text(max_size=10)), min_size=1, max_size=6
    )
)
def test_any_answer_gives_a_token_or_a_failure_that_waits(answers: list[tuple[int, bytes, bool, str]]) -> None:
    """Broken: an odd answer of a token server ends a lane, makes dead letters, or is used as a header."""

    async def run() -> None:
        tested = Case(*[Response(status, wait, body, whole) for status, body, whole, wait in answers])
        for _ in range(4):
            tested.now += 61
            try:
                credential = await tested.client.get()
            except NoCredential as error:
                found = error.failure
                assert (found.reason, found.recoverable, found.gone) == ("no_token", True, False)
                assert 0 <= (found.retry_after or 0) <= 60
                assert found.detail.isprintable()
            else:
                assert credential.line == b"Authorization: Bearer %b\r\n" % credential.secret.encode()
                assert credential.line.count(b"\r\n") == 1
                assert repr(credential) == "Credential()"
        assert len(tested.server.asked) <= 8

    asyncio.run(run())


@given(st.text('abc/+ "\\%', min_size=4, max_size=30), st.text(max_size=30), st.text(max_size=30), st.data())
def test_no_quoted_secret_remains(secret: str, before: str, after: str, data: st.DataObject) -> None:
    """Broken: a receiver that quotes its request writes our token into the dead letters."""
    form = data.draw(st.sampled_from([secret, json.dumps(secret)[1:-1], secret.replace("/", "\\/")]))
    whole = (before + form + after).encode()
    assert form.encode() not in mask_secret(whole, secret, whole=True)
    cut = len(before.encode()) + data.draw(st.integers(4, len(form)))
    assert not mask_secret(whole[:cut], secret, whole=False).endswith(form[:4].encode())


ESCAPED = "".join(f"\\u{ord(char):04x}" for char in SECRET)


@pytest.mark.parametrize(
    "quoted",
    [
        SECRET,
        ESCAPED,
        "client_secret=s3cret%2Fwith%2Bsigns%2520and+spaces",
        json.dumps(SECRET)[1:-1].replace("+", "\\u002B"),
        SECRET.replace("/", "\\/"),
    ],
)
async def test_a_secret_that_is_quoted_in_another_form(quoted: str) -> None:
    """Broken: servers that escape what they quote write our secret into logs, dead letters and the observer's page."""
    body = f'{{"error": "invalid_client", "error_description": "wrong: {quoted}"}}'.encode()
    detail = (await Case(Response(401, body=body)).fail()).detail
    assert detail.startswith("no token from login.example.org: it answered 401 invalid_client: wrong: ")
    assert not any(part in detail for part in ("s3cret", "signs", "spaces"))
    with (
        HttpClient("http://127.0.0.1:1/", policy=LOCAL, resolver=Resolver(), timeout=5, headers={}) as client,
    ):
        sender = WebhookSender(client, "late", make_format("cloudevents", "late"), SigningKeys(), 1_000_000)
        delivery = deliver(sender, [record(1)])
    credential = Credential(b"", SECRET)
    found = read_outcome(
        207,
        credential.mask(f'{{"failed": [{{"index": 0, "reason": "wrong: {quoted}"}}]}}'.encode(), whole=True),
        True,
        delivery,
        credential,
    )
    assert isinstance(found, Mapping)
    assert found[0].detail.startswith("the receiver refused this event: wrong: ")
    assert not any(part in found[0].detail for part in ("s3cret", "signs", "spaces"))


async def test_events_wait_while_there_is_no_token(tmp_path: Path) -> None:
    """Broken: an outage of the token server makes dead letters of all events, or the secret is in a log or a topic."""
    url, secret = f"log://{tmp_path}/log", tmp_path / "client.secret"
    secret.touch(mode=0o600)
    secret.write_text(SECRET + "\n")
    tokens: dict[str, object] = {"error": "invalid_client", "error_description": SECRET}

    def give(_received: Received) -> web.Response:
        return web.json_response(tokens, status=401 if "error" in tokens else 200)

    with structlog.testing.capture_logs() as logs:
        async with open_receiver() as receiver, open_receiver(give) as server, open_broker(url) as broker:
            auth = (
                f"{{oauth: {{token_url: '{server.url}', client_id: penstock, client_secret: {{file: client.secret}}}}}}"
            )
            hook = f"{{url: '{receiver.url}', auth: {auth}, retry: {{attempts: 2, base: 1ms}}}}"
            settings = await set_up_hook(tmp_path, broker, hook)
            await store(broker, "s", [make_record(number) for number in range(5)])
            async with running_expel(settings):
                await wait_until(lambda: len(server.requests) >= 2)
                async with asyncio.timeout(600):
                    while not await stored(broker, "penstock.retry-in"):
                        await asyncio.sleep(0.05)
                assert receiver.requests == []
                tokens.clear()
                tokens.update(access_token="T1-secret-token", token_type="bearer")
                await store(broker, "s", [make_record(9)])
                await receiver.wait_for(lambda _: bool(receiver.requests))
                assert receiver.requests[0].headers["authorization"] == "Bearer T1-secret-token"
            assert await stored(broker, "late.dead") == []
            waiting = str(await stored(broker, "penstock.retry-in"))
    assert "invalid_client" in waiting
    said = [entry["detail"] for entry in logs if entry["event"] == "token_server_failed"]
    assert len(said) == 1
    assert said[0].endswith(": it answered 401 invalid_client: ***")
    shown = waiting + str(logs)
    assert not any(part in shown for part in (SECRET, "T1-secret-token"))
