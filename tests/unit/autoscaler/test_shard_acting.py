"""From counters to figures, from decisions to splits and merges, and what is kept over a restart."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.autoscaler.fleet_metrics import Counters, Window
from services.autoscaler.shards import resharding
from services.autoscaler.shards.figures import QUARTERS, UNKNOWN, DayPattern, StreamDecision, StreamMemory, Update
from services.autoscaler.shards.layout import operations
from services.autoscaler.shards.memory import read_memory, write_day, write_updates
from services.autoscaler.shards.resharding import apply_layout
from services.autoscaler.shards.scaler import measure
from services.core.broker.errors import Throttled, Unavailable
from services.core.broker.resharding import StreamShards
from services.core.metrics import BROKER_PARTITION_BYTES
from tests.support.metrics_port import serve_metrics
from tests.unit.autoscaler.stream_service import CAPACITY, SLOTS, StreamService

_BYTES = "penstock_broker_partition_bytes_total"


layouts = st.sets(st.integers(1, SLOTS - 1)).map(lambda cuts: (0, *sorted(cuts)))


@given(layouts, layouts)
async def test_splits_and_merges_lead_from_any_layout_to_any(before: tuple[int, ...], after: tuple[int, ...]) -> None:
    """Broken: an update stops half-way, or does more than it must, at 30 seconds each."""
    service = StreamService(before)
    await apply_layout(service, "t", before, StreamDecision(after, ""))
    assert (await service.shards("t")).layout == after
    assert service.changes == operations(before, after)


async def test_small_failures_do_not_break_a_sequence_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Broken: one look that was refused ends twenty splits after the third, and the rest costs another of ten updates."""
    monkeypatch.setattr(resharding, "PAUSE_S", 0.0)
    service = StreamService((0,))
    service.look_failures = [Throttled("slower"), Unavailable("no answer"), Throttled("slower")]
    await apply_layout(service, "t", (0,), StreamDecision((0, 4, 8), ""))
    assert (await service.shards("t")).layout == (0, 4, 8)
    service.look_failures = [Throttled("slower")] * 20
    with pytest.raises(Throttled):
        await apply_layout(service, "t", (0, 4, 8), StreamDecision((0, 4, 8, 9), ""))


class _SplitMeanwhile(StreamService):
    """An operator splits at `cut` behind the change of number `at`."""

    def __init__(self, layout: tuple[int, ...], at: int, cut: int) -> None:
        super().__init__(layout)
        self.waits, self._at, self._cut = 0, at, cut

    async def settled(self, topic: str) -> None:
        self.waits += 1
        if self.waits == self._at:
            shards = await self.shards(topic)
            holder = max(first for first in shards.layout if first < self._cut)
            await self.split(topic, dict(zip(shards.layout, shards.numbers, strict=True))[holder], self._cut)


@given(layouts, layouts, st.integers(1, 5), st.integers(1, SLOTS - 1))
async def test_what_an_operator_splits_meanwhile_stays(
    before: tuple[int, ...], after: tuple[int, ...], at: int, cut: int
) -> None:
    """Broken: an operator who splits a hot shard while the autoscaler works sees it merged again."""
    assume(cut not in before and cut not in after)
    service = _SplitMeanwhile(before, at, cut)
    await apply_layout(service, "t", before, StreamDecision(after, ""))
    theirs = {cut} if service.waits >= at else set()
    assert (await service.shards("t")).layout == tuple(sorted({*after} | theirs))


async def test_what_an_operator_did_since_the_figures_is_decided_anew() -> None:
    """Broken: an update that was decided for two shards is carried out on the three that an operator made meanwhile."""
    service = StreamService((0, 5, 12))
    for at_once in (False, True):
        with pytest.raises(Unavailable, match="decided anew"):
            await apply_layout(service, "t", (0, 12), StreamDecision((0, 6, 12, 18), "", at_once=at_once))
    assert service.changes == 0


async def test_a_shard_without_slots_is_merged_away() -> None:
    """Broken: shards that somebody else split too finely are paid for ever."""
    service = StreamService((0, 4, 4, 8))
    await apply_layout(service, "t", (0, 4, 4, 8), StreamDecision((0, 4, 8), ""))
    assert (await service.shards("t")).layout == (0, 4, 8)


async def test_an_equal_sharing_out_is_one_request() -> None:
    """Broken: doubling a large stream takes a split after the other."""
    service = StreamService((0, 12))
    await apply_layout(service, "t", (0, 12), StreamDecision((0, 6, 12, 18), "", at_once=True))
    assert service.changes == 1


def _key(metric: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return metric, frozenset(labels.items())


_THROTTLED_7 = _key("penstock_broker_shard_throttles_total", topic="t", shard="7")


def test_load_is_what_was_taken_of_what_a_shard_takes() -> None:
    """Broken: shards are judged by bytes although they are full of records, or the other way round."""
    moved = {
        _key("penstock_broker_partition_bytes_total", topic="t", partition="0"): 5e6,
        _key("penstock_broker_partition_entries_total", topic="t", partition="0"): 10.0,
        _key("penstock_broker_partition_entries_total", topic="t", partition="3"): 2_000.0,
        _key("penstock_broker_partition_bytes_total", topic="other", partition="1"): 9e9,
        _key("penstock_broker_shard_throttles_total", topic="t", shard="7"): 101.0,
        _key("penstock_broker_shard_wait_seconds_total", topic="t", shard="9"): 1.0,
    }
    shards = StreamShards(True, 4, (0, 2), (9, 7))
    figures = measure("t", shards, [Window(10.0, moved)], CAPACITY, 60.0, 5)
    assert figures.slots == (0.5, 0.0, 0.0, 0.2)
    assert figures.full == {1}, "7 refused; 9 only let something wait for a second of ten"
    assert not figures.partial
    assert measure("t", shards, [Window(10.0, moved | {_THROTTLED_7: 99.0})], CAPACITY, 60.0, 5).full == frozenset()
    halved = measure("t", shards, [Window(10.0, moved), Window(10.0, {}, ("h:1",))], CAPACITY, 60.0, 5)
    assert halved.slots[0] == 0.25
    assert halved.partial


def test_one_refusal_of_an_empty_shard_is_not_a_full_one() -> None:
    """Broken: one hiccup of the service multiplies a nearly empty stream's shards, and spends the day's updates on it."""
    entries = {
        _key("penstock_broker_partition_entries_total", topic="t", partition=str(slot)): 150.0 for slot in range(4)
    }
    quiet, hiccup = Window(10.0, entries), Window(10.0, entries | {_THROTTLED_7: 1.0})
    shards = StreamShards(True, 4, (0, 1, 2, 3), (6, 7, 8, 9))

    def full(*windows: Window) -> set[int]:
        return set(measure("t", shards, windows, CAPACITY, 60.0, 5).full)

    assert full(hiccup) == full(quiet, hiccup) == full(hiccup, quiet) == set()
    assert full(hiccup, hiccup) == {1}, "others write there, too: what they take nobody counts"
    assert full(Window(10.0, entries | {_THROTTLED_7: 8.0})) == {1}, "more than a twentieth was refused"
    busy = {key: 40 * value for key, value in entries.items()}
    assert full(Window(10.0, busy | {_THROTTLED_7: 1.0})) == {1}


async def test_counters_of_a_process_that_began_anew_do_not_run_backwards() -> None:
    """Broken: a restart looks like a stream without load, and its shards are merged."""
    counters = Counters()
    child = BROKER_PARTITION_BYTES.labels("counters-test", "0")
    child.inc(1_000)
    async with serve_metrics([_BYTES]) as address:
        assert await counters.read([address]) is None
        child.inc(500)
        window = await counters.read([address, "127.0.0.1:9"])
        assert window is not None
        assert window.silent == ("127.0.0.1:9",)
        assert [value for _, value in window.of(_BYTES, topic="counters-test")] == [500.0]
        child.reset()
        child.inc(200)
        window = await counters.read([address])
        assert window is not None
        assert [value for _, value in window.of(_BYTES, topic="counters-test")] == [200.0]


loads = st.one_of(st.just(UNKNOWN), st.floats(1e-5, 10_000.0))
days = st.lists(loads, min_size=4, max_size=4).map(lambda quarters: tuple(quarters) * (QUARTERS // 4))


@given(days, days, st.integers(0, 10**7))
def test_the_memory_comes_back_from_short_texts(newest: tuple[float, ...], before: tuple[float, ...], at: int) -> None:
    """Broken: a restart forgets the quota's use, or what a day looks like; or a tag is too long for the service."""
    updates = tuple(Update(1.7e9 + number, "up" if number % 2 else "down") for number in range(10))
    memory = StreamMemory(updates, (), DayPattern(newest, before, at))
    texts = write_updates(memory) | write_day(memory)
    assert all(0 < len(text) <= 256 for text in texts.values())
    back = read_memory(texts)
    assert back.updates == updates
    assert back.day.quarter == at
    for one, two in zip((*newest, *before), (*back.day.newest, *back.day.before), strict=True):
        assert one == two == UNKNOWN or abs(two / one - 1) < 0.0035


@pytest.mark.parametrize("text", ["", "x", "u12x", ".." * 95, "!!" * 96])
def test_a_memory_that_cannot_be_read_is_an_empty_one(text: str) -> None:
    """Broken: a tag that somebody edited stops the autoscaler."""
    assert read_memory({"updates": text, "day": text, "day-before": text, "quarter": "1"}) == StreamMemory()
