"""The receiver of `penstock listen`: checked with an independent signer, counts duplicates, plays a bad one."""

import base64
import datetime
import io
import json
from typing import Any, cast

import aiohttp
import pytest
from rich.console import Console
from standardwebhooks import Webhook

from services.core.security.signing import SigningKey
from services.fleet.receiver import Received, Receiver, serve_receiver
from services.fleet.verbs import listen

SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()
BATCH = [{"specversion": "1.0", "id": "1", "data": {}}, {"specversion": "1.0", "id": "2", "data": {}}]


async def post(receiver: Receiver, body: bytes, *, secret: str = SECRET, message: str = "msg_1", **more: str) -> int:
    now = datetime.datetime.now(datetime.UTC)
    headers = {
        "webhook-id": message,
        "webhook-timestamp": str(int(now.timestamp())),
        "webhook-signature": Webhook(secret).sign(message, now, body.decode()),
        "Content-Type": "application/cloudevents-batch+json",
        **more,
    }
    async with (
        serve_receiver(receiver, "127.0.0.1", 0) as port,
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{port}/any/path", data=body, headers=headers) as response,
    ):
        return response.status


async def test_good_signatures_pass_and_duplicates_are_counted() -> None:
    """Broken: a receiver by our own rules cannot verify what others sign, or counts a repetition as news."""
    told: list[Received] = []
    receiver = Receiver((SigningKey.parse(SECRET),), on_request=told.append)
    assert await post(receiver, json.dumps(BATCH).encode()) == 204
    assert await post(receiver, json.dumps(BATCH[1:]).encode(), message="msg_2") == 204
    assert (receiver.delivered, receiver.duplicates, receiver.requests) == (2, 1, 2)
    assert [len(one.new) for one in told] == [2, 0]
    assert all(one.signed for one in told)


async def test_pipes_that_share_an_event_do_not_repeat_each_other() -> None:
    """Broken: the result of a second pipe is counted as a duplicate, and never printed."""
    receiver = Receiver()
    for message in ("raw/h1", "alarms:1", "alarms/h2"):
        assert await post(receiver, json.dumps(BATCH[:1]).encode(), message=message) == 204
    assert (receiver.delivered, receiver.duplicates) == (2, 1)


async def test_events_without_an_id_are_counted_apart() -> None:
    """Broken: a listener says that there were no duplicates where it cannot know."""
    receiver = Receiver()
    for message in ("p/h1", "p/h2", "p/h2"):
        assert (
            await post(
                receiver, b'{"n": 1}\n{"n": 2, "id": 7}', message=message, **{"Content-Type": "application/x-ndjson"}
            )
            == 204
        )
    assert (receiver.delivered, receiver.duplicates, receiver.without_id) == (3, 3, 2)


async def test_bad_signature_is_refused() -> None:
    """Broken: anybody's request counts as a delivery."""
    other = "whsec_" + base64.b64encode(b"x" * 32).decode()
    receiver = Receiver((SigningKey.parse(SECRET),))
    assert await post(receiver, json.dumps(BATCH).encode(), secret=other) == 401
    assert (receiver.delivered, receiver.unsigned) == (0, 1)


async def test_refusals_have_the_status_that_was_asked_for() -> None:
    """Broken: nobody can try what a 400 or a 410 does to the events before a real receiver answers it."""
    receiver = Receiver(fail=1.0, refusal=410)
    assert await post(receiver, json.dumps(BATCH).encode()) == 410
    assert (receiver.delivered, receiver.failed) == (0, 1)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer other"}, 401),
        ({"Authorization": "Basic right"}, 401),
        ({"Authorization": "right"}, 401),
        ({"Authorization": "Bearer right"}, 204),
    ],
)
async def test_token(headers: dict[str, str], status: int) -> None:
    """Broken: a user cannot see whether a destination's bearer token is the one that the receiver expects."""
    seen: list[Received] = []
    receiver = Receiver(token="right", on_request=seen.append)
    assert await post(receiver, json.dumps(BATCH).encode(), **headers) == status
    assert (receiver.delivered, receiver.unauthorized) == ((2, 0) if status == 204 else (0, 1))
    assert [one.authorized for one in seen] == [status == 204]
    assert await post(Receiver(), json.dumps(BATCH).encode(), **headers) == 204


def test_a_file_gets_whole_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the output in a file lacks the ends of long events, or all but three events of a request."""
    events = [{"id": str(number), "data": {"pad": "x y " * 100, "end": number}} for number in range(5)]
    texts = [json.dumps(event, separators=(",", ":")).encode() for event in events]
    received = Received("msg_1", events, events, None, 0.0, True, texts)
    printed: list[str] = []
    for is_terminal in (False, True):
        console = Console(file=io.StringIO(), width=80, soft_wrap=True, force_terminal=is_terminal, color_system=None)
        monkeypatch.setattr(listen, "OUT", console)
        listen._print_lines(received)
        printed.append(cast(io.StringIO, console.file).getvalue())
    whole, cut = (text.splitlines()[1:] for text in printed)
    assert "5 events, token good, signature not checked" in printed[0]
    listen._print_lines(Received("msg_2", (), (), False, 0.0))
    assert "msg_2 refused: signature bad" in cast(io.StringIO, console.file).getvalue()
    assert [line.endswith(f'"end":{number}}}') for number, line in enumerate(whole)] == [True] * 5
    assert [line.endswith("…") for line in cut] == [True, True, True, False]
    assert cut[-1] == "  … and 2 more; --json for all of it"


async def test_plays_a_bad_one() -> None:
    """Broken: --fail does not fail, so that nobody sees what retries do."""
    receiver = Receiver(fail=1.0, slow=0.01)
    assert await post(receiver, json.dumps(BATCH).encode()) == 503
    assert (receiver.delivered, receiver.failed) == (0, 1)
    assert await post(Receiver(), b"not json") == 400


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("application/cloudevents-batch+json", b'[{"id":"1"}]', [{"id": "1"}]),
        ("application/json", b'[{"a":1},{"a":2}]', [{"a": 1}, {"a": 2}]),
        ("application/json", b'{"a":1}', [{"a": 1}]),
        ("application/x-ndjson", b'{"a":1}\n{"a":2}\n', [{"a": 1}, {"a": 2}]),
    ],
)
async def test_every_body_format(kind: str, body: bytes, expected: list[dict[str, Any]]) -> None:
    """Broken: a destination with another body looks as if nothing arrived."""
    told: list[Received] = []
    receiver = Receiver(on_request=told.append)
    assert await post(receiver, body, **{"Content-Type": kind}) == 204
    (one,) = told
    assert (one.new, [json.loads(text) for text in one.texts]) == (expected, expected)


async def test_events_are_shown_as_they_were_received(capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: a person sees 24.4 where the receiver got 24.40, and searches for the digits that were never lost."""
    body = b'[{"specversion":"1.0","id":"1","data":{"a":24.40,"b":1e2,"c":"\\u00e4"}},\n{"amount": 12345678901234567890.10}]'
    told: list[Received] = []
    assert await post(Receiver(on_request=told.append), body) == 204
    listen._print_json(told[0])
    printed = capsys.readouterr().out
    assert '"data":{"a":24.40,"b":1e2,"c":"\\u00e4"}' in printed
    assert '"event":{"amount": 12345678901234567890.10}' in printed
    assert len(printed.splitlines()) == 2
    assert listen._shown(told[0].new[0], told[0].texts[0]) == '1  {"a":24.40,"b":1e2,"c":"\\u00e4"}'


async def test_memory_of_ids_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: a receiver that runs for weeks fills the memory."""
    monkeypatch.setattr("services.fleet.receiver.REMEMBERED_IDS", 10)
    receiver = Receiver()
    await post(receiver, json.dumps([{"id": str(number)} for number in range(50)]).encode())
    assert receiver.delivered == 50
    assert len(receiver._seen) == 10
