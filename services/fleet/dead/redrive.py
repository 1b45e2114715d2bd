"""Writing dead letters to where they are tried again: durably, paced, on record batch by batch.

One batch is under way at a time. A crash between a batch and its audit entry leaves that batch open: the next redrive
writes it again, so its events may be sent twice.
"""

import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field

from services.core.audit import REDRIVE
from services.core.broker.errors import RecordTooLarge, Unavailable
from services.core.broker.key_send import send_by_key
from services.core.broker.producer import Producer
from services.core.broker.record import Record, estimate_size
from services.core.ledger.due import since_span
from services.core.ledger.reporter import Reporter, new_instance
from services.core.letter import DeadLetter, Position
from services.core.retry_state import read_wait
from services.fleet.console import note
from services.fleet.dead.aim import Aim, Aimed
from services.fleet.dead.audit import Auditor
from services.fleet.pace import Pace

BATCH = 100
BATCH_BYTES = 1_000_000


@dataclass(slots=True)
class Redriven:
    """What became of the letters so far. refused: by reason (`aim.REMEDIES`); examples: one of each."""

    done: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    examples: dict[str, Position] = field(default_factory=dict)

    def refuse(self, letter: DeadLetter, reason: str) -> None:
        """Count one that stays where it is."""
        self.refused[reason] += 1
        self.examples.setdefault(reason, letter.position)


_Shot = tuple[DeadLetter, Aimed]


class Redrive:
    """rate: events a second. `asked_to_stop` is looked at before each batch, `show` is called after it."""

    def __init__(
        self,
        aim: Aim,
        producer: Producer,
        auditor: Auditor,
        rate: float,
        *,
        asked_to_stop: Callable[[], bool] = lambda: False,
        show: Callable[[Redriven], None] = lambda _so_far: None,
    ) -> None:
        self._aim, self._producer, self._auditor = aim, producer, auditor
        self._pace, self._batch = Pace(rate), max(1, min(BATCH, int(rate)))
        self._asked_to_stop, self._show = asked_to_stop, show
        self.so_far = Redriven()
        self._instance, self._is_untold = f"redrive-{new_instance()}", False

    async def run(self, pages: AsyncIterator[list[DeadLetter]]) -> None:
        """All of them, or until asked to stop. Raises BrokerError kinds; what is stored by then is on record."""
        async for page in pages:
            shots: list[_Shot] = []
            now = time.time_ns() // 1_000_000
            for letter in page:
                aimed = self._aim.aim(letter, now)
                if isinstance(aimed, str):
                    self.so_far.refuse(letter, aimed)
                else:
                    shots.append((letter, aimed))
            for batch in _cut(shots, self._batch):
                if self._asked_to_stop():
                    return
                await self._pace.wait(len(batch))
                await self._write(batch)
            self._show(self.so_far)

    async def _write(self, batch: Sequence[_Shot]) -> None:
        by_topic: defaultdict[str, list[_Shot]] = defaultdict(list)
        for shot in batch:
            by_topic[shot[1].topic].append(shot)
        stored: list[_Shot] = []
        failure: Exception | None = None
        for topic, shots in by_topic.items():
            failed = await send_by_key(self._producer, topic, [aimed.record for _, aimed in shots])
            stored += [shot for index, shot in enumerate(shots) if index not in failed]
            for index, error in failed.items():
                if isinstance(error, RecordTooLarge):
                    self.so_far.refuse(shots[index][0], "too_large")
                else:
                    failure = error
        await self._tell(stored)
        await self._auditor.write(REDRIVE, [letter for letter, _ in stored])
        self.so_far.done += len(stored)
        self._show(self.so_far)
        if failure is not None:
            raise failure

    async def _tell(self, shots: Sequence[_Shot]) -> None:
        """The ledger: what is lost from now on is missing. What cannot be told counts as dead, and goes all the same."""
        if self._is_untold:  # a topic that takes nothing would hold up each batch for as long
            return
        lanes: defaultdict[tuple[str, str, int], list[Record]] = defaultdict(list)
        for letter, aimed in shots:
            if letter.destination:
                lanes[letter.pipe, letter.destination, read_wait(aimed.record)[2]].append(aimed.record)
        for (pipe, destination, at_ms), records in lanes.items():
            reporter = Reporter(self._producer, self._instance, "retrier", pipe, destination, has_backlog=False)
            reporter.settled.add("redriven", records, since_span(at_ms))
            try:
                await reporter.report(closed=True)
            except Unavailable as error:
                note(
                    f"the observer is not told of what is redriven from now on, and will not miss it: {error}", "yellow"
                )
                self._is_untold = True
                return


def _cut(shots: Sequence[_Shot], count: int) -> Iterator[list[_Shot]]:
    """Batches of at most `count` letters and about BATCH_BYTES."""
    batch: list[_Shot] = []
    size = 0
    for shot in shots:
        weight = estimate_size((shot[1].record,))
        if batch and (len(batch) >= count or size + weight > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(shot)
        size += weight
    if batch:
        yield batch
