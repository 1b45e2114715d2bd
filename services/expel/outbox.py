"""A lane's way to another topic of ours (dead letters, retry-in): durable before the events it carries are settled.

While the topic cannot be written nothing is dropped and nothing settled; writing is tried for ever and goes on by itself.
"""

import asyncio
from collections.abc import Callable, Collection, Sequence

import backoff
import structlog

from services.core.broker.errors import RecordTooLarge
from services.core.broker.key_send import send_by_key
from services.core.broker.producer import Producer
from services.core.broker.record import TopicPartition
from services.expel.letters import Letter

log = structlog.get_logger()

_BASE_WAIT, _MAX_WAIT = 0.25, 10.0
_BATCH = 500


class Outbox:
    """One lane's way to one topic. Bounded by the lane, which takes nothing new while too much is unsettled.

    `stored` is called with letters that are durable. `too_large` with one that the broker never takes: gives what to store in
    its place, or None when it saw to the event otherwise. The task belongs to `group` and runs only while there is work.
    """

    def __init__(
        self,
        producer: Producer,
        topic: str,
        stored: Callable[[Sequence[Letter]], None],
        too_large: Callable[[Letter], Letter | None],
    ) -> None:
        self._producer, self._topic, self._stored, self._too_large = producer, topic, stored, too_large
        self._waiting: list[Letter] = []
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, letters: Sequence[Letter], group: asyncio.TaskGroup) -> None:
        """Queue letters for writing."""
        self._waiting += letters
        if self._task is None and self._waiting:
            self._task = group.create_task(self._run(), name=f"outbox {self._topic}")

    def holds(self, sources: frozenset[TopicPartition]) -> bool:
        """Whether letters for events of these partitions are not stored yet."""
        return any(letter.source in sources for letter in self._waiting)

    def disown(self, sources: Collection[TopicPartition]) -> None:
        """Letters for events of these partitions are still written and settle nothing."""
        self._waiting = [
            letter._replace(disowned=True) if letter.source in sources else letter for letter in self._waiting
        ]

    def stop(self) -> None:
        """Write no more; what is not stored is not settled."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        failures = 0
        try:
            while self._waiting:
                batch = self._waiting[:_BATCH]
                failed = await send_by_key(self._producer, self._topic, [letter.letter for letter in batch])
                self._keep(len(batch), failed)
                if not failed:
                    if failures:
                        log.info("outbox_written_again", topic=self._topic)
                    failures = 0
                    continue
                error = next(iter(failed.values()))
                if not failures and not isinstance(error, RecordTooLarge):
                    log.error(
                        "outbox_unavailable",
                        topic=self._topic,
                        waiting=len(self._waiting),
                        error=str(error),
                        hint="nothing is lost; what waits for it stays uncommitted. Try: check the broker and the topic",
                    )
                failures += 1
                await asyncio.sleep(backoff.full_jitter(min(_MAX_WAIT, _BASE_WAIT * 2 ** min(failures, 10))))
        finally:
            self._task = None

    def _keep(self, count: int, failed: dict[int, Exception]) -> None:
        """Of the first `count`, settle what was stored; the rest stays in front."""
        batch = self._waiting[:count]
        again = [
            self._too_large(letter) if isinstance(failed[index], RecordTooLarge) else letter
            for index, letter in enumerate(batch)
            if index in failed
        ]
        self._waiting[:count] = [letter for letter in again if letter is not None]
        stored = [letter for index, letter in enumerate(batch) if index not in failed]
        if stored:
            self._stored(stored)
