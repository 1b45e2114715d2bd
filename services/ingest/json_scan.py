"""Searches a JSON text piece by piece, without parsing it: where an element ends, and how many containers it has.

To search megabytes at once would hold the event loop, so a caller decides after each piece who goes on. Only brackets, commas
and quotation marks are looked at: the result is right for valid JSON, and proves nothing about any other text.

The strings of a piece are found by splitting it at its quotation marks. Only in pieces in which the element may end, or become
too deep, the levels of all brackets and commas are computed. Loops in C do both.
"""

from collections.abc import Iterator
from itertools import accumulate

from services.ingest import problems
from services.ingest.json_events import count_brackets
from services.ingest.problems import Refused

MAX_CONTAINERS = 100_000
"""Arrays and objects in one event."""
MAX_IN_BODY = 400_000
"""In all events of a body."""

_STEPS = bytes.maketrans(b"{[}],", bytes((1, 1, 255, 255, 0)))
"""What a bracket or comma does to the level, as a signed byte."""
_OTHERS = bytes(set(range(256)) - set(b"{[}],"))


class Scan:
    """One pass over the text from `at` on. containers: how many were opened so far. deepest: an upper bound of the levels so far.

    size: the bytes of a piece, at least 2.
    """

    def __init__(self, text: bytes, at: int, size: int) -> None:
        self._text, self._size, self._at = text, size, at
        self._in_string = False
        self._depth = 0
        self.containers = self.deepest = 0

    def count(self) -> Iterator[None]:
        """Count the containers of the text, one piece each time."""
        while self._at < len(self._text):
            _, outside = self._take()
            self.containers += outside.count(b"{") + outside.count(b"[")
            yield

    def find_end(self, max_depth: int) -> Iterator[int | None]:
        """The place of the comma or bracket behind the first element, and None after each piece before.

        Without a place at the end of the text, the element does not end. `deepest` is exact where it exceeds max_depth.
        """
        while self._at < len(self._text):
            start, was_in_string = self._at, self._in_string
            plain, outside = self._take()
            opened = outside.count(b"{") + outside.count(b"[")
            closed = outside.count(b"}") + outside.count(b"]")
            self.containers += opened
            if closed < self._depth and self._depth + opened <= max_depth:
                self.deepest = max(self.deepest, self._depth + opened)
                self._depth += opened - closed
                yield None
                continue
            steps = memoryview(outside.translate(_STEPS, _OTHERS)).cast("b")
            levels = list(accumulate(steps, initial=self._depth))
            number = _find_end(levels, steps)
            self.deepest = max(self.deepest, max(levels if number is None else levels[: number + 2]))
            self._depth = levels[-1]
            if number is not None:
                self.containers -= bytes(steps[number:]).count(1)
                yield start + _find_token(plain, number, in_string=was_in_string)
                return
            yield None

    def _take(self) -> tuple[bytes, bytes]:
        """The next piece: without its escapes, in the same length; and what of it is outside of strings."""
        piece = self._text[self._at : self._at + self._size]
        self._at += len(piece)
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2 and self._at < len(self._text):  # no escape is cut in two
            piece = piece[:-1]
            self._at -= 1
        plain = piece.replace(b"\\\\", b"__").replace(b'\\"', b"__")
        parts = plain.split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        return plain, outside


def _find_end(levels: list[int], steps: memoryview) -> int | None:
    """The number of the first token that is a comma beside all containers, or closes what was not opened."""
    if min(levels[1:], default=1) > 0:
        return None
    for number, step in enumerate(steps):
        level = levels[number + 1]
        if level < 0 or (level == 0 and step == 0):
            return number
    return None


def _find_token(plain: bytes, number: int, *, in_string: bool) -> int:
    """The place of the bracket or comma with this number, from 0, among those outside of strings. Each step halves the search."""
    low, high = 0, len(plain)
    while high - low > 1:
        middle = (low + high) // 2
        parts = plain[low:middle].split(b'"')
        count = len(b"".join(parts[in_string::2]).translate(None, _OTHERS))
        if count > number:
            high = middle
        else:
            low, number, in_string = middle, number - count, in_string ^ (len(parts) % 2 == 0)
    return low


class Containers:
    """Counts the arrays and objects of a body before they are parsed, at most MAX_CONTAINERS of an event and MAX_IN_BODY of all.

    Brackets in strings are counted too, unless they decide whether the body is refused. slice_bytes: of what is read at once.
    """

    def __init__(self, slice_bytes: int) -> None:
        self.count, self._slice_bytes = 0, slice_bytes

    def add(self, text: bytes, opened: int | None = None) -> None:
        """Count those of a slice, or the known number of them. Raises Refused for too many."""
        brackets = count_brackets(text) if opened is None else opened
        if opened is None and self._are_too_many(brackets):
            scan = Scan(text, 0, len(text) + 2)
            for _ in scan.count():
                brackets = scan.containers
        self._add(brackets)

    def add_large(self, text: bytes) -> Iterator[None]:
        """The same for a text of any size, one slice at a time."""
        brackets = 0
        for start in range(0, len(text), self._slice_bytes):
            brackets += count_brackets(text[start : start + self._slice_bytes])
            yield
        if self._are_too_many(brackets):
            scan = Scan(text, 0, self._slice_bytes)
            for _ in scan.count():
                yield
            brackets = scan.containers
        self._add(brackets)

    def _add(self, brackets: int) -> None:
        if self._are_too_many(brackets):
            raise too_many()
        self.count += brackets

    def _are_too_many(self, brackets: int) -> bool:
        return brackets > MAX_CONTAINERS or self.count + brackets > MAX_IN_BODY


def too_many() -> Refused:
    """The refusal of a body with too many containers."""
    detail = (
        f"An event has more than {MAX_CONTAINERS} arrays and objects, or the request more than {MAX_IN_BODY}. "
        "Send less in one request."
    )
    return Refused(problems.TOO_MANY_CONTAINERS, detail)
