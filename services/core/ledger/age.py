"""How old what a reader has not done can be at most, by where the topics ended at earlier looks: no record is read for it.

By the time at which records were stored, not by their timestamps: those are event times, and as wrong as clients' clocks.
"""

from collections.abc import Mapping

Place = tuple[str, int]
"""Topic and partition."""
_LOOKS = 1000


class Age:
    """Of one reader. Memory is bounded: when looks are many, every second one of the old ones is forgotten."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, Mapping[Place, int]]] = []

    @property
    def looks(self) -> int:
        """How many are kept."""
        return len(self._looks)

    def done_up_to(
        self, at_ms: int, starts: Mapping[Place, int], ends: Mapping[Place, int], done: Mapping[Place, int]
    ) -> int | None:
        """A time (ms) such that every record stored before it is done; None when nobody looked so long ago.

        at_ms: when the look began that gave `starts` and `ends`. done: the next offset to be done; absent: none is.
        To be called in the order of the looks.
        """
        self._looks.append((at_ms, ends))
        reached = [
            number
            for number, (_, known) in enumerate(self._looks)
            if all(max(done.get(place, 0), starts.get(place, end)) >= end for place, end in known.items())
        ]
        found = self._looks[reached[-1]][0] if reached else None
        if reached:
            del self._looks[: reached[-1]]
        if len(self._looks) > _LOOKS:
            self._looks = [*self._looks[:-1:2], self._looks[-1]]
        return found
