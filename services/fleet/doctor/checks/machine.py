"""Checks of the machine: the data folder, disks, clocks."""

from collections.abc import Iterator
from pathlib import Path
from statistics import median

from services.core.times import format_time
from services.core.units import format_count
from services.fleet.doctor.diagnosis import Finding
from services.fleet.doctor.facts import Disk, Facts

FULL_BYTES = 16_000_000
"""With less room the log's next append may fail, so the disk counts as full."""
LITTLE_SHARE, LITTLE_BYTES = 0.05, 2_000_000_000
SKEW_S = 5.0
"""A clock may be wrong by this much: an HTTP Date has whole seconds."""
_FULL_WORDS = ("StorageFull", "No space left", "disk is full")


def find_folder(facts: Facts) -> Iterator[Finding]:
    """The data folder, or the log in it, is gone or closed to us."""
    if facts.folder:
        yield Finding(
            f"The data folder cannot be used: {facts.folder}.",
            ["acknowledged events are in this folder: delete nothing"],
            f"ls -la {facts.data}; mount | grep {facts.data}",
        )


def find_full_disk(facts: Facts) -> Iterator[Finding]:
    """No room, no free file, or mounted read-only. What the services say counts, too: a quota shows in no figure."""
    said = list(_said_full(facts))
    for disk in _disks(facts):
        if disk.read_only:
            yield Finding(f"The disk of {disk.path} is mounted read-only.", [_room(disk)], "dmesg | tail -50")
        elif disk.free < FULL_BYTES or disk.files_free == 0:
            what = "has no room left" if disk.free < FULL_BYTES else "can hold no more files"
            yield Finding(f"The disk of {disk.path} {what}.", [_room(disk), *said], _du(disk))
            said = []
    if said and not any(disk.free < FULL_BYTES for disk in _disks(facts)):
        yield Finding("The broker's storage is full.", said, f"df -h; du -xsh {facts.data or '.'}/* | sort -h | tail")


def find_little_room(facts: Facts) -> Iterator[Finding]:
    """A disk that will be full soon."""
    for disk in _disks(facts):
        if FULL_BYTES <= disk.free < min(LITTLE_SHARE * disk.size, LITTLE_BYTES) and not disk.read_only:
            yield Finding(f"The disk of {disk.path} is nearly full.", [_room(disk)], _du(disk))


def _disks(facts: Facts) -> list[Disk]:
    """The disks of this machine; of a fleet elsewhere those that its services show."""
    if facts.disks:
        return list(facts.disks)
    sizes = {labels["folder"]: size for _, labels, size, _ in facts.series("penstock_disk_size_bytes")}
    free = {labels["folder"]: room for _, labels, room, _ in facts.series("penstock_disk_free_bytes")}
    return [
        Disk(Path(name), int(room), int(sizes[name]), -1, read_only=False)
        for name, room in free.items()
        if name in sizes
    ]


def _said_full(facts: Facts) -> Iterator[str]:
    for one in facts.instances:
        if any(word in one.reason for word in _FULL_WORDS):
            yield f"{one.name}: {one.reason}"
    refused = facts.growth("penstock_ingest_events_refused_total", reason="storage-full")
    if refused:
        yield f"ingest refused {format_count(int(refused), 'event')} (storage-full) in {facts.seconds():.0f} s"


def _room(disk: Disk) -> str:
    return f"{disk.free / 1e6:,.0f} MB of {disk.size / 1e6:,.0f} MB are free"


def _du(disk: Disk) -> str:
    return f"df -h {disk.path}; du -xsh {disk.path}/* | sort -h | tail"


def find_wrong_clock(facts: Facts) -> Iterator[Finding]:
    """Clocks of services against ours, and stored arrival times against all of them."""
    known = [(one, one.skew) for one in facts.instances if one.skew is not None]
    wrong = [(one, skew) for one, skew in known if abs(skew) > SKEW_S]
    evidence = [f"{one.name} at {one.address}: {_ahead(skew)}" for one, skew in wrong]
    if wrong and len(wrong) == len(known) > 1 and abs(max(s for _, s in wrong) - min(s for _, s in wrong)) < SKEW_S:
        common = median(skew for _, skew in wrong)
        yield Finding(
            f"The clock of this machine differs from those of all services: they are {_ahead(common)}.",
            evidence,
            "chronyc tracking   # or: timedatectl",
        )
    elif wrong:
        names = ", ".join(one.name for one, _ in wrong)
        first = "chronyc tracking   # or timedatectl, on the machine of " + wrong[0][0].address
        yield Finding(f"The clock of {names} is wrong.", evidence, first)
    now = max(facts.now, facts.broker.newest_at) * 1000  # on a busy machine the collection takes longer than SKEW_S
    late = {topic: at for topic, at in facts.broker.newest.items() if at - now > SKEW_S * 1000}
    if late and not wrong:
        evidence = [f"{topic}: the newest event arrived at {format_time(at)}" for topic, at in late.items()]
        evidence.append(f"this machine's time is {format_time(int(now))}")
        yield Finding(
            "Stored events have arrival times in the future: a clock of ingest was ahead, or this machine's is behind.",
            evidence,
            "chronyc tracking   # or timedatectl, here and on the machines of ingest",
        )
    ahead = facts.growth("penstock_ledger_reports_ahead_total")
    if ahead and not wrong and not late:
        nodes = sorted(
            {labels["node"] for _, labels, _, grown in facts.series("penstock_ledger_reports_ahead_total") if grown}
        )
        yield Finding(
            f"The clock of {', '.join(nodes)} is ahead of the observer's.",
            [f"{ahead:.0f} reports with a time in the future in {facts.seconds():.0f} s"],
            "chronyc tracking   # or timedatectl, on their machines",
        )


def _ahead(seconds: float) -> str:
    return f"{abs(seconds):,.0f} s {'ahead' if seconds > 0 else 'behind'}"
