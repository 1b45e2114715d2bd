"""Sets of origins in memory, by what became of them, until a report carries them off."""

from collections.abc import Iterable
from typing import NamedTuple

from pyroaring import BitMap

from services.core.ledger.due import Span
from services.core.ledger.report import OriginSet, Outcome, pack_numbers


class SetKey(NamedTuple):
    """What the origins of one set have in common, as in `OriginSet`."""

    outcome: Outcome
    incarnation: str
    partition: int
    minute: int | None = None
    due: Span | None = None


class Sets:
    """Unions of origins. Dense runs take some bytes, however many events they stand for. Not thread-safe."""

    def __init__(self) -> None:
        self._found: dict[SetKey, BitMap] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def numbers(self, key: SetKey) -> BitMap:
        """The set of this key, to be added to."""
        found = self._found.get(key)
        if found is None:
            found = self._found[key] = BitMap()
        return found

    def add_range(self, key: SetKey, first: int, count: int) -> None:
        """`count` numbers from `first` on."""
        self.numbers(key).add_range(first, first + count)

    def add(self, key: SetKey, numbers: Iterable[int]) -> None:
        """These numbers, each below 2^32."""
        self.numbers(key).update(numbers)

    def merge(self, other: "Sets") -> None:
        """Everything of `other`, which is not used afterwards."""
        for key, numbers in other._found.items():
            mine = self._found.setdefault(key, numbers)
            if mine is not numbers:
                mine |= numbers

    def pack(self) -> tuple[OriginSet, ...]:
        """As a report carries them."""
        return tuple(OriginSet(*key[:4], pack_numbers(numbers), key.due) for key, numbers in self._found.items())
