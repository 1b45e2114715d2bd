"""The copy of a stream at other offsets, over models of both brokers that store appends late, twice or not at all."""

import random
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import AsyncMock

import pytest

from services.core.broker.contract import Appended, Features, PartitionRange
from services.core.broker.errors import BrokerError, OffsetOutOfRange, OutcomeUnknown, Throttled, Unavailable
from services.core.broker.record import Batch, Record
from services.core.control.homes import ANY_PARTITION
from services.core.event import ORIGIN
from services.fleet.migrate import offset_translator, stream_source, translated_copy, translated_partition
from services.fleet.migrate.copying import Complete, CopyDiffers
from services.fleet.migrate.offset_translator import OffsetTranslator
from services.fleet.migrate.translated_copy import TranslatedCopy
from services.fleet.problem import CommandFailed

STREAM = "orders"


class Model:
    """One partition of a broker. Sparse: offsets have gaps, from a high one on, as on Kinesis."""

    def __init__(self, chance: random.Random, *, noncontiguous: bool, faults: float = 0.0) -> None:
        self.features = Features(not noncontiguous, False, 1 << 20)
        self.stored: list[tuple[int, Record]] = []
        self.faults = faults
        self._chance, self._next = chance, (1 << 80 if noncontiguous else 0)
        self._noncontiguous = noncontiguous
        self.seen: int | None = None
        """Blind: a read ends before what is not below this offset. A fence makes everything readable. None: all is."""
        self._late: list[Sequence[Record]] = []
        """Appends whose answer was lost, and that may be stored now or later."""
        self.reader: Any = self
        self.appender: Any = self

    def store(self, records: Sequence[Record]) -> int:
        """Gives the first offset."""
        first = self._next
        for record in records:
            self.stored.append((self._next, record))
            self._next += 1 + (self._chance.randrange(3) if self._noncontiguous else 0)
        self._next += self._chance.randrange(1000) if self._noncontiguous else 0
        return first

    def arrive_late(self) -> None:
        """Some of the appends in doubt are stored."""
        while self._late and self._chance.random() < 0.5:
            self.store(self._late.pop(self._chance.randrange(len(self._late))))

    def expire(self, count: int) -> None:
        """Retention removes the oldest ones."""
        del self.stored[:count]

    async def fence(self, _stream: str) -> dict[int, int]:
        self._maybe_fail()
        self.arrive_late()
        end = self._next
        self._next += 1 if self._noncontiguous else 0
        self.seen = None if self.seen is None else self._next
        return {0: end}

    def turn_blind(self) -> None:
        """As for a process that has begun now: a part of what is stored cannot be read yet."""
        self.seen = self._chance.choice([at for at, _ in self.stored] or [0])

    async def read(self, stream: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        self._maybe_fail()
        start = self.stored[0][0] if self.stored else self._next
        if offset < start and (not self._noncontiguous or (offset and self.stored)):  # on Kinesis 0 is the oldest
            raise OffsetOutOfRange(stream, partition, offset, start, self._next)
        known = [one for one in self.stored if self.seen is None or one[0] < self.seen]
        found = [one for one in known if one[0] >= offset][: min(max_records, self._chance.randint(1, 5))]
        return Batch(stream, partition, [at for at, _ in found], [one for _, one in found]) if found else None

    async def append(self, _stream: str, _partition: int, records: Sequence[Record], *, timeout: float) -> Appended:
        self._maybe_fail()
        if self._chance.random() < self.faults:
            self._late.append(list(records))
            if self._chance.random() < 0.5:
                self.arrive_late()
            raise OutcomeUnknown("no answer")
        first = self.store(records)
        return Appended(first, self.stored[-1][0])

    async def describe(self, _stream: str) -> dict[int, PartitionRange]:
        return {0: PartitionRange(self.stored[0][0] if self.stored else 0, self._next)}

    def _maybe_fail(self) -> None:
        if self._chance.random() < self.faults / 2:
            raise Throttled("slow down")


def event(chance: random.Random, number: int, *, alike: bool) -> Record:
    """alike: few different ones, without an id."""
    return Record(None, b"%d" % (chance.randrange(3) if alike else number), 0)


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small windows, so that they end within a history."""
    for module in (stream_source, translated_partition, offset_translator):
        monkeypatch.setattr(module, "PAGE", 7)
    monkeypatch.setattr(translated_partition, "_WINDOW", 11)
    monkeypatch.setattr(translated_partition, "split_by_size", _in_threes)


def _in_threes(records: Sequence[Record], _limit: int) -> list[tuple[int, Sequence[Record]]]:
    return [(at, records[at : at + 3]) for at in range(0, len(records), 3)]


@pytest.mark.parametrize("alike", [False, True])
@pytest.mark.parametrize(
    ("source_is_noncontiguous", "target_is_noncontiguous"), [(True, False), (False, True), (True, True)]
)
@pytest.mark.parametrize("seed", range(40))
async def test_whatever_is_stored_late_or_twice(
    seed: int, source_is_noncontiguous: bool, target_is_noncontiguous: bool, alike: bool
) -> None:
    """From the place of each position on, the copy has every later event in order; and not much more than these."""
    chance = random.Random(seed)
    source = Model(chance, noncontiguous=source_is_noncontiguous)
    target = Model(chance, noncontiguous=target_is_noncontiguous, faults=chance.choice([0.0, 0.1, 0.3]))
    source.store([event(chance, number, alike=alike) for number in range(chance.randrange(30))])
    starts = {0: (await source.describe(STREAM))[0].start}
    try:
        copy, complete = await _copy_it(chance, source, target, starts, alike=alike)
    except CopyDiffers:
        assert alike, "only of equal events it may be unclear which of them were copied twice"
        return
    target.faults = 0.0
    ends, there = complete.ends[0], complete.copy_ends[0]
    copied = [record for at, record in target.stored if at < there]
    target.store([Record(None, b"new %d" % one, 0) for one in range(chance.randrange(4))])
    target.arrive_late()
    translator = _translator(source, target, complete, copy if chance.random() < 0.5 else None)
    source.turn_blind()
    target.turn_blind()
    await translator.begin()
    events = [record for _, record in source.stored]
    assert _is_within(events, copied)
    base = complete.bases.get(0, complete.bases.get(ANY_PARTITION, 0))
    assert all(at + base >= ends for at, _ in target.stored), "an offset would name two events"
    for index, (offset, _) in enumerate([*source.stored, (ends, copied[0])]):
        begin = await translator.translate(0, offset)
        behind = [record for at, record in target.stored if begin <= at < there]
        assert _is_within(events[index:], behind), "the group would skip events"
        if not alike:
            before = [record for at, record in target.stored if at < begin]
            assert _is_within(events[:index], before), "the group would get events again without need"


def _begin(source: Model, target: Model, starts: dict[int, int]) -> TranslatedCopy:
    brokers: tuple[Any, Any] = source, target
    return TranslatedCopy(STREAM, *brokers, {}, starts, AsyncMock())


def _translator(
    source: Model, target: Model, complete: Complete, copy: TranslatedCopy | None = None
) -> OffsetTranslator:
    """Of the process that copied, or of one that knows the record only."""
    brokers: tuple[Any, Any] = source, target
    pairs = complete.pairs if copy is None else copy.pairs
    return OffsetTranslator(STREAM, *brokers, {}, complete.ends, complete.copy_ends, pairs)


async def _copy_it(
    chance: random.Random, source: Model, target: Model, starts: dict[int, int], *, alike: bool
) -> tuple[TranslatedCopy, Complete]:
    """A command that is killed and begins again, while events are stored. Raises CopyDiffers."""
    copy, number = _begin(source, target, starts), 100
    while True:
        if chance.random() < 0.3:
            copy = _begin(source, target, starts)
        if number < 200:
            source.store([event(chance, number + one, alike=alike) for one in range(chance.randrange(1, 6))])
            number += 6
        try:
            await copy.follow()
            if number >= 200 and chance.random() < 0.5:
                if chance.random() < 0.3:  # of a writer whose lease has not ended
                    source.store([event(chance, number + one, alike=alike) for one in range(chance.randrange(1, 6))])
                    number += 6
                target.arrive_late()
                if (complete := await copy.complete()) is not None:
                    return copy, complete
        except CopyDiffers:
            raise
        except BrokerError:
            continue


def _is_within(events: Sequence[Record], copied: Sequence[Record]) -> bool:
    """Whether they are in the copy in this order."""
    rest = iter(copied)
    return all(any(one == other for other in rest) for one in events)


@pytest.mark.parametrize("seed", range(60))
async def test_what_retention_removes_meanwhile_is_not_skipped(seed: int) -> None:
    """The command was killed in `written`, and ran again late. A group gets what it has not read, if the copy has it."""
    chance = random.Random(seed)
    source, target = (
        Model(chance, noncontiguous=chance.random() < 0.5),
        Model(chance, noncontiguous=chance.random() < 0.5),
    )
    source.store([event(chance, number, alike=False) for number in range(40)])
    copy = _begin(source, target, {0: (await source.describe(STREAM))[0].start})
    await copy.follow()
    complete = await copy.complete()
    assert complete is not None
    events, there = list(source.stored), complete.copy_ends[0]
    target.store([Record(None, b"new", 0)])
    source.expire(chance.choice([0, 1, 5, 20, 39, 40]))
    target.store([events[chance.randrange(40)][1]] * chance.randrange(2))  # a second copy that came late
    target.expire(chance.choice([0, 0, 0, 1, 5, 20, 39, 40]))
    left = list(target.stored)
    translator = _translator(source, target, complete, copy if chance.random() < 0.3 else None)
    await translator.begin()
    for index, (offset, _) in enumerate(events):
        begin = await translator.translate(0, offset)
        rest = [record for _, record in events[index:] if any(record == one for at, one in left if at < there)]
        behind = [record for at, record in left if begin <= at < there]
        assert _is_within(rest, behind)


async def test_another_event_in_the_copy_is_noticed() -> None:
    """Somebody else writes there: nobody knows which stream it would be."""
    chance = random.Random(1)
    source, target = Model(chance, noncontiguous=True), Model(chance, noncontiguous=False)
    source.store([event(chance, number, alike=False) for number in range(5)])
    copy = _begin(source, target, {0: 0})
    await copy.follow()
    target.store([Record(None, b"foreign", 0)])
    with pytest.raises(CopyDiffers, match="another event"):
        await copy.follow()


async def test_a_gap_in_the_stream_gives_the_copy_up() -> None:
    """Retention removes what was not copied yet, while the command was killed."""
    chance = random.Random(1)
    source, target = Model(chance, noncontiguous=True), Model(chance, noncontiguous=False)
    source.store([event(chance, number, alike=False) for number in range(5)])
    await _begin(source, target, {0: source.stored[0][0]}).follow()
    source.store([event(chance, number, alike=False) for number in range(5, 20)])
    source.expire(8)
    with pytest.raises(CopyDiffers, match="retention has removed what was copied"):
        await _begin(source, target, {0: 1 << 80}).follow()


async def test_a_copy_whose_beginning_is_gone_is_given_up() -> None:
    """The command was killed, and ran again when the copy was older than the retention."""
    _, source, target = _filled(1, 20, noncontiguous=True)
    starts = {0: source.stored[0][0]}
    await _begin(source, target, starts).follow()
    target.expire(5)
    with pytest.raises(CopyDiffers, match="removed offset 0 from the copy"):
        await _begin(source, target, starts).follow()


@pytest.mark.parametrize(("noncontiguous", "total"), [(False, 20), (True, 0)])
async def test_how_much_there_is_to_copy_is_known_where_offsets_count_records(noncontiguous: bool, total: int) -> None:
    """Else the progress bar is full from the beginning on."""
    _, source, target = _filled(1, 20, noncontiguous=noncontiguous)
    copy = _begin(source, target, {0: source.stored[0][0]})
    assert await copy.total() == total
    await copy.follow()
    assert await copy.total() == 20


def _filled(seed: int, count: int, *, noncontiguous: bool) -> tuple[random.Random, Model, Model]:
    """A stream and an empty copy. One of the two is noncontiguous."""
    chance = random.Random(seed)
    source, target = Model(chance, noncontiguous=noncontiguous), Model(chance, noncontiguous=not noncontiguous)
    source.store([event(chance, number, alike=False) for number in range(count)])
    return chance, source, target


async def test_a_read_that_ends_early_is_no_end_where_offsets_count_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka answers nothing for a moment: what follows would be missing in the copy."""
    _, source, target = _filled(1, 20, noncontiguous=False)
    read, calls = source.read, iter(range(1000))

    async def sometimes(*args: Any, **more: Any) -> Batch | None:
        return None if next(calls) == 2 else await read(*args, **more)

    monkeypatch.setattr(source, "read", sometimes)
    copy = _begin(source, target, {0: 0})
    with pytest.raises(Unavailable, match="what is before its end is not seen"):
        await copy.follow()
    await copy.follow()
    assert [record for _, record in target.stored] == [record for _, record in source.stored]


async def test_an_old_fence_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy takes hours, and Kinesis guards a fence for one: a later read may end early."""
    monkeypatch.setattr(stream_source, "FENCE_S", -1.0)
    _, source, target = _filled(1, 20, noncontiguous=True)
    with pytest.raises(Unavailable, match="what is before its end is not seen"):
        await _begin(source, target, {0: source.stored[0][0]}).follow()


async def test_a_copy_with_fewer_events_than_the_stream_has_is_given_up() -> None:
    """Whatever the fault is: where offsets count records, the number is known."""
    _, source, target = _filled(1, 20, noncontiguous=False)
    copy = _begin(source, target, {0: 0})
    await copy.follow()
    copy._partitions[0].events -= 1
    with pytest.raises(CopyDiffers, match="19 of 20 events were found"):
        await copy.complete()


async def test_origins_of_the_stream_and_of_its_copy_are_counted_where_they_are_read() -> None:
    """Else the comparison of the sets could not fail."""
    _, source, target = _filled(1, 0, noncontiguous=False)
    source.store([Record(None, b"", 0, ((ORIGIN, b"run:0:%d" % number),)) for number in range(20)])
    copy = _begin(source, target, {0: 0})
    partition = copy._partitions[0]
    await partition._fill(20, 20)
    assert copy.origins.counts() == (20, 20)
    await copy.follow()
    assert copy.origins.counts() == (20, 0)


@pytest.mark.parametrize("noncontiguous", [False, True])
async def test_a_process_that_knows_only_the_record_reads_little(
    noncontiguous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the stream is delivered meanwhile, and the stream may have all events of a year."""
    _, source, target = _filled(1, 2000, noncontiguous=noncontiguous)
    copy = _begin(source, target, {0: source.stored[0][0]})
    await copy.follow()
    complete = await copy.complete()
    assert complete is not None
    translator = _translator(source, target, complete)
    await translator.begin()
    read, calls = target.read, list[int]()

    async def count(*args: Any, **more: Any) -> Batch | None:
        calls.append(args[2])
        return await read(*args, **more)

    monkeypatch.setattr(target, "read", count)
    assert await translator.translate(0, source.stored[-1][0] + 1) == complete.copy_ends[0]
    assert not calls, "a group that has read everything needs no read"
    begin = await translator.translate(0, source.stored[-20][0])
    assert dict(target.stored)[begin] == source.stored[-20][1]
    assert len(calls) < 60
    assert len(complete.pairs[0]) < 10


async def test_a_second_command_that_was_frozen_appends_nothing_behind_the_hand_over() -> None:
    """What it appends then would be events of the stream, and be delivered again."""
    _, source, target = _filled(1, 30, noncontiguous=True)
    starts = {0: source.stored[0][0]}
    brokers: tuple[Any, Any] = source, target

    async def thaw() -> None:
        rival = _begin(source, target, starts)
        await rival.follow()
        assert await rival.complete() is not None
        raise CommandFailed("somebody else has moved orders meanwhile")

    frozen = TranslatedCopy(STREAM, *brokers, {}, starts, thaw)
    with pytest.raises(CommandFailed, match="somebody else"):
        await frozen.follow()
    assert len(target.stored) == 30


async def test_a_command_that_was_frozen_between_two_appends_appends_no_more() -> None:
    """A window of large events takes a minute: the other command may hand over meanwhile."""
    _, source, target = _filled(1, 30, noncontiguous=True)
    brokers: tuple[Any, Any] = source, target
    thaw = AsyncMock(side_effect=[None, CommandFailed("somebody else has moved orders meanwhile")])
    with pytest.raises(CommandFailed, match="somebody else"):
        await TranslatedCopy(STREAM, *brokers, {}, {0: source.stored[0][0]}, thaw).follow()
    assert len(target.stored) == 3


async def test_two_commands_that_copy_at_once_write_each_window_once_more_at_most() -> None:
    """The copy is read to its end before each window: what the other one has appended is found, not appended again. The other one
    may also have copied what the stream got since."""
    chance, source, target = _filled(1, 60, noncontiguous=True)
    starts, begun = {0: source.stored[0][0]}, list[int]()
    brokers: tuple[Any, Any] = source, target

    async def be_overtaken() -> None:
        if not begun:
            begun.append(1)
            source.store([event(chance, number, alike=False) for number in range(60, 70)])
            await _begin(source, target, starts).follow()

    copy = TranslatedCopy(STREAM, *brokers, {}, starts, be_overtaken)
    await copy.follow()
    await copy.follow()
    assert copy.events == 70
    assert 70 < len(target.stored) <= 70 + 11 + 7


async def test_a_copy_begins_where_it_was_read_not_at_the_first_event() -> None:
    """What is before may be a fence: a group that has processed nothing would count as one that has lost events."""
    _, source, target = _filled(1, 3, noncontiguous=True)
    start = source.stored[0][0] - 5
    copy = _begin(source, target, {0: start})
    source.read = partial(_read_from_gap, source.read, start)  # type: ignore[method-assign]
    await copy.follow()
    assert copy.begins == {0: start}


async def _read_from_gap(read: Any, start: int, *args: Any, **more: Any) -> Batch | None:
    """As a read that begins at a fence."""
    stream, partition, offset = args
    found: Batch | None = await read(stream, partition, offset + 5 if offset == start else offset, **more)
    return found


async def test_memory_for_events_on_their_way_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """4000 events of a megabyte in each of many partitions would end the process."""
    monkeypatch.setattr(translated_copy, "_WINDOW_BYTES", 2000)
    monkeypatch.setattr(translated_copy, "_LEAST_WINDOW_BYTES", 1)
    _, source, target = _filled(1, 0, noncontiguous=True)
    source.store([Record(None, bytes(1000), number) for number in range(10)])
    copy = _begin(source, target, {0: source.stored[0][0]})
    partition = copy._partitions[0]
    await partition.append(1 << 81, AsyncMock())
    assert 2 <= len(target.stored) < 8
    await copy.follow()
    assert copy.events == 10
