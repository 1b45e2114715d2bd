"""The greatest possible age of a reader's unprocessed records, from where its topics ended at earlier times. No record is read
for it.

The age counts from the storage of a record, not from its time stamp: that is the event time, and clients' clocks are wrong.
"""

from collections.abc import Mapping

Place = tuple[str, int]
"""Topic and partition."""
_MOST = 1000


class Age:
    """Of one reader. Memory is bounded: of too many measurements every second old one is forgotten."""

    def __init__(self) -> None:
        self._measured: list[tuple[int, Mapping[Place, int]]] = []
        """Times, and where the topics ended then."""

    def done_up_to(
        self, at_ms: int, starts: Mapping[Place, int], ends: Mapping[Place, int], done: Mapping[Place, int]
    ) -> int | None:
        """A time (ms) before which every stored record is done; None when no measurement is that old.

        at_ms: when the measurement of `starts` and `ends` began; it rises. done: the next offset to be done, 0 where absent.
        """
        self._measured.append((at_ms, ends))
        reached = [
            number
            for number, (_, known) in enumerate(self._measured)
            if all(max(done.get(place, 0), starts.get(place, end)) >= end for place, end in known.items())
        ]
        if reached:
            del self._measured[: reached[-1]]
        found = self._measured[0][0] if reached else None
        if len(self._measured) > _MOST:
            self._measured = [*self._measured[:-1:2], self._measured[-1]]
        return found
