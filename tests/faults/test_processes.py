"""Processes that die, freeze, come and go: rows 1, 2, 15 and 21 of the fault matrix."""

import asyncio
import signal
import time
from collections import defaultdict
from pathlib import Path

from services.core.broker.partitioner import choose_partition
from tests.faults.conftest import Report
from tests.faults.fleet import wait_until
from tests.faults.trial import PARTITIONS, Trial, open_trial
from tests.support.freeze import freeze
from tests.support.oracle import KEYS

FROZEN = 30.0
"""Seconds: three times as long as a silent member keeps its partitions."""
HELD = 2
"""Times the lane: what a process had delivered and not committed when it was frozen, and what it holds and sends when it wakes.
It reads nothing more before its group has said that it is still a member."""


async def test_kill_9_at_random_moments(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a crash of ingest or expel loses events, alters them, or repeats more than what was in flight."""
    async with open_trial("1 kill -9 at random moments", url, tmp_path, rate=600, batch=5) as trial:
        starting = [trial.start_ingest(f"ingest-{number}") for number in (1, 2)]
        starting += [trial.start_expel(f"expel-{number}") for number in (1, 2)]
        services = await asyncio.gather(*starting)
        killed = 0
        async with trial.load():
            for round_number in range(8):
                await asyncio.sleep(trial.chance.uniform(0.3, 1.0))
                victim = services[round_number % 4] if round_number < 4 else trial.chance.choice(services)
                killed += victim.module == "services.expel"
                await victim.kill()
                struck = time.monotonic()
                await victim.start()
                await victim.wait_ready()
            await trial.recover(struck)
        await trial.settle()
        assert trial.fleet.restarts == 8
        report(await trial.judge(strikes=killed))


async def test_freeze_for_longer_than_the_lease(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a process that hung (paused, swapped out) comes back, delivers and commits what another owns by now."""
    async with open_trial(f"2 frozen for {FROZEN:.0f} s beside another", url, tmp_path, rate=200) as trial:
        await trial.start_ingest()
        frozen = await trial.start_expel("expel-1")
        await trial.start_expel("expel-2")
        async with trial.load(), trial.watch_commits() as went_back:
            await wait_until(lambda: {worker for _, worker in trial.sink.firsts} == {"expel-1", "expel-2"})
            await asyncio.sleep(0.5)
            await asyncio.to_thread(freeze, frozen.pid)
            struck = time.monotonic()
            before = len(trial.sink.firsts)
            await wait_until(lambda: partitions_of(trial.sink.firsts[before:], "expel-2") == set(range(PARTITIONS)))
            trial.recovery = time.monotonic() - struck
            await asyncio.sleep(max(0.0, struck + FROZEN - time.monotonic()))
            frozen.send(signal.SIGCONT)
            await wait_until(lambda: partitions_of(trial.sink.firsts[before:], "expel-1"))
            await asyncio.sleep(1)
        assert not went_back, f"a commit of the frozen process overwrote a later one: {went_back}"
        await trial.settle()
        for partition, owners in owners_over_time(trial).items():
            assert len(owners) <= 8, f"partition {partition} had two owners at once: {owners}"
        trial.evidence["frozen"] = 1
        report(await trial.judge(strikes=HELD))


async def test_frozen_while_another_came_and_went(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a process that wakes up to partitions that were another's meanwhile, and are free again, never reads them."""
    async with open_trial("2 frozen while another came and went", url, tmp_path, rate=200) as trial:
        await trial.start_ingest()
        frozen = await trial.start_expel("expel-1")
        async with trial.load():
            await wait_until(lambda: partitions_of(trial.sink.firsts, "expel-1") == set(range(PARTITIONS)))
            await asyncio.to_thread(freeze, frozen.pid)
            before = len(trial.sink.firsts)
            other = await trial.start_expel("expel-2")
            await wait_until(lambda: partitions_of(trial.sink.firsts[before:], "expel-2") == set(range(PARTITIONS)))
            other.send(signal.SIGTERM)
            assert await other.wait_end() == 0
            frozen.send(signal.SIGCONT)
            await trial.recover(time.monotonic())
        await trial.settle()
        trial.evidence["frozen"] = 1
        report(await trial.judge(strikes=HELD))


async def test_workers_come_and_go(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, scaling expel up and down loses events: a commit passed what was not finished when a partition moved."""
    async with open_trial("15 workers come and go, 1 to 4", url, tmp_path) as trial:
        await trial.start_ingest()
        await trial.start_expel("expel-1")
        trial.sink.slow, trial.sink.fail = 0.05, 0.1
        running, number = [trial.fleet.services["expel-1"]], 1
        async with trial.load(), trial.watch_commits() as went_back:
            for grow in (True, True, False, True, True, False, False):
                if grow:
                    number += 1
                    running.append(await trial.start_expel(f"expel-{number}"))
                else:
                    leaving = running.pop(trial.chance.randrange(len(running)))
                    leaving.send(signal.SIGTERM)
                    assert await leaving.wait_end() == 0, leaving.log.read_text()[-2000:]
                await asyncio.sleep(trial.chance.uniform(0.5, 1.5))
        assert not went_back, went_back
        await trial.settle()
        workers = {worker for _, worker in trial.sink.firsts}
        assert len(workers) >= 3, f"the partitions never moved: {workers}"
        report(await trial.judge(strikes=7))


async def test_sigterm_under_load(url: str, tmp_path: Path, report: Report) -> None:
    """If it fails, a deployment loses or repeats events, or a service that is asked to stop has to be killed."""
    async with open_trial("21 SIGTERM under load", url, tmp_path, timeout="5m") as trial:
        for number in (1, 2):
            await trial.start_ingest(f"ingest-{number}")
        await trial.start_expel()
        async with trial.load():
            for name in ("ingest-1", "expel-1", "ingest-2", "expel-1"):
                await asyncio.sleep(trial.chance.uniform(0.5, 1.0))
                service = trial.fleet.services[name]
                struck = time.monotonic()
                service.send(signal.SIGTERM)
                assert await service.wait_end() == 0, service.log.read_text()[-2000:]
                await service.start()
                await service.wait_ready()
                await trial.recover(struck)
        await trial.settle()
        row = await trial.judge()
        assert row.duplicates == 0, "what was drained came again"
        report(row)


def owners_over_time(trial: Trial) -> dict[int, list[str]]:
    """Per partition, which workers delivered new events, one after the other."""
    owners: dict[int, list[str]] = defaultdict(list)
    for number, worker in trial.sink.firsts:
        run = owners[partition_of(number)]
        if not run or run[-1] != worker:
            run.append(worker)
    return owners


def partition_of(number: int) -> int:
    """Where an event lies."""
    return choose_partition(f"k{number % KEYS}".encode(), PARTITIONS)


def partitions_of(firsts: list[tuple[int, str]], wanted: str) -> set[int]:
    """The partitions of which this worker delivered new events."""
    return {partition_of(number) for number, worker in firsts if worker == wanted}
