"""The clients that send the cases: a bounded number, over raw sockets."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tests.fuzz.bodies import make_body
from tests.fuzz.exchange import Answer, BadAnswer, read_answer
from tests.fuzz.heads import Head, make_head
from tests.fuzz.ledger import Ledger

BODY_CLIENTS = 8
HEAD_CLIENTS = 4
SHOWN = 3000
"""Characters of a case that a failure shows."""


@dataclass
class Run:
    """Sends until `over_at` (monotonic seconds)."""

    port: int
    over_at: float
    ledger: Ledger
    body_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    head_numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def is_over(self) -> bool:
        """Whether no new case begins."""
        return time.monotonic() > self.over_at

    def start(self, group: asyncio.TaskGroup) -> None:
        """Start every client. A failed one raises AssertionError with its case."""
        for _ in range(BODY_CLIENTS):
            group.create_task(self._send_bodies())
        for _ in range(HEAD_CLIENTS):
            group.create_task(self._send_heads())

    async def _send_bodies(self) -> None:
        """Body cases one after another, on one connection as long as it lasts."""
        while not self.is_over:
            async with _connect(self.port) as (reader, writer):
                closes = False
                while not closes and not self.is_over:
                    closes = (await self._send_body(reader, writer)).closes

    async def _send_body(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Answer:
        case = make_body(self.ledger.seed, next(self.body_numbers))
        try:
            await _write(writer, case.render(), case.number)
            answer = await read_answer(reader)
            if answer is None:
                raise BadAnswer("the connection ended without an answer")
            self.ledger.note_body(case, answer)
        except Exception as error:
            raise AssertionError(f"{error!r} to {str(case)[:SHOWN]}") from error
        return answer

    async def _send_heads(self) -> None:
        """Head cases, each on a connection of its own, until the server has ended it."""
        while not self.is_over:
            case = make_head(self.ledger.seed, next(self.head_numbers))
            async with _connect(self.port) as (reader, writer):
                await self._send_head(case, reader, writer)

    async def _send_head(self, case: Head, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await _write(writer, case.wire, case.number)
            if not case.patient:
                writer.write_eof()
            for_head = case.wire.startswith(b"HEAD ")
            while (answer := await read_answer(reader, head_only=for_head)) is not None:
                self.ledger.note_head(case, answer)
                if for_head:  # whether more answers come, and whether with bodies, depends on how it was understood
                    break
                if case.patient and writer.can_write_eof():
                    writer.write_eof()
        except OSError:  # a reset, which asyncio may also name "not connected"
            self.ledger.unknown_heads.add(case.number)
        except (BadAnswer, ValueError, LookupError) as error:
            raise AssertionError(f"{error!r} to {str(case)[:SHOWN]}") from error


@asynccontextmanager
async def _connect(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def _write(writer: asyncio.StreamWriter, wire: bytes, number: int) -> None:
    """All at once, or every fifth time in two pieces."""
    half = number * 7919 % (len(wire) + 1) if number % 5 == 0 else 0
    if half:
        writer.write(wire[:half])
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(wire[half:])
    await writer.drain()
