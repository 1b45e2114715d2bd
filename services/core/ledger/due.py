"""When events that were handed over to the global retrier are due, as reports say it: in spans, so that few sets do."""

Span = tuple[int, int]
"""[from, until) in seconds since the epoch: everything in the set is due in it."""


_GRAINS = tuple(1 << power for power in range(20))
"""Of waits up to a month and more."""


def due_span(due_ms: int, wait_ms: int) -> Span:
    """The span of an event that is handed over and waits so long: about an eighth of the wait, a second at least.

    An event's next round begins after this one was due and lasts about as long or longer, so its span lies behind this one.
    """
    grain = 1 << max(0, (wait_ms // 8000).bit_length() - 1)
    first = due_ms // 1000 // grain * grain
    return first, first + grain


def spans_around(second: int) -> list[Span]:
    """All that `due_span` may give for an event that is due in this second."""
    return [(second // grain * grain, second // grain * grain + grain) for grain in _GRAINS]


def longest_wait_s(span: Span) -> int:
    """How long events of this `due_span` waited, at most."""
    return 16 * (span[1] - span[0])


def released_span(due_ms: int) -> Span:
    """The span of an event that is given back, which does not say any more how long it waited: its second."""
    return due_ms // 1000, due_ms // 1000 + 1


def is_back(released: Span, handed_over: Span) -> bool:
    """Whether who was given back so had been handed over so, and not again since."""
    return released[1] > handed_over[0]


def since_span(now_ms: int, due_ms: int = 0) -> Span:
    """The second since when an event is parked, dead or redriven: not before it was due, which was by another's clock."""
    second = max(now_ms, due_ms) // 1000
    return second, second + 1
