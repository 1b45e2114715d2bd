"""What the members of one process do besides reading, judged: how they come back into their groups, how many bytes they hold
ahead and take at once, and why their partitions stop."""

from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

from services.core.broker.contract import Broker, Consumer, OnRevoke, Start
from services.core.broker.kafka.aiokafka_internals import AHEAD_BYTES, POLL_BYTES
from services.core.broker.record import Batch
from tests.simulation.machine import Process
from tests.simulation.readers.oracle import Oracle

REJOIN_S = 0.5
"""After a membership that was reached, the next join begins sooner than this."""
ANSWERS = 3
"""Of Kafka's nodes, which may all come when a member holds a little less than its bound."""
SLICE_BYTES = 256 << 10
"""Of an answer, at most; a larger batch comes alone."""


class Watch:
    """largest_batch: of those that writers make, in bytes. now: the history's clock."""

    def __init__(self, process: Process, oracle: Oracle, now: Callable[[], float], largest_batch: int) -> None:
        self._process, self._oracle, self._now, self._largest_batch = process, oracle, now, largest_batch
        self._failures, self._told = Counter[str](), Counter[str]()
        """Since the group was joined: memberships and joins that failed, and lines that say so."""
        self._ended: dict[str, tuple[float, int]] = {}
        """When the last membership that was reached ended, and how often the process had been frozen."""
        self._polled: dict[str, tuple[float, int]] = {}
        """When each group's member took something last, and how many bytes."""
        self._holds_much = False
        process.hear = self._hear

    def open(self, broker: AbstractAsyncContextManager[Broker]) -> AbstractAsyncContextManager[Broker]:
        """The broker, watched."""

        @asynccontextmanager
        async def watched() -> AsyncIterator[Broker]:
            async with broker as opened:
                yield cast("Broker", _Watched(opened, self))

        return watched()

    def _complain(self, text: str) -> None:
        self._oracle.complaints.append(f"{self._process.name}: {text}")

    def _hear(self, line: Mapping[str, Any]) -> None:
        if line["event"] == "membership_failed":
            self._told[line["group"]] += 1
        elif line["event"] == "records_missing":
            self._oracle.stop(line["group"], line["topic"], line["partition"])

    def begin(self, group: str) -> None:
        """A join begins."""
        failures, told = self._failures[group], self._told[group]
        if told < failures.bit_length():  # at 1, 2, 4, 8 and so on
            self._complain(f"{group}: {failures} memberships and joins failed, and {told} lines say so")
        at, freezes = self._ended.pop(group, (self._now(), self._process.freezes))
        if self._now() - at > REJOIN_S and self._process.freezes == freezes:
            self._complain(f"{group} is joined again {self._now() - at:.1f} s after a membership that was reached")

    def reach(self, group: str) -> None:
        """The join has succeeded."""
        self._failures[group] = self._told[group] = 0

    def end(self, group: str, *, is_reached: bool, has_failed: bool) -> None:
        """The membership, or the join, is over."""
        self._failures[group] += has_failed
        if is_reached:
            self._ended[group] = self._now(), self._process.freezes

    def record_batch(self, group: str, batch: Batch) -> None:
        """A poll returned this. Those of one poll come in one moment."""
        size = sum(len(record.key or b"") + len(record.value or b"") for record in batch.records)
        at, before = self._polled.get(group, (0.0, 0))
        size += before if at == self._now() else 0
        self._polled[group] = self._now(), size
        if size > POLL_BYTES + self._largest_batch:
            self._complain(f"{group}: one poll returned {size} bytes")

    def check_fetched(self, consumer: Consumer | None) -> None:
        """Check how much a member of Kafka has fetched that nobody has polled, as aiokafka has it."""
        client = getattr(consumer, "_client", None)
        results = [] if client is None else list(client._fetcher._records.values())
        parts = [part for one in results if (part := getattr(one, "_partition_records", None)) is not None]
        size = sum(part._records.size_in_bytes() for part in parts)
        if size > AHEAD_BYTES + ANSWERS * max(SLICE_BYTES, self._largest_batch) and not self._holds_much:
            self._holds_much = True
            self._complain(f"a member holds {size} bytes ahead")


class _Watched:
    """As `Broker`, for a `GroupMember`."""

    def __init__(self, broker: Broker, watch: Watch) -> None:
        self._broker, self._watch = broker, watch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._broker, name)

    @asynccontextmanager
    async def consumer(
        self, group: str, topics: Collection[str], *, start: Start, on_revoke: OnRevoke
    ) -> AsyncIterator[Consumer]:
        """As there."""
        watch, is_reached, has_failed = self._watch, False, True
        watch.begin(group)
        try:
            async with self._broker.consumer(group, topics, start=start, on_revoke=on_revoke) as found:
                watch.reach(group)
                is_reached = True
                yield found
            has_failed = False
        finally:
            watch.end(group, is_reached=is_reached, has_failed=has_failed)
