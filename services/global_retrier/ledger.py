"""What the retrier tells of events that left it: given back to expel, or dead. By pipe and destination."""

import asyncio
import time
from collections.abc import Mapping, Sequence

from services.core.broker.contract import Lag
from services.core.broker.producer import Producer
from services.core.broker.record import Record, TopicPartition
from services.core.group_lag import GroupLag
from services.core.ledger.due import Span, released_span, since_span
from services.core.ledger.report import Outcome
from services.core.ledger.reporter import Reporter, new_instance, say_goodbye
from services.global_retrier.letters import NODE
from services.global_retrier.line import Waiting
from services.global_retrier.route import DELAY_BY_TOPIC, SHORTEST_MS


class Ledger:
    """One process's; does nothing without a producer.

    What waits here was told as `retrying` by expel, so no minute waits for the retrier. How far the process is behind is told
    once, for all pipes.
    """

    def __init__(self, producer: Producer | None, group: GroupLag | None = None) -> None:
        self._producer, self._group, self._instance = producer, group, new_instance()
        self._own = None if producer is None else Reporter(producer, self._instance, NODE, "")
        self._reporters: dict[tuple[str, str], Reporter] = {}

    async def behind(self, own: Mapping[TopicPartition, Lag]) -> None:
        """The group's lag in the partitions that are ours, as measured right now; `group` knows the others'.

        Raises BrokerError kinds.
        """
        if self._own is None:
            return
        lags = own if self._group is None else await self._group.complete(own)
        if lags is not None:
            self._own.behind(max((_overdue(source.topic, lag) for source, lag in lags.items()), default=0))

    def left(self, outcome: Outcome, items: Sequence[Waiting]) -> None:
        """These are durable in their pipe's retry topic (released), or among the dead letters (dead).

        What is no retry record belongs to no pipe, and is not told.
        """
        if self._producer is None:
            return
        owners: dict[tuple[str, str, Span], list[Record]] = {}
        now = int(time.time() * 1000)
        for item in items:
            if item.pipe:
                span = released_span(item.due) if outcome == "released" else since_span(now, item.due)
                owners.setdefault((item.pipe, item.destination, span), []).append(item.record)
        for (pipe, destination, span), own in owners.items():
            self._reporter(self._producer, pipe, destination).settled.add(outcome, own, span)

    def _reporter(self, producer: Producer, pipe: str, destination: str) -> Reporter:
        found = self._reporters.get((pipe, destination))
        if found is None:
            found = Reporter(producer, self._instance, NODE, pipe, destination, has_backlog=False)
            self._reporters[pipe, destination] = found
        return found

    async def report(self) -> None:
        """Returns when all that left is durably told. Raises Unavailable. All reporters' reports are one append."""
        done = await asyncio.gather(*(reporter.report() for reporter in self._all()), return_exceptions=True)
        for error in done:
            if error is not None:
                raise error

    async def close(self) -> None:
        """The last report."""
        await say_goodbye(self._all())

    def _all(self) -> list[Reporter]:
        return [*self._reporters.values(), *([self._own] if self._own is not None else [])]


def _overdue(topic: str, lag: Lag) -> int:
    """How long ago the oldest record's event may have been due. In the shortest delay there is what is due at any time."""
    delay = DELAY_BY_TOPIC[topic]
    return max(0, lag.millis - (delay if delay > SHORTEST_MS else 0))
