"""The webhooks' other side: receivers that process events and say so, or fail in every way in which a receiver can."""

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from services.core.http.client import BadResponse, Response
from tests.simulation.machine import WORLD, Machine, current_process
from tests.simulation.oracle import Oracle

KINDS = ("500", "503", "429", "hang", "hang_after", "reset", "reset_after", "partial", "garbage", "400", "410")
"""hang_after, reset_after: the events are processed, and nobody hears of it. partial: some of them are, and it says which not."""


class Receiver:
    """One destination's. modes: what may happen to a request now; "ok" alone while all is well."""

    def __init__(
        self,
        machine: Machine,
        rng: random.Random,
        oracle: Oracle,
        route: tuple[str, str],
        disturbed_until: Callable[[], float],
        check: Callable[[str, Mapping[str, str], bytes], None],
    ) -> None:
        self._machine, self._rng, self._oracle, self.route = machine, rng, oracle, route
        self._disturbed_until, self._check = disturbed_until, check
        self.modes: tuple[str, ...] = ("ok",)
        self.requests = self.failures = 0

    def begin(self, seconds: float, modes: tuple[str, ...]) -> None:
        """Fail like that for so long."""
        self.modes = modes
        self._machine.call_later(seconds, self._end, modes, context=WORLD)

    def _end(self, modes: tuple[str, ...]) -> None:
        if self.modes is modes:
            self.modes = ("ok",)

    def handle(self, headers: bytes, body: bytes) -> tuple[Response | Exception | None, float]:
        """(the answer; an error on the way; None: nothing ever comes; after how many seconds)."""
        self.requests += 1
        self._oracle.asked(self._oracle.routes[self.route], self._machine.time(), self._disturbed_until())
        fields = (line.partition(": ") for line in headers.decode().splitlines())
        self._check(self.route[1], {name: value for name, _, value in fields}, body)
        mode = self._rng.choice(self.modes)
        items = orjson.loads(body)
        wait = self._rng.choice((0.001, self._rng.uniform(0.001, 0.3)))
        if mode != "ok":
            self.failures += 1
        self._machine.trace(f"{'/'.join(self.route)}: {len(items)} events: {mode}")
        match mode:
            case "500" | "400" | "410":
                return Response(int(mode)), wait
            case "503" | "429":
                return Response(int(mode), self._rng.choice((None, "1", "3"))), wait
            case "hang" | "reset":
                return (None, 0.0) if mode == "hang" else (ConnectionResetError(), wait)
            case "garbage":
                return BadResponse("no answer"), wait
            case "partial":
                failed = self._refuse_some(items)
                self._process([item for index, item in enumerate(items) if index not in failed])
                told = [{"index": index, "retry": True} for index in failed]
                return Response(207, None, orjson.dumps({"failed": told})), wait
        self._process(items)
        if mode == "hang_after":
            return None, 0.0
        if mode == "reset_after":
            return ConnectionResetError(), wait
        return Response(self._rng.choice((200, 204))), wait

    def _refuse_some(self, items: list[Any]) -> list[int]:
        """Of a key all that is behind the first one refused, too: who wants order does not take the later ones."""
        keys, failed = set(), []
        for index, item in enumerate(items):
            key = (item["data"] if "specversion" in item else item)["key"]
            if key in keys or self._rng.random() < 0.5:
                keys.add(key)
                failed.append(index)
        return failed

    def _process(self, items: list[Any]) -> None:
        route = self._oracle.routes[self.route]
        for item in items:
            data = item["data"] if "specversion" in item else item
            self._oracle.arrive(route, str(data.get("id")), data)


class ModelClient:
    """In place of expel's HttpClient. The receiver is found by the URL's path: /pipe/destination."""

    def __init__(self, url: str, *, timeout: float, **_: Any) -> None:
        process = current_process()
        assert process is not None
        pipe, name = url.rsplit("/", 2)[1:]
        find: Callable[[tuple[str, str]], Receiver] = process.found["receiver"]
        self._receiver, self._timeout = find((pipe, name)), timeout
        self._machine: Machine = process.found["machine"]

    async def post(self, headers: bytes, body: bytes) -> Response:
        """As there: raises OSError, BadResponse."""
        machine = self._machine
        answer: asyncio.Future[Response] = machine.create_future()

        def give(found: Response | Exception | None) -> None:
            if answer.done():
                return
            if isinstance(found, Response):
                answer.set_result(found)
            elif found is not None:
                answer.set_exception(found)

        def arrive() -> None:
            found, wait = self._receiver.handle(headers, body)
            machine.call_later(wait, give, found, context=WORLD)

        machine.call_later(machine.rng.choice((0.0, 0.001)), arrive, context=WORLD)
        async with asyncio.timeout(self._timeout):
            return await answer

    def close(self) -> None:
        """As there."""

    def __enter__(self) -> "ModelClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
