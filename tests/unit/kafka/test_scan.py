"""Altered bytes in a fetch answer: what cannot be read is named, and reading goes on only where it is certain."""

import random
import struct
from collections.abc import Collection
from typing import TYPE_CHECKING, cast

import pytest
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from services.core.broker.errors import DataDamaged, Unavailable
from services.core.broker.kafka import reader
from services.core.broker.kafka.leaders import Fetched
from services.core.broker.kafka.reader import find_damage
from services.core.broker.kafka.record_batch import Unreadable, find_unreadable, first_offset
from services.core.broker.record import TopicPartition

if TYPE_CHECKING:
    from services.core.broker.kafka.cluster import Cluster

_BASE, _LENGTH, _MAGIC, _CRC, _ATTRIBUTES, _LAST_DELTA, _COUNT = 0, 8, 16, 17, 21, 23, 57


def make_batch(
    first: int, count: int = 3, size: int = 20, *, headers: list[tuple[str, bytes]] | None = None
) -> bytearray:
    """Records `first`, `first` + 1, … as a broker stores them."""
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, 1 << 20)
    for index in range(count):
        builder.append(index, 1_700_000_000_000, b"k", b"v" * size, headers or [])
    data = bytearray(builder.build())
    struct.pack_into(">q", data, _BASE, first)
    return data


def flip(data: bytearray, at: int, bit: int = 0) -> bytearray:
    """One bit altered, as a bad disk would."""
    data[at] ^= 1 << bit
    return data


def find(*batches: bytes | bytearray, position: int = 0) -> Unreadable | None:
    return find_unreadable(b"".join(batches), position)


async def test_a_partition_without_a_leader_hides_no_damage_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """If it fails, one partition that cannot be asked holds up all partitions of a member that meets damage."""
    away, damaged, intact = (TopicPartition("t", number) for number in range(3))

    async def leaders(_cluster: object, sources: Collection[TopicPartition], *_: object) -> dict[TopicPartition, int]:
        if away in sources:
            raise Unavailable("t[0] has no leader now")
        return dict.fromkeys(sources, 1)

    async def fetch(_cluster: object, source: TopicPartition, *_: object, **__: object) -> Fetched:
        if source == damaged:
            raise DataDamaged("t", ((1, 5, 5),), "zeros")
        return Fetched(bytes(make_batch(0)))

    monkeypatch.setattr(reader, "leaders_of", leaders)
    monkeypatch.setattr(reader, "fetch", fetch)
    cluster = cast("Cluster", None)
    found = await find_damage(cluster, {away: 5, damaged: 5, intact: 0})
    assert found.keys() == {damaged}
    assert found[damaged].is_next
    with pytest.raises(Unavailable, match="no leader"):
        await find_damage(cluster, {away: 5, intact: 0})


def test_intact_batches_pass() -> None:
    """If it fails, good records are buried as damaged ones."""
    assert find(make_batch(0), make_batch(3), make_batch(6)[:-5]) is None
    assert find_unreadable(b"", 7) is None
    assert first_offset(bytes(make_batch(5))) == 5


@pytest.mark.parametrize("at", [_CRC, _ATTRIBUTES, _LAST_DELTA + 3, _COUNT + 3, 65, -1])
def test_a_flipped_bit_ends_where_the_next_batch_begins(at: int) -> None:
    """If it fails, a damaged record stops its sender for ever, or takes intact ones with it."""
    bad = make_batch(3)
    found = find(make_batch(0), flip(bad, at % len(bad)), make_batch(6), position=1)
    assert found is not None
    assert (found.first, found.resume, found.raw) == (3, 6, bytes(bad))
    assert not found.is_next, "records 1 and 2 come first"


def test_the_position_may_lie_inside() -> None:
    """If it fails, what was delivered already counts as damaged, or the sender goes back."""
    found = find(flip(make_batch(0), -1), make_batch(3), position=2)
    assert found is not None
    assert (found.first, found.resume, found.is_next) == (2, 3, True)


def test_neighbours_that_are_damaged_too_are_one_range() -> None:
    """If it fails, a bad sector over two batches stops the sender."""
    found = find(flip(make_batch(0), -1), flip(make_batch(3), 70), make_batch(6))
    assert found is not None
    assert (found.first, found.resume) == (0, 6)


@pytest.mark.parametrize("magic", [0, 1, 3, 127])
def test_an_unknown_magic_is_damage_unless_the_checksum_holds(magic: int) -> None:
    """If it fails, a batch in another format is misread. The checksum of format 2 proves that it is format 2."""
    bad = make_batch(0)
    bad[_MAGIC] = magic
    found = find(bad, make_batch(3))
    if magic > 2:
        assert found is None
        return
    assert found is not None
    assert f"unknown magic {magic}" in found.detail
    assert found.resume == 3


def test_a_header_name_that_is_no_text_is_kept_as_it_is_stored() -> None:
    """If it fails, one record of another producer stops the sender, though its checksum holds."""
    bad = make_batch(0, headers=[("name", b"x")])
    at = bad.index(b"name")
    bad[at] = 0xFF
    struct.pack_into(">I", bad, _CRC, _crc(bad))
    found = find(bad, make_batch(3))
    assert found is not None
    assert found.resume == 3
    assert "UnicodeDecodeError" in found.detail


@pytest.mark.parametrize("length", [-1, 3, 13, 1 << 30])
def test_a_length_that_leads_nowhere_is_not_passed_over(length: int) -> None:
    """If it fails, intact records behind an altered length are skipped in silence."""
    bad = make_batch(0)
    struct.pack_into(">i", bad, _LENGTH, length)
    found = find(bad, make_batch(3))
    assert found is not None
    assert (found.resume, found.claimed_end) == (None, None)


@pytest.mark.parametrize("length", [-1, 0, 13])
@pytest.mark.parametrize(("position", "is_next"), [(1, False), (3, True)])
def test_a_length_that_leads_nowhere_behind_intact_records(length: int, position: int, is_next: bool) -> None:
    """If it fails, a block of zeros in a segment stops its partition, without a word, before the records in front of it."""
    bad = make_batch(3)
    struct.pack_into(">i", bad, _LENGTH, length)
    found = find(make_batch(0), bad, make_batch(6), position=position)
    assert found is not None
    assert (found.first, found.is_next, found.resume, found.claimed_end) == (3, is_next, None, None)


def test_at_the_end_the_header_must_agree_with_itself() -> None:
    """If it fails, an altered count at the end of a segment skips the records behind it."""
    ending = find(make_batch(0), flip(make_batch(3), -1))
    assert ending is not None
    assert (ending.resume, ending.claimed_end) == (None, 6)
    for at in (_LAST_DELTA + 3, _COUNT + 3):
        odd = find(flip(make_batch(0), at, bit=4))
        assert odd is not None
        assert (odd.resume, odd.claimed_end) == (None, None)


def test_an_unknown_compression_is_not_damage() -> None:
    """If it fails, a topic that we merely lack a library for goes to the dead letters as a whole."""
    bad = make_batch(0)
    bad[_ATTRIBUTES + 1] = 7
    struct.pack_into(">I", bad, _CRC, _crc(bad))
    found = find(bad, make_batch(3))
    assert found is not None
    assert not found.passable


def test_no_flipped_bit_loses_an_intact_batch() -> None:
    """If it fails, one altered bit anywhere in a batch makes reading go on behind records that are intact."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    dice = random.Random(seed)
    sizes = [dice.randrange(1, 60) for _ in range(6)]
    for at in range(len(make_batch(0, size=sizes[0]))):
        for bit in range(8):
            bad = flip(make_batch(0, size=sizes[0]), at, bit)
            behind = [make_batch(3 * index, size=size) for index, size in enumerate(sizes)][1:]
            found = find(bad, *behind)
            if found is None:
                assert at < _CRC, "only offset, leader and magic lie outside of the checksum"
                continue
            passed = b"".join(behind[: len(behind) if found.resume is None else found.resume // 3 - 1])
            assert found.resume is None or bytes(bad) + passed == found.raw, f"bit {bit} of byte {at}"


def _crc(data: bytearray) -> int:
    checksum: int = calc_crc32c(bytes(data[_ATTRIBUTES:]))
    return checksum
