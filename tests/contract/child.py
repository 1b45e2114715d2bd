"""Other processes, so that a test can kill -9 or freeze one. Each prints one JSON line per fact, after it is a fact.

python -m tests.contract.child append SPEC TOPIC            numbers 0, 1, 2 … until killed; {"acked": n} after each ack
python -m tests.contract.child member SPEC GROUP TOPIC      polls and commits; {"processed": [n, …]} after each commit,
                                                            {"refused": [[topic, partition], …]} when a commit was
"""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import structlog

from services.core.broker.errors import BrokerError, NotOwner
from services.core.broker.producer import Producer
from services.core.broker.record import TopicPartition
from tests.contract.harness import open_spec
from tests.contract.traffic import DEADLINE, marks_of, numbers_of, poll, record
from tests.support.freeze import freeze


class Child:
    """A running child. Leaving the context kills it."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.contract.child", *self._arguments, stdout=asyncio.subprocess.PIPE
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.kill()

    @property
    def process(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "not started"
        return self._process

    async def say(self) -> dict[str, Any]:
        """Its next line. Fails when it died or is silent for DEADLINE."""
        assert self.process.stdout is not None
        async with asyncio.timeout(DEADLINE):
            line = await self.process.stdout.readline()
        assert line, f"the child ended: {self._arguments}"
        said: dict[str, Any] = json.loads(line)
        return said

    async def rest(self) -> list[dict[str, Any]]:
        """Every complete line that it still wrote; after `kill`."""
        assert self.process.stdout is not None
        lines = (await self.process.stdout.read()).split(b"\n")[:-1]
        return [json.loads(line) for line in lines]

    def freeze(self) -> None:
        """No heartbeat, no answer, and it does not know. Blocks for some milliseconds."""
        freeze(self.process.pid)

    def thaw(self) -> None:
        """SIGCONT."""
        self.process.send_signal(signal.SIGCONT)

    async def kill(self) -> None:
        """SIGKILL and reap."""
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


@asynccontextmanager
async def child(*arguments: str) -> AsyncIterator[Child]:
    """A child for the time of the context."""
    async with Child(*arguments) as running:
        yield running


def _say(**fact: object) -> None:
    os.write(1, json.dumps(fact).encode() + b"\n")  # one write, unbuffered: a kill cannot tear a line in two


async def _append(spec: str, topic: str) -> None:
    async with open_spec(spec) as broker, Producer(broker.appender) as producer:
        number = 0
        while True:
            result = await producer.send_to(topic, {0: [record(number)]})
            if not result.failed:
                _say(acked=number)
            number += 1


async def _member(spec: str, group: str, topic: str) -> None:
    async def on_revoke(partitions: frozenset[TopicPartition]) -> None:
        _say(revoked=sorted(partitions))

    async with (
        open_spec(spec) as broker,
        broker.consumer(group, [topic], start="earliest", on_revoke=on_revoke) as consumer,
    ):
        _say(joined=True)
        while True:
            batches = await poll(consumer, max_records=5)
            if not batches:
                continue
            _say(polled=numbers_of(batches), mark=max(marks_of(batches).values()))
            try:
                await consumer.commit(marks_of(batches))
            except NotOwner as error:
                _say(refused=sorted(error.partitions))
            except BrokerError as error:
                if not error.retriable:
                    raise
            else:
                _say(processed=numbers_of(batches))
            await asyncio.sleep(0.02)


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout is for facts
    role, *rest = sys.argv[1:]
    asyncio.run(_append(*rest) if role == "append" else _member(*rest))
