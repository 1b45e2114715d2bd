"""How the fleet's counters moved between two looks, over all processes."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from services.core.scrape import Labels, Sample, scrape


@dataclass(frozen=True, slots=True)
class Window:
    """seconds: between the two looks, the shortest of all processes. moved: by metric and labels, added up over processes.

    silent: addresses that did not answer now or before, so their share is missing.
    """

    seconds: float
    moved: dict[tuple[str, Labels], float] = field(default_factory=dict)
    silent: tuple[str, ...] = ()

    def of(self, metric: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """(labels, how far it moved) of each counter that has these labels."""
        wanted = set(labels.items())
        for (name, found), value in self.moved.items():
            if name == metric and wanted <= found:
                yield dict(found), value


class Counters:
    """Remembers the last look at each process."""

    def __init__(self) -> None:
        self._before: dict[str, Sample] = {}

    async def look(self, addresses: Iterable[str]) -> Window | None:
        """Ask all at once, up to 5 s. None when there is nothing to compare with yet."""
        asked = sorted(set(addresses))
        samples = dict(zip(asked, await asyncio.gather(*(scrape([address]) for address in asked)), strict=True))
        answered = {address: sample for address, sample in samples.items() if sample.values}
        before, self._before = self._before, answered
        both = [(before[address], sample) for address, sample in answered.items() if address in before]
        if not both:
            return None
        moved: dict[tuple[str, Labels], float] = {}
        for older, newer in both:
            for key, value in newer.values.items():
                passed = value - older.values.get(key, 0.0)
                # A process that began anew counts from zero: all of it is new.
                moved[key] = moved.get(key, 0.0) + (passed if passed >= 0 else value)
        silent = tuple(address for address in asked if address not in answered or address not in before)
        return Window(min(newer.at - older.at for older, newer in both), moved, silent)
