"""Disks that fail to sync, flip bits, lose the end of a file, under the whole fleet: rows 3 and 5 of the fault matrix."""

import asyncio
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from services.core.broker.log.repair import repair, verify
from services.core.jvm.child import start_child, stop_child
from tests.faults.conftest import Report
from tests.faults.fleet import Service, wait_until
from tests.faults.trial import LANE_EVENTS, Trial, open_trial
from tests.support.oracle import Fate


@asynccontextmanager
async def failing_syncs(service: Service, folder: Path) -> AsyncIterator[None]:
    """Every fdatasync and fsync of this running process fails meanwhile. Needs strace; entered once the first one failed."""
    strace = shutil.which("strace")
    assert strace, "nothing proves the syncs. Try: apt-get install strace"
    trace, calls = folder / "trace", "fdatasync,fsync"
    options = ["-f", "-qq", "-e", f"trace={calls}", "-e", f"inject={calls}:error=EIO", "-o", str(trace)]
    tracer = await asyncio.to_thread(start_child, [strace, *options, "-p", str(service.pid)], log=folder / "strace.log")
    try:
        await wait_until(lambda: trace.exists() and "INJECTED" in trace.read_text())
        yield
    finally:
        await asyncio.to_thread(detach, tracer)


def detach(tracer: "subprocess.Popen[bytes]") -> None:
    """End strace so that the process goes on without it: SIGKILL would leave it no time to let go."""
    stop_child(tracer, grace_s=20)


async def test_syncs_fail_under_load(log_url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, ingest acknowledges events that are on no disk, tries a failed sync again, or never takes events again."""
    async with open_trial("3 every sync of ingest fails", log_url, tmp_path) as trial:
        ingest = await trial.start_ingest()
        await trial.start_expel()
        async with trial.load():
            await wait_until(lambda: len(trial.sender.acks) > 20)
            async with failing_syncs(ingest, tmp_path):
                struck = time.monotonic()
                await trial.wait_refused()
            await trial.recover(time.monotonic())
            trial.gap = trial.sender.longest_gap(struck, time.monotonic())
        assert ingest.is_running
        await trial.settle()
        assert (await asyncio.to_thread(verify, tmp_path / "data")).is_sound
        report(await trial.judge())


async def test_flipped_bit_under_a_running_fleet(log_url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a disk error alters or drops events without a word, or stops more than what it damaged."""
    async with open_trial("5 a bit flipped under a running fleet", log_url, tmp_path) as trial:
        await trial.disconnect()
        ingest = await trial.start_ingest()
        trial.sink.hold.clear()
        expel = await trial.start_expel()
        async with trial.load():
            await wait_until(lambda: trial.ledger.count(Fate.OBLIGED) > 4 * LANE_EVENTS)
        victim = max(n for n, fate in enumerate(trial.ledger.fate) if fate == Fate.OBLIGED)
        await asyncio.to_thread(flip_everywhere, tmp_path / "data" / "topics", trial.ledger.event_id(victim))
        lost = (await asyncio.to_thread(verify, tmp_path / "data", trial.stream)).topics[0].lost_records
        assert lost > 0, "no damage was found"
        trial.sink.hold.set()
        await wait_until(lambda: is_told(trial, expel, lost))
        await wait_until(lambda: len(trial.ledger.lost()) == lost)
        assert "records_missing" in expel.log.read_text()
        await accept_loss(trial, ingest, expel, lost)
        report(await trial.judge(removed=lost))


async def test_log_cut_off_while_down(log_url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a file that lost its end in a crash takes events with it, and their offsets are given to new ones."""
    async with open_trial("5 a file cut off while all was down", log_url, tmp_path) as trial:
        await trial.disconnect()
        ingest = await trial.start_ingest()
        async with trial.load():
            await wait_until(lambda: trial.ledger.count(Fate.OBLIGED) > 600)
        await ingest.kill()
        journal = tmp_path / "data" / "topics" / f"{trial.stream}.db-wal"
        os.truncate(journal, journal.stat().st_size // 2)
        lost = (await asyncio.to_thread(verify, tmp_path / "data", trial.stream)).topics[0].lost_records
        assert lost > 0, "no damage was found"
        await ingest.start()
        expel = await trial.start_expel(ready=False)
        await wait_until(lambda: is_told(trial, expel, lost))
        assert not await ingest.is_ready()
        await accept_loss(trial, ingest, expel, lost)
        report(await trial.judge(removed=lost))


async def is_told(trial: Trial, expel: Service, lost: int) -> bool:
    """Whether expel counted exactly so many missing events, and says that its lane does not go on."""
    told = await expel.metric("penstock_broker_gap_records_total", group=trial.group, topic=trial.stream)
    return told == lost and await expel.metric("penstock_expel_lane_up", pipe=trial.pipe) == 0


async def accept_loss(trial: Trial, ingest: Service, expel: Service, lost: int) -> None:
    """What an operator does: stop the fleet, repair, start it; then the rest arrives."""
    for service in (ingest, expel):
        await service.wait_answering()  # before it answers, SIGTERM ends Python itself
        service.send(signal.SIGTERM)
        assert await service.wait_end() == 0, service.log.read_text()[-2000:]
    await asyncio.to_thread(repair, trial.folder / "data")
    assert (await asyncio.to_thread(verify, trial.folder / "data")).is_sound
    for service in (ingest, expel):
        await service.start()
        await service.wait_ready()
    await trial.connect()
    before = trial.ledger.count(Fate.OBLIGED)
    async with trial.load():
        await wait_until(lambda: trial.ledger.count(Fate.OBLIGED) > before + 300)
    await trial.settle()
    trial.evidence["lost"] = lost


def flip_everywhere(topics: Path, event_id: str) -> None:
    """Flip one bit of this event's payload wherever it is stored: in the database, in every copy of its page in the journal."""
    needle, flipped = f'{{"id":"{event_id}","key"'.encode(), 0
    for path in topics.iterdir():
        if path.suffix not in (".db", ".db-wal"):
            continue
        data, at = path.read_bytes(), -1
        with path.open("r+b") as file:
            while (at := data.find(needle, at + 1)) >= 0:
                file.seek(at + 2)
                file.write(bytes([data[at + 2] ^ 1]))
                flipped += 1
    assert flipped, "the event's payload is nowhere in one piece"
