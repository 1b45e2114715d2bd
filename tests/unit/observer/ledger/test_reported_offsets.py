"""Where to look for what an ingest did not tell, also where partitions are read as shards and offsets have 206 bits."""

import msgspec
import pytest

from services.core.ledger.report import decode_known, decode_report, pack_offset
from services.observer.ledger.origins import SequenceKey
from services.observer.ledger.reported_offsets import ReportedOffsets
from services.observer.ledger.table import Table
from services.observer.planned import PlannedWindows
from services.observer.snapshot import FollowerState
from tests.unit.observer.ledger.snapshots import dump, restore
from tests.unit.observer.ledger.stories import MINUTE, MINUTE_MS, PLAIN, START_MS, hear, reach

BIG = 1 << 205


def test_what_was_written_to_a_partition_may_lie_in_any_shard() -> None:
    """Broken: after a split of a Kinesis shard, what a dead ingest did not tell is looked for behind it, or never."""
    offsets = ReportedOffsets(by_partition=False)
    offsets.record(reach("flights", {0: BIG, 1: BIG + 500}))
    offsets.record(reach("flights", {1: BIG + 900}, at_ms=START_MS + MINUTE_MS))
    offsets.record(reach("flights", {0: 7}, incarnation="b"))
    child = SequenceKey("a", 3)
    assert offsets.start("flights", child, START_MS) == BIG + 1
    assert offsets.start("flights", SequenceKey("c", 3), START_MS + 2 * MINUTE_MS) == BIG + 1
    assert offsets.before("flights", 3, MINUTE) is None
    assert offsets.after("flights", 1, MINUTE) is None, "another shard's offsets say nothing of an end"
    of_each = ReportedOffsets()
    of_each.record(reach("flights", {0: BIG, 1: BIG + 500}))
    assert of_each.start("flights", SequenceKey("a", 1), START_MS) == BIG + 501


def test_offsets_of_206_bits_survive_report_and_snapshot() -> None:
    """Broken: on Kinesis ingest cannot tell anything, or the observer loses its state at a restart."""
    told = decode_report(reach("flights", {0: BIG, 1: 5}).encode())
    assert [int(one.offset) for one in told.reaches] == [BIG, 5]
    table = Table(PLAIN)
    hear(table, told)
    other = Table(PLAIN)
    assert restore(dump(table, FollowerState(PlannedWindows(), BIG + 3)), other).offset == BIG + 3
    assert other.offsets.reported == table.offsets.reported
    assert other.offsets.marks == table.offsets.marks


@pytest.mark.parametrize("text", ["", "1x", "-5", "9" * 5000])
def test_an_offset_that_is_none_is_left_out(text: str) -> None:
    """Broken: one bad record of the telemetry topic ends the observer, or counts as far as nobody reported."""
    told = reach("flights", {0: 1})
    bad = msgspec.structs.replace(told, reaches=(msgspec.structs.replace(told.reaches[0], offset=text),))
    found = decode_known(bad.encode())
    assert found == (msgspec.structs.replace(told, reaches=()), ["reaches"])
    assert pack_offset(5) == 5
