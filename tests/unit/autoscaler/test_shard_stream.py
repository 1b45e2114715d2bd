"""One stream that is looked after: what is written down, and when; what a dry run leaves alone; what a refusal costs."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
from structlog.testing import capture_logs

from services.autoscaler.fleet_metrics import Window
from services.autoscaler.shards.figures import RULES, Rules, StreamMemory, Update
from services.autoscaler.shards.memory import read_memory, write_updates
from services.autoscaler.shards.scaler import Announce, StreamScaler, to_nobody
from services.core.broker.errors import Throttled, Unavailable
from tests.unit.autoscaler.stream_service import SLOTS, StreamService

_QUICK = Rules(cover=0.0)
_DEADLINE = 600.0


def _full(service: StreamService, seconds: float = 0.001) -> Window:
    """Seconds in which every shard was full and refused something."""
    shard = seconds * 1e6 / (SLOTS / len(service.open))
    moved = {_key("penstock_broker_partition_bytes_total", partition=str(slot)): shard for slot in range(SLOTS)}
    moved |= {_key("penstock_broker_shard_throttles_total", shard=str(number)): 5.0 for number in service.open}
    return Window(seconds, moved)


def _key(metric: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return metric, frozenset({"topic": "t", **labels}.items())


@asynccontextmanager
async def _scaled(
    service: StreamService, *, dry_run: bool = False, rules: Rules = _QUICK, announce: Announce = to_nobody
) -> AsyncIterator[Callable[[], None]]:
    """Runs; what it yields offers another full window."""
    stopping = asyncio.Event()
    scaler = StreamScaler("t", service, rules, dry_run=dry_run, announce=announce)
    running = asyncio.create_task(scaler.run(stopping))
    try:
        yield lambda: scaler.offer(_full(service))
    finally:
        stopping.set()
        await running


async def _until(condition: Callable[[], bool], offer: Callable[[], None]) -> None:
    async with asyncio.timeout(_DEADLINE):
        while not condition():
            offer()
            await asyncio.sleep(0.01)


async def test_an_update_is_written_down_before_it_begins() -> None:
    """Broken: a crash during an update forgets it, and an eleventh of the day is refused by the service."""
    service = StreamService((0, 12))
    async with _scaled(service) as offer:
        await _until(lambda: len(service.open) == 4, offer)
    assert [update.direction for update in read_memory({"updates": service.noted_at_change[0]}).updates] == ["up"]


async def test_a_restart_knows_what_was_used() -> None:
    """Broken: each restart begins with ten fresh updates, which the service does not give."""
    service = StreamService((0, 12))
    used = tuple(Update(time.time() - 3_600, "up") for _ in range(RULES.updates))
    service.kept |= write_updates(StreamMemory(used))
    with capture_logs() as logs:
        async with _scaled(service) as offer:
            await _until(lambda: any("takes no more" in str(one.get("reason")) for one in logs), offer)
    assert service.changes == 0


async def test_a_dry_run_changes_nothing() -> None:
    """Broken: an operator who only wanted to see what would happen has other shards."""
    service = StreamService((0, 12))
    with capture_logs() as logs:
        async with _scaled(service, dry_run=True) as offer:
            await _until(lambda: any(one.get("decision") == "up" for one in logs), offer)
            await _until(lambda: sum(one.get("decision") == "up" for one in logs) >= 2, offer)
    assert service.changes == 0
    assert service.kept == {}
    told = next(one for one in logs if one.get("decision") == "up")
    assert told["dry_run"] is True
    assert told["layout"] == (0, 6, 12, 18)
    assert told["full"] == [0, 1]
    assert told["loads"] == [1.0, 1.0]


async def test_an_update_that_the_service_refuses_goes_by_splits() -> None:
    """Broken: who used the day's updates by hand is left with a full stream."""
    service = StreamService((0, 12))
    service.refusals = [Throttled("LimitExceededException")]
    async with _scaled(service) as offer:
        await _until(lambda: len(service.open) == 4, offer)
    assert service.changes == 2


async def test_another_autoscalers_updates_count_and_stay() -> None:
    """Broken: two at once make an eleventh update of the day, and each writes over what the other did."""
    service = StreamService((0, 12))
    async with _scaled(service) as offer:
        await _until(lambda: len(service.open) == 4, offer)
        others = tuple(Update(time.time() - 3_600 - number, "up") for number in range(RULES.updates - 2))
        service.kept["updates"] = service.kept["updates"] + " " + write_updates(StreamMemory(others))["updates"]
        await _until(lambda: len(service.open) == 8, offer)
        with capture_logs() as logs:
            await _until(lambda: any("takes no more" in str(one.get("reason")) for one in logs), offer)
    noted = read_memory(service.kept).updates
    assert len(noted) == RULES.updates
    assert {round(one.at) for one in others} < {round(one.at) for one in noted}


async def test_a_window_of_older_shards_counts_for_nothing() -> None:
    """Broken: what shards refused before they were split splits them again."""
    service = StreamService((0, 12))
    scaler = StreamScaler("t", service, _QUICK, dry_run=False)
    stopping = asyncio.Event()
    running = asyncio.create_task(scaler.run(stopping))
    async with asyncio.timeout(_DEADLINE):
        for _ in range(5):
            looks = service.samples
            scaler.offer(_full(service, seconds=3_600.0))
            while service.samples == looks:
                await asyncio.sleep(0)
        stopping.set()
        await running
    assert service.changes == 0


async def test_a_step_of_the_wall_clock_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an hour's step backwards leaves a full stream alone for an hour; or what was just done counts as long ago."""
    service, offset, true_time = StreamService((0, 12)), 0.0, time.time
    monkeypatch.setattr(time, "time", lambda: true_time() + offset)
    async with _scaled(service) as offer:
        await _until(lambda: len(service.open) == 4, offer)
        offset = -3_600.0
        await _until(lambda: len(service.open) == 8, offer)
        offset = 3_600.0
        await _until(lambda: len(service.open) == 16, offer)
    noted = read_memory(service.kept).updates
    assert all(abs(one.at - true_time() - offset) < _DEADLINE for one in noted), "each by the clock as it is now"


def test_an_update_of_the_future_was_just_made() -> None:
    """Broken: a machine whose clock was a day ahead leaves a tag that stops the opposite update for a day."""
    memory = read_memory({"updates": "u100 d90000"}, now=500.0, ahead=-50.0)
    assert [one.at for one in memory.updates] == [150.0, 500.0]


@pytest.mark.parametrize("refusals", [1, 4])
async def test_what_was_refused_does_not_count(refusals: int) -> None:
    """Broken: while the service is away, the day's ten updates go by without one shard more."""
    service = StreamService((0, 12))
    service.refusals = [Unavailable("no answer") for _ in range(refusals)]
    with capture_logs() as logs:
        async with _scaled(service) as offer:
            await _until(lambda: len(service.open) == 4, offer)
    assert sum(one["event"] == "shards_failed" for one in logs) == refusals
    assert len(read_memory(service.kept).updates) == 1


async def test_only_what_was_accepted_is_announced_and_a_refusal_is_waited_out() -> None:
    """Broken: a service that refuses fills the observer's list of windows, and every alarm keeps quiet."""
    service, told = StreamService((0, 12)), list[tuple[str, int]]()

    async def announce(what: str, _seconds: float) -> None:
        told.append((what, service.changes))

    async with _scaled(service, announce=announce) as offer:
        service.refusals = [Unavailable("no answer") for _ in range(3)]
        await _until(lambda: len(service.open) == 4, offer)
    assert told == [("shards of t", 1)]


async def test_refusals_are_tried_again_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an update that the service never takes is asked for every minute, for ever."""
    service, skipped, true_time = StreamService((0, 12)), 0.0, time.monotonic
    service.refusals = [Unavailable("no") for _ in range(50)]
    monkeypatch.setattr("services.autoscaler.shards.scaler.time.monotonic", lambda: true_time() + skipped)
    tried: list[float] = []
    async with _scaled(service, rules=Rules(cover=45.0)) as offer:
        while skipped < 6 * 3_600:
            looks, before = service.samples, len(service.refusals)
            offer()
            while service.samples == looks:
                await asyncio.sleep(0)
            if len(service.refusals) < before:
                tried.append(skipped)
            skipped += 45.0
    pauses = [later - one for one, later in pairwise(tried)]
    assert pauses[:3] == pytest.approx([45, 90, 180], abs=46)
    assert pauses[-1] == pytest.approx(3_600, abs=91)
    assert len(tried) < 15


async def test_an_update_counts_from_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: the opposite is begun right after a long sequence of splits, or an eleventh update before the service allows it."""
    service, skipped, true_time = StreamService((0, 12)), 0.0, time.monotonic
    monkeypatch.setattr("services.autoscaler.shards.scaler.time.monotonic", lambda: true_time() + skipped)
    true_settled = service.settled

    async def settled(topic: str) -> None:
        nonlocal skipped
        skipped += 500.0
        await true_settled(topic)

    monkeypatch.setattr(service, "settled", settled)
    async with _scaled(service) as offer:
        await _until(lambda: len(service.open) == 4, offer)
        await _until(lambda: service.kept["updates"] != service.noted_at_change[0], offer)
    begun, *_ = read_memory({"updates": service.noted_at_change[0]}).updates
    done, *_ = read_memory(service.kept).updates
    assert done.at - begun.at >= 499


async def test_an_update_that_breaks_off_counts() -> None:
    """Broken: what the service had accepted, and will count, is forgotten here."""
    service = StreamService((0, 12))
    service.broken_off = [Unavailable("no end")]
    with capture_logs() as logs:
        async with _scaled(service) as offer:
            await _until(lambda: any(one["event"] == "shards_changed" for one in logs), offer)
    done = sum(one["event"] == "shards_changed" for one in logs)
    assert len(read_memory(service.kept).updates) == 1 + done


async def test_a_hold_is_said_when_its_reason_changes_and_every_few_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: an operator cannot see that, and why, nothing is done; or reads the same line four times a minute."""
    service, skipped, true_time = StreamService((0, 12)), 0.0, time.monotonic
    monkeypatch.setattr("services.autoscaler.shards.scaler.time.monotonic", lambda: true_time() + skipped)
    said: list[float] = []
    scaler = StreamScaler("t", service, RULES, dry_run=False)
    stopping = asyncio.Event()
    running = asyncio.create_task(scaler.run(stopping))
    async with asyncio.timeout(_DEADLINE):
        while skipped < 2_000:
            looks = service.samples
            with capture_logs() as logs:
                scaler.offer(Window(0.001, {}))
                while service.samples == looks:
                    await asyncio.sleep(0)
            said += [skipped for one in logs if "few to merge" in str(one.get("reason"))]
            skipped += 15.0
        stopping.set()
        await running
    assert said[0] == pytest.approx(45, abs=16)
    assert [later - one for one, later in pairwise(said)] == [300.0] * (len(said) - 1)
    assert len(said) > 1
