"""Reads the changes of the counters of the fleet's processes."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import structlog

from services.core.process.scrape import Labels, Sample, scrape
from services.core.process.targets import NoTargets, find_targets

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Window:
    """The change of counters between two reads. seconds: between the reads, the shortest of all processes. moved: by
    metric and labels, the sum over processes.

    silent: addresses that did not answer one of the reads, so their share is missing.
    """

    seconds: float
    moved: dict[tuple[str, Labels], float] = field(default_factory=dict)
    silent: tuple[str, ...] = ()

    def of(self, metric: str, **labels: str) -> Iterator[tuple[dict[str, str], float]]:
        """(labels, change) of each counter with these labels."""
        wanted = set(labels.items())
        for (name, found), value in self.moved.items():
            if name == metric and wanted <= found:
                yield dict(found), value


class Counters:
    """Remembers the last read of each process."""

    def __init__(self) -> None:
        self._before: dict[str, Sample] = {}

    async def read(self, addresses: Iterable[str]) -> Window | None:
        """Ask all at once, for 5 s at most. None at the first read."""
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
                # A restarted process counts from zero: all of it is new.
                moved[key] = moved.get(key, 0.0) + (passed if passed >= 0 else value)
        silent = tuple(address for address in asked if address not in answered or address not in before)
        return Window(min(newer.at - older.at for older, newer in both), moved, silent)


class FleetCounters:
    """The counters of all targets. hint: of the log line about missing targets; logged once per error."""

    def __init__(self, targets: str, hint: str) -> None:
        self._targets, self._hint = targets, hint
        self._counters = Counters()
        self.problem: str | None = None
        """Why there are no targets."""

    async def read(self) -> Window | None:
        """As `Counters.read`. None as well without targets."""
        try:
            addresses = [target.address for target in await find_targets(self._targets)]
        except NoTargets as error:
            if self.problem != str(error):
                log.warning("no_targets", error=str(error), hint=self._hint)
            self.problem = str(error)
            return None
        self.problem = None
        return await self._counters.read(addresses)
