"""Incidents under a real Prometheus: make soak ARGS="--incidents", or ARGS="--incidents quota,disk".

Each incident has a fleet of its own. After two quiet minutes it happens. For five minutes the alerts are watched; then `penstock
doctor` looks. Good: exactly the expected alerts fired, and the doctor's first cause is the right one. Prints the table of
docs/reliability.md. Exit status 1 when an incident was not good.
"""

import asyncio
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.faults.incident_fleet import SCRAPE_S, open_incident_fleet
from tests.faults.incidents import DISK_MB, INCIDENTS, Incident

QUIET_S, WATCH_S, LOOK_EVERY_S = 120.0, 300.0, 5.0
HEAD = (
    "| incident | alerts, and seconds until they fired | missing | not expected | first cause of `penstock doctor` | right |\n"
    "|---|---|---|---|---|---|"
)


@dataclass
class Result:
    """fired: alert → seconds. before: alerts that fired before the incident. first: the doctor's first cause and its sentence."""

    incident: Incident
    fired: dict[str, float] = field(default_factory=dict)
    before: frozenset[str] = frozenset()
    first: tuple[str, str] = ("", "")
    failure: str = ""

    @property
    def missing(self) -> frozenset[str]:
        return self.incident.alerts - set(self.fired)

    @property
    def unexpected(self) -> frozenset[str]:
        return (frozenset(self.fired) | self.before) - self.incident.alerts - self.incident.may

    @property
    def named(self) -> bool:
        """Whether the doctor names the cause in first place."""
        return self.first[0] in self.incident.checks

    def row(self) -> str:
        if self.failure:
            return f"| {self.incident.name} | not run: {self.failure} | | | | |"
        fired = ", ".join(
            f"{_short(name)} {seconds:.0f}" for name, seconds in sorted(self.fired.items(), key=lambda one: one[1])
        )
        named = "yes" if self.named else "no"
        cause = f"`{self.first[0]}`: {self.first[1]}" if self.first[0] else "none"
        return (
            f"| {self.incident.name} | {fired} | {_list(self.missing)} | {_list(self.unexpected)} | {cause} | {named} |"
        )


def _short(alert: str) -> str:
    return alert.removeprefix("Penstock")


def _list(alerts: frozenset[str]) -> str:
    return ", ".join(sorted(map(_short, alerts)))


async def _run_one(incident: Incident, folder: Path) -> Result:
    result = Result(incident)
    opening = open_incident_fleet(
        folder,
        apart=incident.apart,
        spark=incident.spark,
        kafka=incident.kafka,
        autoscaler=incident.autoscaler,
        table=incident.table,
        registry=incident.registry,
        change=incident.change,
    )
    async with opening as fleet:
        await asyncio.sleep(QUIET_S)
        result.before = frozenset(await fleet.alerts())
        began = time.monotonic()
        await incident.strike(fleet)
        while (passed := time.monotonic() - began) < WATCH_S + SCRAPE_S:
            for alert in await fleet.alerts():
                result.fired.setdefault(alert, passed)
            await asyncio.sleep(LOOK_EVERY_S)
        found = await fleet.doctor()
        if found["causes"]:
            first = found["causes"][0]
            result.first = first["check"], first["what"]
        elif "failed" in found:
            result.first = "", found["failed"]
    return result


@contextmanager
def _small_disk(folder: Path) -> Iterator[None]:
    """As root only."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


async def _run_guarded(incident: Incident, places: asyncio.Semaphore, folder: Path) -> Result:
    async with places:
        own = folder / incident.name.replace(" ", "-")
        own.mkdir()
        try:
            if incident.small_disk:
                with _small_disk(own / incident.small_disk):
                    result = await _run_one(incident, own)
            else:
                result = await _run_one(incident, own)
        except Exception as error:  # the others are still worth their time
            result = Result(incident, failure=f"{type(error).__name__}: {str(error)[-300:]}".replace("\n", " "))
        print(result.row(), flush=True)
        return result


async def _run_all(chosen: list[Incident], at_once: int, folder: Path) -> list[Result]:
    places = asyncio.Semaphore(at_once)
    return await asyncio.gather(*(_run_guarded(one, places, folder) for one in chosen))


def run(wanted: str, at_once: int) -> int:
    """Run the incidents whose names contain one of these texts, comma-separated; "all": every one. The exit status."""
    parts = [""] if wanted == "all" else wanted.split(",")
    chosen = [one for one in INCIDENTS if any(part in one.name for part in parts)]
    folder = Path(tempfile.mkdtemp(prefix="penstock-incidents-"))
    print(f"{len(chosen)} incidents, {at_once} at once; what the services said is in {folder}", flush=True)
    results = asyncio.run(_run_all(chosen, at_once, folder))
    print(HEAD)
    for result in results:
        print(result.row())
    exact = [one for one in results if not (one.missing or one.unexpected or one.failure)]
    named = [one for one in results if one.named]
    print(
        f"exactly the expected alerts: {len(exact)} of {len(results)}; cause named first: {len(named)} of {len(results)}"
    )
    return 0 if len(exact) == len(named) == len(results) else 1
