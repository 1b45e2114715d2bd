"""Dead letters from the first refusal to the redrive, with the whole fleet and the command line as a person has them."""

import asyncio
import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from tests.integration.fleet_process import DEADLINE, Desk, living, until
from tests.unit.expel.receiver import Received, Receiver, open_receiver

EVENTS = 30


def refuse(received: Received) -> web.Response:
    """Each with a text of its own, as receivers do."""
    return web.Response(status=404, text=f"no order {len(received.body)} here")


def write_pipes(desk: Desk, receiver: Receiver) -> None:
    desk.write_pipes()
    path = desk.folder / "pipes.yaml"
    path.write_text(path.read_text().replace(f"http://127.0.0.1:{desk.hook_port}/", receiver.url))


async def lines(desk: Desk, *arguments: str) -> list[dict[str, Any]]:
    """What a verb prints with --json."""
    command = await desk.run(*arguments, "--json")
    assert command.process.returncode == 0, command.err
    return [json.loads(line) for line in command.out.splitlines()]


async def open_letters(desk: Desk) -> list[dict[str, Any]]:
    return await lines(desk, "dead", "list", "--pipe", "p", "--limit", "0")


async def wait_for_letters(desk: Desk, count: int) -> list[dict[str, Any]]:
    """The observer counts them while they come: a command for each look would cost a second of CPU."""
    await wait_for_failures((await desk.state()).observer, ("active", False, count, [("http_404", 404, count)]))
    found = await open_letters(desk)
    assert len(found) == count
    return found


async def test_from_refusal_to_redrive(tmp_path: Path) -> None:
    """Broken: what a receiver refused cannot be found, sent again exactly once, or nobody can say who did it."""
    desk = Desk(tmp_path)
    async with open_receiver(refuse) as receiver:
        write_pipes(desk, receiver)
        async with desk.up():
            await refuse_and_redrive(desk, receiver)


async def refuse_and_redrive(desk: Desk, receiver: Receiver) -> None:
    await desk.send(desk.write_events(EVENTS))
    letters = await wait_for_letters(desk, EVENTS)
    ids = {letter["id"] for letter in letters}
    assert ids == {f"e{n}" for n in range(EVENTS)}
    assert {(letter["reason"], letter["destination"], letter["fate"]) for letter in letters} == {("http_404", "d", "")}

    (shown,) = await lines(desk, "dead", "show", letters[3]["position"])
    assert json.loads(shown["payload"])["id"] == letters[3]["id"]
    (destination,) = await lines(desk, "destination", "show", "d")
    (cause,) = destination["causes"]
    assert (cause["reason"], cause["count"]) == ("http_404", EVENTS)
    assert "no order #" in cause["detail"]
    await ask_the_observer(desk)

    receiver.answer = lambda _received: web.Response(status=204)
    (done,) = await lines(desk, "dead", "redrive", "--destination", "d", "--rate", "50")
    assert (done["redriven"], done["refused"]) == (EVENTS, {})
    await until(lambda: len(receiver.accepted) >= EVENTS, "all that was redriven is delivered")
    assert await open_letters(desk) == []
    (again,) = await lines(desk, "dead", "redrive", "--pipe", "p")
    assert again["redriven"] == 0
    (one,) = await lines(desk, "dead", "redrive", letters[0]["position"])
    assert one["redriven"] == 1
    await until(lambda: len(receiver.accepted) >= EVENTS + 1, "what was redriven by its position is delivered again")
    assert sorted(receiver.accepted) == sorted([*ids, letters[0]["id"]])

    entries = await lines(desk, "dead", "audit")
    assert sum(entry["count"] for entry in entries) == EVENTS + 1
    assert {(entry["action"], entry["topic"]) for entry in entries} == {("redrive", "p.dead")}
    assert all("@" in entry["who"] for entry in entries)


async def ask_the_observer(desk: Desk) -> None:
    """It counts what the command line counts, and after a crash it counts it again."""
    state = await desk.state()
    [observer] = [process for process in state.processes if process.service == "observer"]
    expected = ("active", False, EVENTS, [("http_404", 404, EVENTS)])
    await wait_for_failures(state.observer, expected)
    assert observer.pid is not None
    os.kill(observer.pid, signal.SIGKILL)
    await until(lambda: not living([observer.pid]), "the observer is gone")
    await wait_for_failures(state.observer, expected)


async def wait_for_failures(address: str, expected: tuple[object, ...]) -> None:
    found: object = None
    async with asyncio.timeout(DEADLINE), aiohttp.ClientSession() as session:
        while found != expected:
            await asyncio.sleep(0.1)
            with suppress(aiohttp.ClientError):
                async with session.get(f"http://{address}/v1/destinations/p/d/failures") as answer:
                    body = await answer.json()
                causes = [(cause["reason"], cause["status"], cause["count"]) for cause in body["causes"]]
                found = (body["state"], body["catching_up"], body["letters"], causes)


async def test_discarded_and_listed_no_more(tmp_path: Path) -> None:
    """Broken: letters that nobody wants hide those that matter, or one is discarded without being asked for."""
    desk = Desk(tmp_path)
    async with open_receiver(refuse) as receiver:
        write_pipes(desk, receiver)
        async with desk.up() as fleet:
            await desk.send(desk.write_events(3))
            letters = await wait_for_letters(desk, 3)
            assert await fleet.interrupt() == 0
    refused = await desk.run("dead", "discard", letters[0]["position"])
    assert (refused.process.returncode, "Try: --yes" in refused.err) == (1, True), "nobody said yes"
    assert len(await open_letters(desk)) == 3, "the log is found without a fleet"
    assert await lines(desk, "dead", "discard", letters[0]["position"], "--yes") == [{"discarded": 1}]
    assert [letter["position"] for letter in await open_letters(desk)] == [one["position"] for one in letters[1:]]
    everything = await lines(desk, "dead", "list", "--all")
    assert [letter["fate"] for letter in everything] == ["discarded", "", ""]
    table = await desk.run("dead", "list", "--all")
    assert "discarded" in table.out
    assert "3 dead letters" in table.err
