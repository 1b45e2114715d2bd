"""The observer's API against its description; it answers every mistake with a problem, and shows no payload and no secret."""

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import orjson
import pytest
from jsonschema import Draft202012Validator

from services.core.broker.producer import Producer
from services.core.undelivered.dead_letter import DeadLetter, Position
from services.observer.dead_letters import OPENAPI, Api, DeadLetterReader, FailureTable
from services.observer.event_api import EventApi
from services.observer.follower import Follower
from services.observer.health import Health
from services.observer.http import serve_api
from services.observer.ledger_api import LedgerApi
from services.observer.scaling_api import GroupReports, ScalingApi
from tests.support.memory_appender import MemoryAppender
from tests.unit.observer.description import DOCUMENT, check
from tests.unit.observer.ledger.stories import PLAIN
from tests.unit.observer.letters import PIPES, letter

FAILURES = "/v1/destinations/shop/billing/failures"


def no_admin() -> Any:
    """Nothing is read in these tests."""
    return None


def no_judge(pipe: str, now: int) -> Health:
    """Nobody asks."""
    raise AssertionError(pipe, now)


class Client:
    """Asks, and holds each answer against the description."""

    def __init__(self, address: str, table: FailureTable) -> None:
        self._address, self.table = address, table

    async def get(self, path: str, method: str = "GET") -> tuple[int, dict[str, Any], str]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"http://{self._address}{path}") as answer,
        ):
            text = await answer.text()
            return answer.status, orjson.loads(text) if text else {}, answer.content_type

    def note(self, number: int, **said: object) -> None:
        self.table.count(DeadLetter.of(Position("shop.dead", 0, number), letter(number, **said)))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    table = FailureTable(PIPES)
    reader = DeadLetterReader(no_admin(), ["shop.dead"], table.count)
    states = {("shop", "billing"): "paused", ("shop", "search"): "active"}
    async with serve_api(
        "127.0.0.1:0", Api(table, reader, lambda *lane: states.get(lane), OPENAPI.read_bytes()).routes()
    ) as address:
        yield Client(address, table)


async def test_destinations_and_their_causes(client: Client) -> None:
    """Broken: a customer does not see why, since when and how often their endpoint fails."""
    for number in (1, 2, 3):
        client.note(number, detail=f"status 404: no order {number}")
    client.note(9, reason="timeout")
    status, body, kind = await client.get("/v1/destinations")
    assert (status, kind) == (200, "application/json")
    check("Destinations", body)
    first = {"pipe": "shop", "destination": "billing", "state": "paused", "breaker": None, "letters": 4}
    assert body["destinations"][0] == {**first, "last_failure": "2023-11-15T00:43:29.000Z"}
    assert body["destinations"][1]["last_failure"] is None
    assert body["catching_up"] is True
    status, body, _ = await client.get(FAILURES)
    check("Failures", body)
    assert [(cause["status"], cause["detail"], cause["count"]) for cause in body["causes"]] == [
        (404, "status #: no order #", 3),
        (None, "no", 1),
    ]
    example = {"position": "shop.dead:0:3", "event_id": "e3", "detail": "status 404: no order 3"}
    assert body["causes"][0]["example"] == example
    assert (body["causes"][0]["first_seen"], body["causes"][0]["last_seen"]) == (
        "2023-11-15T00:43:21.000Z",
        "2023-11-15T00:43:23.000Z",
    )
    assert "4111" not in orjson.dumps(body).decode()


async def test_since_and_limit(client: Client) -> None:
    """Broken: "what fails now" shows what failed last month, or the answer grows with what failed."""
    for number, reason in enumerate(["timeout", "http_400", "http_404", "http_404"]):
        client.note(number, reason=reason)
    _, body, _ = await client.get(f"{FAILURES}?since=2023-11-15T00:43:21Z")
    assert [cause["reason"] for cause in body["causes"]] == ["http_404", "http_400"]
    _, body, _ = await client.get(f"{FAILURES}?limit=1")
    assert ([cause["reason"] for cause in body["causes"]], body["more"]) == (["http_404"], 2)


async def test_secrets_are_masked(client: Client) -> None:
    """Broken: a receiver that repeats our signature's secret or a token has it published."""
    client.note(1, detail="bad token Bearer abc.def.ghi for whsec_c2VjcmV0c2VjcmV0")
    _, body, _ = await client.get(FAILURES)
    shown = orjson.dumps(body).decode()
    assert "abc.def" not in shown
    assert "c2VjcmV0" not in shown


@pytest.mark.parametrize(
    ("method", "path", "status", "name"),
    [
        ("GET", f"{FAILURES}?limit=0", 400, "bad-parameter"),
        ("GET", f"{FAILURES}?limit=101", 400, "bad-parameter"),
        ("GET", f"{FAILURES}?limit=%C2%B2", 400, "bad-parameter"),
        ("GET", f"{FAILURES}?limit=1&limit=2", 400, "bad-parameter"),
        ("GET", f"{FAILURES}?since=yesterday", 400, "bad-parameter"),
        ("GET", f"{FAILURES}?since={'9' * 39}d", 400, "bad-parameter"),
        ("GET", f"{FAILURES}?since={'9' * 400}", 400, "bad-parameter"),
        ("GET", f"{FAILURES}?until=2h", 400, "bad-parameter"),
        ("GET", "/v1/destinations?limit=1", 400, "bad-parameter"),
        ("GET", "/v1/destinations/shop/nobody/failures", 404, "destination-not-found"),
        ("GET", "/v1/destinations/%00/%2F/failures", 404, "destination-not-found"),
        ("GET", "/v2", 404, "not-found"),
        ("POST", "/v1/destinations", 405, "method-not-allowed"),
    ],
)
async def test_every_mistake_is_a_problem(client: Client, method: str, path: str, status: int, name: str) -> None:
    """Broken: a client's mistake is a 500, a page of HTML, or is answered as if it were none."""
    found, body, kind = await client.get(path, method)
    assert (found, kind, body["type"]) == (status, "application/problem+json", f"urn:penstock:problem:{name}")
    check("Problem", body)


async def test_the_description_is_served_and_names_every_route(client: Client) -> None:
    """Broken: what a client is generated from is not what is served."""
    status, body, _ = await client.get("/openapi.json")
    assert (status, body) == (200, DOCUMENT)
    api = Api(client.table, DeadLetterReader(no_admin(), [], client.table.count), lambda _pipe, _name: None, b"")
    ledger = LedgerApi(Follower(PLAIN, no_admin(), Producer(MemoryAppender()), print), no_admin(), no_judge, 0.01)
    events, scaling = EventApi(no_admin(), PIPES), ScalingApi(GroupReports())
    served = {
        (route.path, route.method.lower())
        for route in (*api.routes(), *ledger.routes(), *scaling.routes(), *events.routes())
    }
    assert served == {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods}
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


async def test_another_name_for_this_machine_is_refused() -> None:
    """Broken: a page on the web whose name was made to mean this machine reads what failed, and announces deploys."""
    table = FailureTable(PIPES)
    api = Api(table, DeadLetterReader(no_admin(), [], table.count), lambda _pipe, _name: None, OPENAPI.read_bytes())
    async with serve_api("127.0.0.1:0", api.routes()) as address, aiohttp.ClientSession() as session:
        for name, status in (("evil.example", 421), ("localhost", 200), ("127.0.0.1:1", 200), ("[::1]", 200)):
            async with session.get(f"http://{address}/openapi.json", headers={"Host": name}) as answer:
                assert (name, answer.status) == (name, status)
