"""A retrier that died between writing on and committing: whoever comes next writes nothing twice, and forgets nothing."""

import random
from pathlib import Path

from services.core.broker.record import Record
from services.core.pipe_file.topic_names import RETRY_IN, delay_topic, retry_topic
from services.core.undelivered.retry_state import unwrap
from services.global_retrier.delay_queue import MOVE_EVENTS, choose_delay
from tests.unit.global_retrier.river import River, make_record, make_state, open_river

COUNT = 300


async def drive_all(river: River, count: int) -> list[int]:
    """Numbers of the events as they come out, until so many different ones did and nothing waits any more."""
    found: list[int] = []

    async def look() -> None:
        found.extend(unwrap(record)[1].position()[1] for record in await river.out())

    await river.drive(lambda: len(set(found)) >= count and river.clock.next_wake() is None, look)
    return found


async def test_written_on_and_not_committed(tmp_path: Path) -> None:
    """Broken: each crash repeats what was under way, and a retrier that crashes often repeats one event in thirty."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    async with open_river(tmp_path) as river:
        began = river.clock.now_ms()
        records = [make_record(make_state(began + chance.randrange(-2000, 90_000), n), began) for n in range(COUNT)]
        await river.put(records)
        moved_at = began + chance.randrange(3000)
        river.clock.jump(moved_at)
        for record in records[: chance.randrange(1, MOVE_EVENTS + 1)]:
            left = unwrap(record)[1].due - moved_at
            copy = Record(record.key, record.value, moved_at, record.headers)
            await river.put([copy], choose_delay(left) or retry_topic("late"))
        river.clock.jump(moved_at + chance.choice([10, 3000, 30_000, 86_400_000]))
        async with river.running():
            assert sorted(await drive_all(river, COUNT)) == list(range(COUNT))


async def test_on_its_way_through_the_same_topic_again(tmp_path: Path) -> None:
    """Broken: a record that is to wait once more in the topic it lies in takes itself for its copy, and is lost."""
    async with open_river(tmp_path) as river:
        began = river.clock.now_ms()
        states = [make_state(began + 14_000 + n, n) for n in range(20)]
        await river.put([make_record(state, began) for state in states], delay_topic(4))
        river.clock.jump(began + 5000)
        await river.put([make_record(state, began + 5000) for state in states[:7]], delay_topic(4))
        river.clock.jump(began + 6000)
        async with river.running():
            assert sorted(await drive_all(river, 20)) == list(range(20))


async def test_another_event_of_the_same_place_and_time_is_no_copy(tmp_path: Path) -> None:
    """Broken: a stream that was made anew has another event at the same offset, which passes for moved, and is lost."""
    async with open_river(tmp_path) as river:
        now = river.clock.now_ms()
        old, new = make_record(make_state(now - 10, 1), now), make_record(make_state(now - 10, 1), now)
        await river.put([Record(old.key, b'{"life":1}', now, old.headers)], retry_topic("late"))
        await river.put([Record(new.key, b'{"life":2}', now, new.headers)], RETRY_IN)
        async with river.running():
            await river.rest()
            assert [record.value for record in await river.out()] == [b'{"life":1}', b'{"life":2}']


async def test_only_the_same_round_counts(tmp_path: Path) -> None:
    """Broken: an event that was handed over again is taken for its own earlier round, and is lost."""
    async with open_river(tmp_path) as river:
        now = river.clock.now_ms()
        await river.put([make_record(make_state(now - 10, 1, rounds=1), now)], retry_topic("late"))
        await river.put([make_record(make_state(now - 10, 1, rounds=2), now)], RETRY_IN)
        async with river.running():
            await river.rest()
            assert [unwrap(record)[1].rounds for record in await river.out()] == [1, 2]
