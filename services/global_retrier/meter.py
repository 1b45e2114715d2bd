"""What the retrier counts, per batch."""

from collections import Counter
from collections.abc import Iterable, Sequence

from services.core import metrics
from services.core.broker.record import Batch
from services.global_retrier.line import Line, Waiting


class Meter:
    """The labels are few: the retrier's topics and the pipes."""

    def took(self, batch: Batch) -> None:
        """A polled batch arrived."""
        metrics.RETRIER_TAKEN.labels(batch.topic).inc(len(batch.records))

    def moved(self, topic: str, count: int) -> None:
        """So many are durable in this delay topic."""
        metrics.RETRIER_MOVED.labels(topic).inc(count)

    def already_moved(self, topic: str, count: int) -> None:
        """So many were read in this topic and stood already where they were to go."""
        metrics.RETRIER_ALREADY_MOVED.labels(topic).inc(count)

    def released(self, items: Sequence[Waiting], now: int) -> None:
        """These are durable in their pipe's retry topic; `now` was when they were sent there."""
        by_pipe: dict[str, list[int]] = {}
        for item in items:
            by_pipe.setdefault(item.pipe, []).append(now - item.due)
        for pipe, late in by_pipe.items():
            metrics.RETRIER_RELEASED.labels(pipe).inc(len(late))
            metrics.RETRIER_LATENESS.labels(pipe).observe(late)

    def buried(self, items: Sequence[Waiting]) -> None:
        """These are durable among the dead letters."""
        for problem, count in Counter(item.problem for item in items).items():
            metrics.RETRIER_DEAD.labels(problem).inc(count)

    def failed(self, topic: str, error: Exception, count: int) -> None:
        """So many could not be written there and will be tried again."""
        metrics.RETRIER_MOVE_FAILURES.labels(topic, type(error).__name__).inc(count)

    def holds(self, lines: Iterable[Line]) -> None:
        """What is read ahead now."""
        dues = [due for line in lines if (due := line.first_due()) is not None]
        metrics.RETRIER_NEXT_DUE.set(min(dues) / 1000 if dues else 0)

    def up(self, is_up: bool) -> None:
        """Whether it is a member of its group and reads."""
        metrics.RETRIER_UP.set(1 if is_up else 0)
