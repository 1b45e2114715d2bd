"""The client of the fault tests: bounded load over HTTP, every answer noted in the ledger, like a client that cares."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import aiohttp
import orjson

from tests.support.oracle import Fate, Ledger

CLIENT_TIMEOUT = 30.0
"""Longer than ingest's own deadline (20 s), so that its answer is heard."""
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 0.5


class Sender:
    """`rate` in events per second over all workers. Every fourth batch gives up after one attempt; the others insist.

    answers: how often each status (0: no answer) was seen; reasons: the problem types among them.
    acks: (monotonic seconds, events) of each 2xx that accepted any; begun: when each of these requests was sent.
    """

    def __init__(
        self, ledger: Ledger, url: str, seed: int, *, rate: float = 300, batch: int = 20, workers: int = 4
    ) -> None:
        self.headers = {"Content-Type": "application/json"}
        self._ledger, self._url = ledger, url
        self._batch, self._workers = batch, workers
        self.set_rate(rate)
        self._chance = random.Random(seed)
        self._due = 0.0
        self._batches = 0
        self.answers: Counter[int] = Counter()
        self.acks: list[tuple[float, int]] = []
        self.begun: list[float] = []
        self.reasons: Counter[str] = Counter()
        self.insists = True

    def set_rate(self, rate: float) -> None:
        """Events per second from now on."""
        self._interval = self._batch / rate

    @property
    def errors(self) -> int:
        """Requests without a 2xx."""
        return sum(count for status, count in self.answers.items() if status // 100 != 2)

    async def run(self, stopping: asyncio.Event) -> None:
        """Send until `stopping`; what has no answer by then gets one more second."""
        self._due = time.monotonic()
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CLIENT_TIMEOUT)) as session:
            workers = [asyncio.create_task(self._work(session, stopping)) for _ in range(self._workers)]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()

    async def _work(self, session: aiohttp.ClientSession, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            now = time.monotonic()
            self._due = max(self._due + self._interval, now)
            await asyncio.sleep(self._due - now)
            numbers = self._ledger.issue(self._batch)
            self._batches += 1
            if self._batches % 10 == 5:
                self._ledger.settle(numbers[-1:], Fate.FORBIDDEN)
            await self._deliver(session, numbers, stopping, insist=self.insists and self._batches % 4 != 0)

    async def _deliver(
        self, session: aiohttp.ClientSession, numbers: Sequence[int], stopping: asyncio.Event, *, insist: bool
    ) -> None:
        wait = _FIRST_WAIT
        while True:
            await self.post(session, numbers)
            numbers = self._ledger.open_numbers(numbers)
            if not numbers or not insist or stopping.is_set():
                return
            await asyncio.sleep(self._chance.uniform(0.5, 1) * wait)
            wait = min(_LONGEST_WAIT, 2 * wait)

    async def post(self, session: aiohttp.ClientSession, numbers: Sequence[int]) -> int:
        """One request. Its status; 0 when no answer came."""
        body = b"[" + b",".join(self._ledger.payloads(numbers)) + b"]"
        self._ledger.sending(numbers)
        begun = time.monotonic()
        try:
            async with session.post(self._url, data=body, headers=self.headers) as answer:
                status, text = answer.status, await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError):
            status, text = 0, b""
        self._ledger.note_answer(numbers, status, text)
        self.answers[status] += 1
        if status >= 400:
            self.reasons[_reason(text)] += 1
        if status == 200 or (status == 207 and orjson.loads(text)["accepted"]):
            self.acks.append((time.monotonic(), len(numbers)))
            self.begun.append(begun)
        return status

    async def insist_on_one(self) -> int:
        """Send one fresh event until it is acknowledged. Its number."""
        (number,) = self._ledger.issue(1)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=CLIENT_TIMEOUT)) as session:
            while self._ledger.fate[number] != Fate.OBLIGED:
                if await self.post(session, [number]) not in (200, 207):
                    await asyncio.sleep(0.05)
        return number

    def longest_gap(self, start: float, end: float) -> float:
        """The longest time between two acknowledgements in this span of monotonic seconds."""
        moments = [start, *(at for at, _ in self.acks if start < at < end), end]
        return max(later - earlier for earlier, later in pairwise(moments))


def _reason(body: bytes) -> str:
    """The stable end of an RFC 9457 type."""
    try:
        return str(orjson.loads(body)["type"]).rpartition(":")[2]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return "no problem document"
