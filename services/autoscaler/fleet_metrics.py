"""Finds the fleet's processes, and reads the changes of their counters."""

import asyncio
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import structlog

from services.core.address import parse_address
from services.core.scrape import Labels, Sample, scrape

log = structlog.get_logger()

_DNS = "dns://"
_RESOLVE_S = 5.0


class NoTargets(Exception):
    """The list of addresses is missing or invalid."""


def check_targets(where: str) -> str:
    """A file's path, or dns://name:port. Raises ValueError."""
    if where.startswith(_DNS) and parse_address(where.removeprefix(_DNS))[1] == 0:
        raise ValueError("a management port is needed. Try: dns://fleet:9100")
    return where


async def find_targets(where: str) -> tuple[str, ...]:
    """host:port of each process: listed in the file, or all addresses of the name in dns://name:port. Raises NoTargets."""
    if where.startswith(_DNS):
        return await _resolve(*parse_address(where.removeprefix(_DNS)))
    return await asyncio.to_thread(read_targets, Path(where))


async def _resolve(name: str, port: int) -> tuple[str, ...]:
    """Addresses of one family only: a process with an address in each counts once."""
    try:
        async with asyncio.timeout(_RESOLVE_S):
            found = await asyncio.to_thread(socket.getaddrinfo, name, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, TimeoutError) as error:
        raise NoTargets(
            f"{name} has no address: {error!r}. Try: a headless Service, or another name in --targets"
        ) from error
    family = min(one[0] for one in found)
    hosts = sorted({str(one[4][0]) for one in found if one[0] == family})
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts)


def read_targets(path: Path) -> tuple[str, ...]:
    """host:port of each process, from a list in the format of Prometheus' file_sd, or from the state file of
    `penstock up` (fleet.json in its data folder). Blocking. Raises NoTargets."""
    try:
        found: Any = orjson.loads(path.read_bytes())
        if isinstance(found, dict):
            return tuple(str(one["management"]) for one in found["processes"] if one["management"])
        return tuple(str(address) for group in found for address in group["targets"])
    except OSError as error:
        raise NoTargets(
            f"{path}: {error.strerror}. Try: --targets with a file_sd file, a fleet's data/fleet.json, or dns://name:port"
        ) from error
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise NoTargets(f"{path}: not a list of targets: {error!r}. Try: infra/prometheus/targets.py") from error


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
            addresses = await find_targets(self._targets)
        except NoTargets as error:
            if self.problem != str(error):
                log.warning("no_targets", error=str(error), hint=self._hint)
            self.problem = str(error)
            return None
        self.problem = None
        return await self._counters.read(addresses)
