"""The real producer and Kinesis appender against a model of PutRecords, in virtual time: what was answered is true.

An acknowledged record is stored at least once; what was answered "not stored" is not stored, now or later; of a key the
records that were acknowledged lie in the order in which they were sent.
"""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from unittest import mock

import pytest

from services.core.broker import retry
from services.core.broker.errors import OutcomeUnknown, Overloaded
from services.core.broker.kinesis import record_format
from services.core.broker.kinesis.appender import KinesisAppender
from services.core.broker.kinesis.aws import Timing
from services.core.broker.producer import Producer
from services.core.broker.record import Record
from tests.support.virtual_loop import run_virtually
from tests.unit.kinesis.put_model import PutModel

pytestmark = pytest.mark.long

_PARTITIONS, _KEYS, _SENDS = 3, 5, 8
_LONGEST_S = 22.0
"""A send's deadline, one append's time-out, and a little."""


@dataclass
class _Told:
    """What became of each copy of each record, by what the producer said. copies: values are unique, equally long."""

    acknowledged: list[bytes] = field(default_factory=list)
    not_stored: list[bytes] = field(default_factory=list)
    sent: int = 0

    def new(self, key: int, number: int) -> Record:
        self.sent += 1
        return Record(b"%d" % key, b"%d/%03d/%04d" % (key, number, self.sent), 0, (("pad", b"x" * 400),))


class _Client:
    """Sends the records of one key in order, the next when it knows of the last; what failed is sent again, for a while."""

    def __init__(self, chance: random.Random, producer: Producer, told: _Told, key: int) -> None:
        self._chance, self._producer, self._told, self._key = chance, producer, told, key
        self._next = 0

    async def run(self) -> None:
        for _ in range(_SENDS):
            await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.1, 2.0)))
            count = self._chance.choice((1, 1, 1, 2, 6))
            numbers = list(range(self._next, self._next + count))
            self._next += count
            for _ in range(self._chance.randrange(1, 5)):
                numbers = await self._send(numbers)
                if not numbers:
                    break

    async def _send(self, numbers: list[int]) -> list[int]:
        """Those that are not acknowledged."""
        records = [self._told.new(self._key, number) for number in numbers]
        sending = asyncio.ensure_future(self._producer.send_to("t", {self._key % _PARTITIONS: records}))
        begun = asyncio.get_running_loop().time()
        if self._chance.random() < 0.05:  # a client that hangs up
            await asyncio.sleep(self._chance.choice((0.0, 0.0, 0.01, 1.0)))
            sending.cancel()
        try:
            (part,) = (await sending).parts
        except asyncio.CancelledError:
            return numbers
        except Overloaded:
            self._told.not_stored += [record.value or b"" for record in records]
            return numbers
        assert asyncio.get_running_loop().time() - begun < _LONGEST_S
        failed = dict(part.failed)
        for index, record in enumerate(records):
            if index not in failed:
                self._told.acknowledged.append(record.value or b"")
            elif not isinstance(failed[index], OutcomeUnknown):
                self._told.not_stored.append(record.value or b"")
        return [number for index, number in enumerate(numbers) if index in failed]


async def _history(seed: int) -> tuple[PutModel, _Told]:
    chance = random.Random(seed)
    model, told = PutModel(chance, _PARTITIONS, chance.choice((1, 2, 3))), _Told()
    appender = KinesisAppender(model.put, model, Timing())
    changing = asyncio.create_task(model.change())
    async with Producer(appender) as producer, asyncio.TaskGroup() as clients:
        for key in range(_KEYS):
            clients.create_task(_Client(chance, producer, told, key).run())
    changing.cancel()
    await appender.close()
    await model.drain()
    return model, told


def _check(model: PutModel, told: _Told) -> None:
    for partition, values in model.stored.items():
        first: dict[bytes, int] = {}
        for at, value in enumerate(values):
            first.setdefault(value, at)
        mine = [value for value in told.acknowledged if int(value.split(b"/")[0]) % _PARTITIONS == partition]
        for value in mine:
            assert value in first, f"acknowledged and not stored: {value!r}"
        for key in {value.split(b"/")[0] for value in mine}:
            places = [first[value] for value in mine if value.split(b"/")[0] == key]
            numbers = [value.split(b"/")[1] for value in mine if value.split(b"/")[0] == key]
            assert numbers == sorted(numbers), f"acknowledged out of order: {numbers}"
            assert places == sorted(places), f"key {key!r} is stored out of order"
    lies = set(told.not_stored).intersection(*[{value for values in model.stored.values() for value in values}])
    assert not lies, f'answered "not stored", and stored: {sorted(lies)}'


@pytest.fixture(autouse=True)
def small_appends() -> Iterator[None]:
    """Sends of several records are cut into several appends, and an append into several entries."""
    with (
        mock.patch.object(retry, "MAX_APPEND_BYTES", 2_000),
        mock.patch.object(record_format, "MAX_ENTRY_BYTES", 1_500),
        mock.patch.object(record_format, "MAX_RECORD_BYTES", 1_200),
    ):
        yield


@pytest.mark.parametrize("block", range(5))
def test_what_was_answered_is_true(block: int) -> None:
    """If it fails, a 2xx may be a lost event, or a 503 "not stored" one that is delivered, or a key's events turn around."""
    acknowledged = refused = 0
    for seed in range(100 * block, 100 * block + 100):
        try:
            model, told = run_virtually(_history(seed), seed=seed)
            _check(model, told)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error
        acknowledged += len(told.acknowledged)
        refused += len(told.not_stored)
    assert acknowledged > 4_000
    assert refused > 300, "the model makes trouble"
