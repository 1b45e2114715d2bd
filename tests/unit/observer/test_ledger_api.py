"""The ledger's answers over HTTP: what people, the autoscaler and `penstock loss` read."""

import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from typer.testing import CliRunner

from services.core.audit import Entry, write_act
from services.core.broker.contract import TopicSpec
from services.core.broker.log import LogBroker
from services.core.broker.producer import Producer
from services.core.ledger.report import SNAPSHOTS
from services.core.pipe_file.topic_names import AUDIT
from services.core.security.bearer import Tokens, name_of
from services.fleet.dead.audit import read_audit
from services.fleet.observer_client import Observer
from services.fleet.verbs import loss
from services.fleet.verbs.app import APP
from services.observer import health
from services.observer.follower import Follower
from services.observer.http import serve_api
from services.observer.ledger.table import Ages
from services.observer.ledger_api import LedgerApi, format_minute
from tests.unit.observer.description import check_answer
from tests.unit.observer.ledger.stories import MINUTE_MS, PLAIN, accept, hear, tell

TOKEN = "a-token-of-the-test-0123456789"


@pytest.fixture
def minute() -> int:
    """Five minutes ago, when the test begins: health looks at the last 15."""
    return int(time.time() * 1000) // MINUTE_MS - 5


@pytest.fixture
def audited() -> list[Entry]:
    """The entries in the audit, after each request that writes one."""
    return []


@pytest.fixture
async def address(tmp_path: Path, minute: int, audited: list[Entry]) -> AsyncIterator[str]:
    """An observer that knows of ten events, two of them missing."""
    async with LogBroker.open(str(tmp_path / "log")) as broker, Producer(broker.appender) as producer:
        for topic in ("flights", "late.out", SNAPSHOTS, AUDIT):
            await broker.admin.create_topic(TopicSpec(topic, 1))
        follower = Follower(PLAIN, broker.reader, producer, lambda rows: None)
        for report in (
            accept(range(10), minute=minute),
            tell("transform", "late", "passed", range(10)),
            tell("expel", "late", "delivered", range(8), destination="ops"),
        ):
            hear(follower.table, report)

        def judge(pipe: str, now: int) -> health.Health:
            return health.find_health(follower.table, follower.planned, pipe, now, 0.01)

        async def audit(action: str, who: str, window: Mapping[str, str]) -> None:
            await write_act(producer, action, who, window)
            audited[:] = [entry async for entry in read_audit(broker.reader)]

        api = LedgerApi(follower, broker.reader, judge, 0.01, audit)
        async with serve_api("127.0.0.1:0", api.routes(), tokens=Tokens([TOKEN])) as bound:
            yield bound


async def ask(
    address: str, path: str, method: str = "GET", *, token: str = TOKEN, **more: Any
) -> tuple[int, dict[str, Any]]:
    head = {"Authorization": f"Bearer {token}"} if token else {}
    async with (
        aiohttp.ClientSession(headers=head) as session,
        session.request(method, f"http://{address}{path}", **more) as answer,
    ):
        body = await answer.json(content_type=None)
    check_answer(method, path, answer.status, body)
    return answer.status, body


async def test_loss_health_and_explain(address: str, minute: int) -> None:
    """Broken: a loss is in the table of nobody who asks for it."""
    status, body = await ask(address, "/v1/pipes/late/loss")
    assert status == 200
    (row,) = body["minutes"]
    assert (row["minute"], row["accepted"], row["missing"], row["loss"]) == (format_minute(minute), 10, 2, 0.2)
    assert [step["missing"] for step in row["steps"]] == [0, 2]
    assert body["final_after_ms"] == Ages().final
    status, body = await ask(address, f"/v1/pipes/late/loss/{row['minute']}/explain")
    assert (status, [one["origin"] for one in body["named"]]) == (200, ["a:0:8", "a:0:9"])
    status, body = await ask(address, "/v1/pipes/late/health")
    assert (status, body["health"]) == (200, "unstable")
    status, body = await ask(address, "/v1/pipes")
    assert [pipe["pipe"] for pipe in body["pipes"]] == ["late"]
    assert (await ask(address, "/v1/pipes/late/lag"))[0] == 200


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/pipes/none/loss", 404),
        ("/v1/pipes/late/loss?from=yesterday", 400),
        ("/v1/pipes/late/loss?from=40d", 400),
        ("/v1/pipes/late/loss?what=1", 400),
        ("/v1/pipes/late/loss/never/explain", 400),
    ],
)
async def test_mistakes_are_problems(address: str, path: str, status: int) -> None:
    """Broken: a wrong question gets a wrong answer, or makes the observer work for nothing."""
    found, body = await ask(address, path)
    assert (found, body["status"]) == (status, status)


async def test_a_planned_action_is_announced(address: str) -> None:
    """Broken: a deployer cannot keep alarms quiet, or any page in a browser can."""
    good = {"kind": "deploy", "seconds": 60, "pipe": "late", "by": "ci"}
    status, body = await ask(address, "/v1/planned", "POST", json=good)
    assert (status, body["kind"]) == (201, "deploy")
    assert len((await ask(address, "/v1/planned"))[1]["planned"]) == 1
    for bad in ({"kind": "nap"}, {**good, "pipe": "none"}, {**good, "seconds": 0}, {**good, "more": 1}):
        assert (await ask(address, "/v1/planned", "POST", json=bad))[0] in (400, 404)
    assert (await ask(address, "/v1/planned", "POST", data='{"kind": "deploy"}'))[0] == 415


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "0", "é" * 40])
async def test_nobody_without_a_token_keeps_alarms_quiet(address: str, token: str) -> None:
    """Broken: any process on the machine announces a deploy, and the loss that it hides wakes nobody."""
    good = {"kind": "deploy", "seconds": 60, "pipe": "late", "by": "ci"}
    status, body = await ask(address, "/v1/planned", "POST", token=token, json=good)
    assert (status, body["type"]) == (401, "urn:penstock:problem:unauthorized")
    status, body = await ask(address, "/v1/planned", token=token)
    assert (status, body["planned"]) == (200, []), "on loopback everybody may read"


def test_the_command_line_shows_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: `penstock loss` fails on what the observer answers."""
    steps = [
        {"node": "transform", "destination": None, "expected": 10, "missing": 0, "outcomes": {}, "final": True},
        {"node": "expel", "destination": "ops", "expected": 10, "missing": 2, "outcomes": {}, "final": True},
        {"node": "expel", "destination": "slow", "expected": 10, "missing": 9, "outcomes": {}, "final": False},
    ]
    minute = "2026-11-21T08:05Z"
    row = {"minute": minute, "accepted": 10, "steps": steps, "missing": 2, "waiting": 0, "loss": 0.9}
    whole = {"pipe": "late", "threshold": 0.01, "catching_up": False, "problem": None}
    named = {"origin": "a:0:8", "missing_at": "expel", "destination": "ops", "seen_by": "transform", "event_id": "e8"}
    answers = {
        "loss": {
            **whole,
            "minutes": [{**row, "final": False, "why_open": "slow is behind", "late": 1, "lost": 2, "final_loss": 0.2}],
        },
        "explain": {
            **whole,
            "minute": minute,
            "missing": 1,
            "records_read": 9,
            "complete": True,
            "named": [{**named, "topic": "late.out", "partition": 1, "offset": "15"}],
        },
    }

    async def answer(_observer: Observer, path: str, _query: dict[str, str]) -> dict[str, Any]:
        return answers[path.rpartition("/")[2]]

    monkeypatch.setattr(loss, "get_json", answer)
    shown = CliRunner().invoke(APP, ["loss", "show", "late", "--observer", "x:1"])
    assert shown.exit_code == 0, shown.output
    assert "20.00%" in shown.output
    assert (
        "2 of 10 events are missing in 1 minute of late. Final: 0 of 1 minute. The rest is not final for slow yet: its missing "
        "events may still arrive, and do not count. The column `state` says why." in " ".join(shown.output.split())
    )
    assert minute in shown.output
    assert "settled" in shown.output
    shown = CliRunner().invoke(APP, ["loss", "explain", "late", "2026-11-21T08:05Z", "--observer", "x:1"])
    assert shown.exit_code == 0, shown.output
    assert "late.out:1:15" in shown.output
    for topic, is_noted in (("late.out", True), ("penstock.delay-16s", False), ("late.retry", False)):
        answers["explain"]["named"] = [
            {**named, "missing_at": "retrier", "topic": topic, "partition": 1, "offset": "1"}
        ]
        shown = CliRunner().invoke(APP, ["loss", "explain", "late", "5m", "--observer", "x:1"])
        assert ("not found in the retrier's topics" in " ".join(shown.output.split())) == is_noted


def test_minutes_that_are_not_final_have_no_missing_events_yet() -> None:
    """Broken: a newcomer reads that nothing is missing, where nothing is known yet, and not when it will be."""
    steps = [{"destination": "ops", "final": False}]
    first, second = (
        {"minute": minute, "accepted": 3, "lost": 0, "final": False, "steps": steps}
        for minute in ("2026-11-21T08:05Z", "2026-11-21T08:06Z")
    )
    end = 1_795_248_420_000  # of the second minute
    body = {"minutes": [first, second], "final_after_ms": 150_000}
    assert loss._sum_up("late", body, end + 149_999) == (
        "6 events accepted in 2 minutes of late. None of the minutes is final yet, so which of the events are missing is not "
        "known. Try: the same again after 2026-11-21T08:09:30Z"
    )
    assert loss._sum_up("late", body, end + 150_000).endswith("is not known. The column `state` says why.")
    final = {**first, "final": True, "steps": [{"destination": "ops", "final": True}]}
    half = loss._sum_up("late", {**body, "minutes": [final, second]}, end)
    assert (
        "0 of 6 events are missing in 2 minutes of late. Final: 1 of 2 minutes. The rest is not final for ops" in half
    )
    assert half.endswith("Try: the same again after 2026-11-21T08:09:30Z")
    assert loss._sum_up("late", {**body, "minutes": [final]}, end) == (
        "0 of 3 events are missing in 1 minute of late; all minutes are final"
    )


async def test_a_planned_action_is_cancelled_and_names_who_did_what(address: str, audited: list[Entry]) -> None:
    """Broken: a deploy that was announced by mistake for a day hides a loss, and nobody knows who announced it."""
    first = {"kind": "deploy", "seconds": 86_400, "pipe": "late", "by": "anna"}
    status, one = await ask(address, "/v1/planned", "POST", json=first)
    assert (status, one["by"], one["token"], one["cancelled_by"]) == (201, "anna", name_of(TOKEN), None)
    path = f"/v1/planned/{one['id']}"
    assert (await ask(address, path, "DELETE", token=""))[0] == 401
    status, ended = await ask(address, path + "?by=ben", "DELETE")
    assert (status, ended["cancelled_by"], ended["cancelled_token"]) == (200, "ben", name_of(TOKEN))
    assert ended["from"] <= ended["until"] < one["until"]
    status, again = await ask(address, path + "?by=carl", "DELETE")
    assert (status, again) == (200, ended), "it stays as it is"
    assert (await ask(address, "/v1/planned"))[1]["planned"] == [ended]
    assert (await ask(address, "/v1/planned/00000000", "DELETE"))[0] == 404
    await ask(address, "/v1/planned", "POST", json={"kind": "scaling", "by": "autoscaler/groups/expel out 1 -> 2"})
    token = f"(token {name_of(TOKEN)})"
    assert [(entry.action, entry.who) for entry in audited] == [("plan", f"anna {token}"), ("cancel", f"ben {token}")]
    assert {entry.filters["id"] for entry in audited} == {one["id"]}, "of people's actions only"


async def test_a_minute_names_the_action_that_excuses_its_loss(address: str) -> None:
    await ask(address, "/v1/planned", "POST", json={"kind": "scaling", "by": "autoscaler/groups/expel out 1 -> 2"})
    (row,) = (await ask(address, "/v1/pipes/late/loss"))[1]["minutes"]
    assert row["planned"] is None
