"""How many records a pipe has not done, and how old they are: asked beside its query, so that it is known, and grows, while
the query is down."""

from collections.abc import Iterable, Mapping, Sequence

from spark.place import Position, Span

Backlog = dict[tuple[str, int], int]
"""Records by topic and partition."""
_LOOKS = 1000


def measure_backlog(held: Iterable[Span], done: Position) -> Backlog:
    """From what was done to the present ends."""
    return {
        (topic, partition): max(0, end - max(start, done.get((topic, partition), start)))
        for topic, partition, start, end in held
    }


class Age:
    """How old what is not done can be at most, by where the topics ended at earlier looks: no record is read for it."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, Mapping[tuple[str, int], int]]] = []

    @property
    def looks(self) -> int:
        """How many are kept: bounded."""
        return len(self._looks)

    def done_up_to(self, at_ms: int, held: Sequence[Span], done: Position) -> int | None:
        """A time (ms) such that every record stored before it is done; None when nobody looked so long ago.

        at_ms: when the look began that gave `held`. To be called in the order of the looks.
        """
        starts = {(span.topic, span.partition): span.start for span in held}
        self._looks.append((at_ms, {(span.topic, span.partition): span.end for span in held}))
        reached = [
            number
            for number, (_, ends) in enumerate(self._looks)
            if all(max(done.get(place, 0), starts.get(place, end)) >= end for place, end in ends.items())
        ]
        if not reached:
            known = None
        else:
            known = self._looks[reached[-1]][0]
            del self._looks[: reached[-1]]
        if len(self._looks) > _LOOKS:
            self._looks = [*self._looks[:-1:2], self._looks[-1]]
        return known
