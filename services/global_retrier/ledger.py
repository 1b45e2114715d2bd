"""What the retrier tells of events that left it: given back to expel, or dead. By pipe and destination."""

import asyncio
from collections.abc import Sequence

from services.core.broker.producer import Producer
from services.core.ledger.report import Outcome
from services.core.ledger.reporter import Reporter, new_instance, say_goodbye
from services.global_retrier.letters import NODE
from services.global_retrier.line import Waiting


class Ledger:
    """One process's; does nothing without a producer.

    What waits here was told as `retrying` by expel, so no minute waits for the retrier, and it is never behind.
    """

    def __init__(self, producer: Producer | None) -> None:
        self._producer, self._instance = producer, new_instance()
        self._reporters: dict[tuple[str, str], Reporter] = {}

    def left(self, outcome: Outcome, items: Sequence[Waiting]) -> None:
        """These are durable in their pipe's retry topic (released), or among the dead letters (dead).

        What is no retry record belongs to no pipe, and is not told.
        """
        if self._producer is None:
            return
        owners: dict[tuple[str, str], list[Waiting]] = {}
        for item in items:
            if item.pipe:
                owners.setdefault((item.pipe, item.destination), []).append(item)
        for owner, own in owners.items():
            self._reporter(self._producer, *owner).settled.add(outcome, [item.record for item in own])

    def _reporter(self, producer: Producer, pipe: str, destination: str) -> Reporter:
        found = self._reporters.get((pipe, destination))
        if found is None:
            found = Reporter(producer, self._instance, NODE, pipe, destination, has_backlog=False)
            self._reporters[pipe, destination] = found
        return found

    async def report(self) -> None:
        """Returns when all that left is durably told. Raises Unavailable. All reporters' reports are one append."""
        done = await asyncio.gather(
            *(reporter.report() for reporter in self._reporters.values()), return_exceptions=True
        )
        for error in done:
            if error is not None:
                raise error

    async def close(self) -> None:
        """The last report."""
        await say_goodbye(self._reporters.values())
