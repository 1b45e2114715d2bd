"""The API of a table: points, ranges, tokens, and refusals."""

from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote

import pytest
from prometheus_client import REGISTRY

from services.core.broker.contract import TopicSpec
from services.core.security.keys import KeyRing, make_key
from services.table import problems
from services.table.app import OPENAPI
from services.table.http_server import HEAD_S, Answer, Connection, HttpServer
from tests.support.raw_http import Client
from tests.unit.table.running import AGE_MS, STREAM, make_get, running


async def test_points(tmp_path: Path) -> None:
    """Broken: a client reads another value than the newest, or one that was deleted."""
    async with running(tmp_path) as table:
        await table.caught_up()
        await table.put("a", b'{"n": 1}')
        newest = await table.put("a", b'{"n":  2}')
        odd = await table.put("a/b ä", b"plain \xff", (("content-type", b"text/plain"),))
        gone = await table.put("gone", b"1")
        gone = await table.put("gone", None)
        reply = await table.get(f"/a?at_least={newest}")
        assert (reply.status, reply.body, reply.headers["etag"]) == (200, b'{"n":  2}', f'"{newest}"')
        assert reply.headers["content-type"] == "application/json"
        assert (await table.get("/a", If_None_Match=reply.headers["etag"])).status == 304
        reply = await table.get(f"/{quote('a/b ä', safe='')}?at_least={odd}")
        assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"plain \xff", "text/plain")
        assert (await table.get(f"/gone?at_least={gone}")).json()["type"].endswith(":key-not-found")
        assert (await table.get("/none")).status == 404


async def test_ranges(tmp_path: Path) -> None:
    """Broken: a page misses a key or has one twice, or its JSON is none."""
    async with running(tmp_path) as table:
        for number in range(25):
            token = await table.put(f"k{number:02}", b'{"n":%d}' % number)
        await table.put("z", b"no json")
        await table.until(lambda: sum(table.follower.nexts.values()) == 26)
        await table.caught_up()
        seen: list[str] = []
        after = ""
        while True:
            page = (await table.get(f"?prefix=k&limit=10{after}&at_least={token}")).json()
            seen += [row["key"] for row in page["rows"]]
            if page["next"] is None:
                break
            after = f"&after={page['next']}"
        assert seen == [f"k{number:02}" for number in range(25)]
        rows = (await table.get("?prefix=k07")).json()["rows"]
        assert [(row["key"], row["value"]) for row in rows] == [("k07", {"n": 7})]
        (odd,) = (await table.get("?prefix=z")).json()["rows"]
        assert odd["media"] == "application/octet-stream"
        assert "value_base64" in odd
        assert (await table.get("?prefix=x")).json()["rows"] == []
        whole = (await table.get("?limit=1000")).json()
        assert len(whole["rows"]) == 26
        assert whole["token"].count(":") == 2


async def test_reading_ones_own_writes(tmp_path: Path) -> None:
    """Broken: a client that has just written reads the value before."""
    async with running(tmp_path, wait=60) as table:
        await table.caught_up()
        for number in range(50):
            token = await table.put("a", b"%d" % number)
            reply = await table.get(f"/a?at_least={token}")
            assert reply.body == b"%d" % number


async def test_a_token_that_nobody_made(tmp_path: Path) -> None:
    """Broken: a client waits for ever."""
    async with running(tmp_path, wait=0.3) as table:
        token = await table.put("a", b"1")
        await table.caught_up()
        topic = await table.topic()
        reply = await table.get(f"/a?at_least={token.partition(':')[0]}:999")
        assert (reply.status, reply.json()["type"].rpartition(":")[2]) == (412, "token-unknown")
        assert (await table.get(f"/a?at_least={topic}.900:1")).status == 412
        rounds: list[object] = []

        async def do_nothing(stopping: object) -> bool:
            rounds.append(stopping)
            return False

        table.follower._round = do_nothing  # type: ignore[method-assign]
        await table.until(lambda: rounds)
        table.follower.ends[0] = table.follower.ends[1] = 10_000  # as if the stream were ahead of it
        reply = await table.get(f"/a?at_least={topic}.0:500")
        assert (reply.status, reply.json()["type"].rpartition(":")[2]) == (503, "not-reached")
        assert reply.headers["retry-after"] == "1"


async def test_a_topic_that_was_created_again_has_other_tokens(tmp_path: Path) -> None:
    """Broken: a token or an ETag of the deleted topic is answered with the events of the new one, as if nothing had happened."""
    async with running(tmp_path, partitions=1) as table:
        await table.caught_up()
        old = await table.put("a", b'"old"')
        tag = (await table.get(f"/a?at_least={old}")).headers["etag"]
        page = (await table.get()).json()
        assert page["token"].startswith(old), page
        await table.broker.admin.delete_topic(STREAM)
        spec = TopicSpec(STREAM, 1, retention_ms=AGE_MS, compact=True)
        await table.broker.admin.create_topic(spec)
        new = await table.put("a", b'"new"')
        reply = await table.get(f"/a?at_least={new}", If_None_Match=tag)
        if reply.status == 503:  # the table has not noticed yet, and says so at once
            assert reply.problem == "not-ready"
        await table.until(lambda: table.follower.built)
        await table.caught_up()
        reply = await table.get(f"/a?at_least={new}", If_None_Match=tag)
        assert (reply.status, reply.body) == (200, b'"new"')
        for path in (
            f"/a?at_least={old}",
            f"?at_least={old}",
            f"?changes_after={old}",
            f"?changes_after={page['token']}",
        ):
            reply = await table.get(path)
            assert (reply.status, reply.problem) == (410, "token-gone"), path
            assert "Read the whole table again" in reply.json()["detail"]
        reply = await table.get("?changes_after=", Last_Event_ID=page["token"])
        assert reply.status == 410


MISTAKES = [
    ("/", 200, ""),
    ("/openapi.json", 200, ""),
    ("/nothing", 404, "not-found"),
    ("/v1/tables/none/a", 404, "table-not-found"),
    (f"/v1/tables/{STREAM}/", 400, "bad-key"),
    (f"/v1/tables/{STREAM}/a/b", 400, "bad-key"),
    (f"/v1/tables/{STREAM}/" + "k" * 1025, 400, "bad-key"),
    (f"/v1/tables/{STREAM}?limit=0", 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}?limit=1000000000", 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}?limit=1&limit=2", 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}?after=%ff", 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}?after=*", 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}?other=1", 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}?" + "&".join(["limit=1"] * 50), 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}/a?at_least=0:1", 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}/a?at_least=0123abcd.0:1", 410, "token-gone"),
    (f"/v1/tables/{STREAM}?changes_after=0123abcd.0:1", 410, "token-gone"),
    (f"/v1/tables/{STREAM}/a?at_least=x", 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}/a?at_least=" + "TOPIC." + ",".join(["1:1"] * 4000), 400, "bad-parameter"),
    (f"/v1/tables/{STREAM}/a?token=psk_x", 401, "key-in-url"),
    (f"/v1/tables/{STREAM}?changes_after=TOPIC.0:99", 412, "token-unknown"),
    (f"/v1/tables/{STREAM}?changes_after=TOPIC.0:0@1", 412, "token-expired"),
]


async def test_mistakes(tmp_path: Path) -> None:
    """Broken: a wrong request gets an answer that hides the mistake, holds the service, or repeats the input."""
    async with running(tmp_path) as table:
        await table.caught_up()
        for path, status, problem in MISTAKES:
            reply = await table.ask(path.replace("TOPIC", await table.topic()))
            assert reply.status == status, path
            if problem:
                assert reply.json()["type"] == f"urn:penstock:problem:{problem}", path
                assert reply.json()["detail"].endswith("."), path
        assert (await table.ask(f"/v1/tables/{STREAM}", "DELETE")).headers["allow"] == "GET"
        assert (await table.get(Host="example.org")).status == 421


RAW = [
    (b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\nX: y\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\n folded\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\n\r\nhello", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    (b"GET /a b HTTP/1.1\r\nHost: localhost\r\n\r\n", 400),
    (b"\x16\x03\x01\r\n\r\n", 400),
    (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000 + b"\r\n\r\n", 431),
]


@pytest.mark.parametrize(("request_", "status"), RAW)
async def test_bytes_that_are_no_request(tmp_path: Path, request_: bytes, status: int) -> None:
    """Broken: a proxy and this server see different requests in the same bytes."""
    async with running(tmp_path) as table, Client(table.port) as client:
        reply = await client.request(request_)
        assert reply.status == status
        assert reply.headers["connection"] == "close"


@pytest.mark.parametrize("value", ["close", "Close", "keep-alive, close"])
@pytest.mark.parametrize("path", [f"/v1/tables/{STREAM}/a", "/nothing", "waits"])
async def test_a_client_that_asks_for_the_end_gets_it(tmp_path: Path, value: str, path: str) -> None:
    """Broken: a client that reads to the end of the connection waits for more than a minute."""
    async with running(tmp_path) as table:
        await table.caught_up()
        if path == "waits":
            path = f"/v1/tables/{STREAM}/a?at_least={await table.put('a', b'1')}"
        async with Client(table.port) as client:
            reply = await client.request(make_get(path, Connection=value) + make_get("/"))
            assert reply.headers["connection"] == "close"
            assert await client.is_over(), "the second request is not answered"
        async with Client(table.port) as client:
            assert "connection" not in (await client.request(make_get(path, Connection="keep-alive"))).headers
            assert (await client.request(make_get("/"))).status == 200


async def test_a_head_that_comes_a_byte_at_a_time_is_cut() -> None:
    """Broken: a client that never ends its head holds a connection for hours."""
    server = HttpServer(lambda _: Answer(200, b"{}"), max_connections=1)
    connection, transport, now = Connection(server), FakeTransport(), [100.0]
    connection._loop = SimpleNamespace(time=lambda: now[0])  # type: ignore[assignment]
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.data_received(make_get("/") + b"G")
    assert transport.written.startswith(b"HTTP/1.1 200")
    assert connection.deadline == 100.0 + HEAD_S
    while now[0] <= 100.0 + HEAD_S:
        assert not transport.aborted
        connection.data_received(b"E")
        assert connection.deadline == 100.0 + HEAD_S, "a further byte prolongs it"
        now[0] += 1
    before = REGISTRY.get_sample_value("penstock_table_connections_cut_off_total", {"reason": "slow_head"}) or 0.0
    connection.expire()
    assert transport.aborted
    cut = REGISTRY.get_sample_value("penstock_table_connections_cut_off_total", {"reason": "slow_head"})
    assert cut == before + 1


class FakeTransport:
    """Takes what is written."""

    def __init__(self) -> None:
        self.written = b""
        self.writes = 0
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written += data
        self.writes += 1

    def abort(self) -> None:
        self.aborted = True

    def is_closing(self) -> bool:
        return self.aborted

    def resume_reading(self) -> None:
        return


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    """Broken: an answer goes to another request, when one of them has to wait."""
    async with running(tmp_path) as table:
        await table.caught_up()
        async with Client(table.port) as client:
            token = await table.put("a", b"1")
            waits = make_get(f"/v1/tables/{STREAM}/a?at_least={token}")
            reply = await client.request(waits + make_get("/nothing") + make_get("/"))
            assert (reply.status, reply.body) == (200, b"1")
            assert (await client.request(b"")).status == 404
            assert (await client.request(b"")).status == 200


async def test_answers_to_requests_that_come_together_are_written_together() -> None:
    """Broken: each answer costs a call of the system, or a client that sends many requests makes one write without a bound."""
    server = HttpServer(lambda _: Answer(200, b"x" * 1000), max_connections=1)
    connection, transport = Connection(server), FakeTransport()
    connection.connection_made(transport)  # type: ignore[arg-type]
    connection.data_received(make_get("/") * 10 + make_get("/")[:-1])
    assert (transport.writes, transport.written.count(b"HTTP/1.1 200")) == (1, 10)
    before = REGISTRY.get_sample_value("penstock_table_requests_total", {"status": "200"}) or 0.0
    connection.data_received(b"\n" + make_get("/") * 99)
    assert transport.writes == 3, "100 answers have more than JOINED_BYTES"
    assert transport.written.count(b"HTTP/1.1 200") == 110
    assert REGISTRY.get_sample_value("penstock_table_requests_total", {"status": "200"}) == before + 100


async def test_headers_that_differ_from_those_before(tmp_path: Path) -> None:
    """Broken: a request is judged by the headers of an earlier one on its connection, or by a key that was revoked since."""
    path = f"/v1/tables/{STREAM}/none"
    token, entry = make_key(streams=[STREAM], scopes=["read"], created="2026-01-01T00:00:00Z")
    async with running(tmp_path) as table:
        await table.caught_up()
        async with Client(table.port) as client:
            for headers, status in [({}, 404), ({"Host": "example.org"}, 421), ({"X": "x" * 5000}, 404), ({}, 404)]:
                assert (await client.request(make_get(path, **headers))).status == status
            table.access.ring = KeyRing([entry])
            assert (await client.request(make_get(path))).status == 401
            keyed = make_get(path, Authorization=f"Bearer {token}")
            assert [(await client.request(keyed)).status for _ in range(2)] == [404, 404]
            table.access.ring = KeyRing([])
            assert (await client.request(keyed)).status == 401
            assert (await client.request(b"GET / HTTP/1.1\r\n\r\n")).status == 400


async def test_keys(tmp_path: Path) -> None:
    """Broken: a key reads tables that it was not made for, or tells which tables there are."""
    made = {
        name: make_key(streams=streams, scopes=scopes, created="2026-01-01T00:00:00Z")  # type: ignore[arg-type]
        for name, streams, scopes in [
            ("reads", [STREAM], ["read"]), ("sends", ["*"], ["ingest"]), ("elsewhere", ["other"], ["read"])
        ]
    }  # fmt: skip
    ring = KeyRing([entry for _, entry in made.values()])
    async with running(tmp_path, ring=ring) as table:
        await table.caught_up()

        async def status(name: str | None, stream: str = STREAM) -> tuple[int, str]:
            headers = {} if name is None else {"Authorization": f"Bearer {made[name][0]}"}
            reply = await table.ask(f"/v1/tables/{stream}", **headers)
            return reply.status, reply.json().get("detail", "")

        assert (await status("reads"))[0] == 200
        assert (await status(None))[0] == 401
        assert (await status("sends"))[0] == 403
        assert await status("elsewhere") == await status("elsewhere", "none")
        assert (await status("elsewhere"))[0] == 404


def test_every_problem_is_in_the_api_document() -> None:
    """Broken: a client meets a problem that the document does not have."""
    text = OPENAPI.read_text()
    for kind in problems.ALL:
        assert f"`{kind.name}`" in text, kind.name
