"""A paused destination, with expel as a process: parked on disk, over crashes, and replayed without a loss."""

import asyncio
import itertools
import signal
from collections import Counter
from pathlib import Path

from aiohttp import web

from tests.integration.expel_process import (
    Expel,
    decide,
    hook,
    ids,
    make_record,
    open_expel,
    wait_parked,
    wait_replayed,
)
from tests.unit.expel import receiver as bad
from tests.unit.expel.receiver import DEADLINE, Received, open_receiver


async def test_a_pause_holds_over_kill_9_and_loses_nothing(tmp_path: Path) -> None:
    """Broken: a crash ends an operator's pause, or events that came meanwhile are lost, or come twice."""
    async with open_receiver() as receiver, open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", receiver.url))
        await expel.start()
        await expel.send(ids(50))
        await receiver.wait_for_ids(ids(50))
        await expel.wait_no_lag("hook")
        await decide(expel, "paused")
        await expel.wait_metric(1, "penstock_expel_paused", destination="hook")
        await expel.send(ids(100, start=50))
        await wait_parked(expel, 100)
        await expel.wait_no_lag("hook")
        await expel.stop(signal.SIGKILL)
        await expel.send(ids(50, start=150))
        await expel.start()
        await wait_parked(expel, 150)
        await expel.wait_no_lag("hook")
        assert sorted(receiver.accepted) == sorted(ids(50))
        assert await expel.get("/readyz") == 200
        await decide(expel, "resumed")
        await receiver.wait_for_ids(ids(200))
        await wait_replayed(expel)
        assert Counter(receiver.accepted) == Counter(ids(200))
        assert await expel.metric("penstock_expel_events_replayed_total", destination="hook") == 150


async def test_gone_parks_over_kill_9_until_resumed(tmp_path: Path) -> None:
    """Broken: a receiver that answered 410 is asked again after a crash, or what it refused is lost."""
    async with open_receiver(lambda _r: web.Response(status=410)) as receiver, open_expel(tmp_path) as expel:
        expel.destinations.append(hook("hook", receiver.url, concurrency=1))
        await expel.send(ids(200))
        await expel.start()
        await wait_parked(expel, 200)
        await expel.wait_no_lag("hook")
        await expel.stop(signal.SIGKILL)
        await expel.send(ids(50, start=200))
        await expel.start()
        await wait_parked(expel, 250)
        assert len(receiver.requests) == 1
        receiver.answer = bad.accept
        await decide(expel, "resumed")
        await receiver.wait_for_ids(ids(250))
        await wait_replayed(expel)
        assert Counter(receiver.accepted) == Counter(ids(250))


async def test_the_order_of_keys_holds_over_pauses_of_two_instances(tmp_path: Path) -> None:
    """Broken: a receiver ends with an old state of a key, because what was parked came behind what was not."""
    calls = itertools.count()
    seen: dict[str, list[int]] = {}

    async def judge(received: Received) -> web.Response:
        await asyncio.sleep(0.005)
        if next(calls) % 5 == 0:
            return web.Response(status=503)
        for event_id in received.ids:
            key, number = event_id.split("-")
            seen.setdefault(key, []).append(int(number))
        return web.Response(status=204)

    def events(first: int) -> list[str]:
        return [f"k{key}-{number}" for number in range(first, first + 10) for key in range(10)]

    async def send(expel: Expel, first: int) -> None:
        await expel.send_records([make_record(name, key=name.split("-")[0]) for name in events(first)])

    async with open_receiver(judge) as receiver, open_expel(tmp_path) as expel:
        retry = {"attempts": 20, "base": "10ms", "max_wait": "40ms"}
        expel.destinations.append(hook("hook", receiver.url, order="key", retry=retry, batch={"max_events": 20}))
        second = expel.second()
        try:
            await expel.start()
            await second.start()
            await send(expel, 0)
            await receiver.wait_for(lambda r: len(r.accepted) >= 20)
            await decide(expel, "paused")
            for instance in (expel, second):
                await instance.wait_metric(1, "penstock_expel_paused", destination="hook")
            await send(expel, 10)
            await wait_parked(expel, 100)
            await expel.wait_no_lag("hook")
            await decide(expel, "resumed")
            await send(expel, 20)
            async with asyncio.timeout(DEADLINE):
                while sum(len(set(numbers)) for numbers in seen.values()) < 300:
                    await asyncio.sleep(0.05)
        finally:
            if second.process is not None:
                await second.stop(signal.SIGKILL)
    for key in range(10):
        taken = seen[f"k{key}"]
        last = [max(place for place, number in enumerate(taken) if number == n) for n in range(30)]
        assert last == sorted(last), (key, taken)
