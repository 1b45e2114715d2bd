"""The autoscaler's reports, from its own client through the observer's API."""

import time
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from services.autoscaler.groups.observer_client import ObserverUnavailable, open_observer
from services.core.group_report import MAX_REPORT_BYTES, GroupReport
from services.core.security.bearer import Tokens
from services.observer.http import serve_api
from services.observer.scaling_api import KEPT_MS, MAX_GROUPS, GroupReports, ScalingApi
from tests.unit.observer.description import check_answer

TOKEN = "a-token-of-the-test-0123456789"


def make_report(group: str = "expel", **more: Any) -> GroupReport:
    """Of now."""
    return GroupReport(group, round(time.time() * 1000), 2, 3, "hold", "frozen", "out: 2.1 cores", **more)


async def test_the_autoscalers_report_is_shown(tmp_path: Path) -> None:
    """Broken: the page and the command show nothing of the groups, or a long reason of a person hides the group."""
    token_file = tmp_path / "token"
    token_file.touch(mode=0o600)
    token_file.write_text(f"{TOKEN}\n")
    reports = GroupReports()
    long = "😀" * 3000
    async with (
        serve_api("127.0.0.1:0", ScalingApi(reports).routes(), tokens=Tokens([TOKEN])) as address,
        aiohttp.ClientSession() as session,
        open_observer(address, token_file) as autoscaler,
        open_observer(address) as stranger,
    ):
        await autoscaler.report(make_report(frozen=long, hot=long, failed=(long,) * 50))
        await autoscaler.report(make_report("ingest"))
        await autoscaler.report(make_report("ingest", working=2))
        with pytest.raises(ObserverUnavailable, match="401"):
            await stranger.report(make_report("retrier"))
        async with session.get(f"http://{address}/v1/scaling") as answer:
            body = await answer.json()
    check_answer("GET", "/v1/scaling", 200, body)
    assert [(one["group"], one["working"], one["wanted"]) for one in body["groups"]] == [
        ("expel", 0, 3),
        ("ingest", 2, 3),
    ]
    assert body["groups"][0]["failed"][-1] == "40 more"


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"group": "other"}, 400),
        ({"size": "two"}, 400),
        ({"at_ms": 10**18}, 400),
        ({"words": "x" * MAX_REPORT_BYTES}, 413),
    ],
)
async def test_mistakes_are_problems(change: dict[str, Any], status: int) -> None:
    """Broken: a report that nobody can show ends the page's stream, or fills the observer's memory."""
    reports = GroupReports()
    body = {**msgspec.to_builtins(make_report()), **change}
    async with (
        serve_api("127.0.0.1:0", ScalingApi(reports).routes(), tokens=Tokens([TOKEN])) as address,
        aiohttp.ClientSession(headers={"Authorization": f"Bearer {TOKEN}"}) as session,
    ):
        async with session.put(f"http://{address}/v1/scaling/expel", json=body) as answer:
            assert answer.status == status
            check_answer("PUT", "/v1/scaling/expel", status, await answer.json(content_type=None))
        async with session.put(f"http://{address}/v1/scaling/expel", data=b"{}") as answer:
            assert answer.status == 415
    assert reports.all(0) == ()


def test_old_groups_are_forgotten() -> None:
    """Broken: a group that was renamed is shown for ever, or names fill the memory."""
    reports = GroupReports()
    for number in range(MAX_GROUPS + 5):
        reports.keep(make_report(f"g{number:03}"), now=number)
    assert [one.group for one in reports.all(MAX_GROUPS)] == [f"g{number:03}" for number in range(5, MAX_GROUPS + 5)]
    assert [one.group for one in reports.all(KEPT_MS + MAX_GROUPS + 3)] == [f"g{MAX_GROUPS + 4:03}"]
