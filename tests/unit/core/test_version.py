"""What a newer version wrote: refused with a remedy where it would be misread, understood in part where it can be."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import AsyncMock
from zlib import crc32

import msgspec
import pytest
from pyroaring import BitMap
from structlog.testing import capture_logs

from services.core import metrics
from services.core.audit import Entry, decode_entry
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import BrokerError, NewerFormat
from services.core.broker.log.high_water_marks import HighWaterMarks
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Damage, Record
from services.core.control.freezes import Freeze, Freezes
from services.core.control.homes import Homes, MigrationStep
from services.core.control.pauses import Pause, Pauses
from services.core.control.topic import Versioned
from services.core.ledger.report import BadReport, NewerReport, OriginSet, Report, decode_known, pack_numbers
from services.core.pipe_file.snapshot import copy_in, write_snapshot
from services.core.pipe_file.topic_names import CONTROL
from services.core.undelivered.waiting import Bookmark, read_bookmark, write_bookmark
from services.core.version import newer_format
from services.fleet.folder import STATE_FILE, read_state
from services.fleet.problem import CommandFailed

KNOWN = OriginSet("delivered", "a", 0, None, pack_numbers(BitMap([1, 2])))
REPORT = Report(node="expel", instance="x", pipe="p", destination="d", at_ms=5, breaker="open", sets=(KNOWN,))


def counted(kind: str, reason: str) -> float:
    return float(metrics.NOT_UNDERSTOOD.labels(kind, reason)._value.get())


def encode(change: Callable[[list[object]], object]) -> bytes:
    """The report as a newer version may write it."""
    fields = msgspec.msgpack.decode(REPORT.encode())
    change(fields)
    return msgspec.msgpack.encode(fields)


def test_the_words_name_both_versions_and_the_remedy() -> None:
    """Broken: who started an old version by mistake at night is not told which one to start."""
    text = newer_format("the checkpoint", 2, 1, "0.3.0")
    assert "has format 2, written by Penstock 0.3.0; this is Penstock 0." in text
    assert "Try: start Penstock 0.3.0 or newer; docs/upgrading.md" in text
    assert "a newer Penstock" in newer_format("it", 2, 1, None)


SETS, BREAKER = 7, 11


@pytest.mark.parametrize(
    ("change", "unknown", "expected"),
    [
        (lambda told: told[SETS].append(["expired", "a", 0, None, b"x", [5, 6], "more"]), ["outcome"], 2),
        (lambda told: told[SETS].append({"a": "map"}), ["sets"], 1),
        (lambda told: told.append(["a field of the future"]), [], 1),
        (lambda told: told.__setitem__(BREAKER, "ajar"), ["breaker"], 1),
        (lambda told: told.__setitem__(SETS + 1, [[1, 2]]), ["lags"], 1),
    ],
)
def test_the_known_part_of_a_report_counts(
    change: Callable[[list[object]], object], unknown: list[str], expected: int
) -> None:
    """Broken: one word that an older observer does not know makes it drop all that an instance reported."""
    report, found = decode_known(encode(change))
    assert ([*found], len(report.sets)) == (unknown, expected)
    assert report.sets[0] == KNOWN
    assert report.breaker == (None if unknown == ["breaker"] else "open")
    assert all((one.outcome, one.due) == ("unknown", None) for one in report.sets[1:])


@pytest.mark.parametrize(("place", "value", "reason"), [(0, 2, "version"), (1, "archiver", "node")])
def test_a_report_of_which_nothing_is_known(place: int, value: object, reason: str) -> None:
    """Broken: a report in a later format is taken for one in ours, or for damage."""
    with pytest.raises(NewerReport) as error:
        decode_known(encode(lambda told: told.__setitem__(place, value)))
    assert error.value.reason == reason


@pytest.mark.parametrize("value", [b"", b"\x90", b"\x00\x00", b"no report", msgspec.msgpack.encode(["1"] * 9)])
def test_what_is_no_report_is_not_called_newer(value: bytes) -> None:
    """Broken: damage is excused as another version, or ends the observer."""
    with pytest.raises(BadReport) as error:
        decode_known(value)
    assert not isinstance(error.value, NewerReport)


async def _paused(broker: Broker) -> bool:
    pauses = Pauses(broker.reader)
    await pauses.refresh()
    return "n" in pauses.paused()


async def _frozen(broker: Broker) -> bool:
    freezes = Freezes(broker.reader)
    await freezes.refresh()
    return "n" in freezes.in_force(4)


async def _moving(broker: Broker) -> bool:
    places = Homes({"n": "default"}, broker)
    await places.refresh()
    return places.home("n").state == "copying"


@pytest.mark.parametrize(
    ("kind", "known", "newer", "holds"),
    [
        ("pause", Pause("paused", "operator", "ann", 1), Pause("resumed", "operator", "ann", 2, version=2), _paused),
        ("freeze", Freeze("frozen", "ann", 1, "load test"), Freeze("unfrozen", "ann", 2, version=2), _frozen),
        ("home", MigrationStep("copying", "b", home="default"), MigrationStep("undone", of=0, version=2), _moving),
    ],
)
async def test_a_newer_change_is_not_applied(
    tmp_path: Path, kind: str, known: Versioned, newer: Versioned, holds: Callable[[Broker], Awaitable[bool]]
) -> None:
    """Broken: an older version takes a change of a newer one for an end: a paused destination runs, a group that a person froze
    is changed; or it is passed over uncounted."""
    before = counted(kind, "version"), counted(kind, "unreadable")
    values = (
        msgspec.json.encode(known),
        msgspec.json.encode(newer),
        b'{"state": "strange", "reason": "x", "by": "y", "at": 3}',
    )
    async with open_broker(f"log://{tmp_path}") as broker, Producer(broker.appender) as producer:
        await broker.admin.create_topic(TopicSpec(CONTROL, 1))
        (
            await producer.send_to(CONTROL, {0: [Record(f"{kind}:n".encode(), value, 3) for value in values]})
        ).raise_first()
        assert await holds(broker)
    assert (counted(kind, "version"), counted(kind, "unreadable")) == (before[0] + 1, before[1] + 1)


async def test_damaged_changes_are_counted() -> None:
    """Broken: a pause or a home vanishes with damaged records of Kafka, and nothing says so."""
    pages = [
        Batch(CONTROL, 0, [4], [Record(None, b"raw", 3)], Damage(2, 4, "checksum")),
        Batch(CONTROL, 0, [5], [Record(b"pause:n", msgspec.json.encode(Pause("paused", "operator", "ann", 1)), 3)]),
        None,
    ]
    pauses, before = Pauses(AsyncMock(read=AsyncMock(side_effect=pages))), counted("pause", "unreadable")
    with capture_logs() as logs:
        await pauses.refresh()
    assert counted("pause", "unreadable") == before + 3
    assert [(line["event"], line["first"], line["last"]) for line in logs] == [("control_records_damaged", 2, 4)]
    assert "n" in pauses.paused()


async def test_a_newer_bookmark_is_refused(tmp_path: Path) -> None:
    """Broken: `up` of an older version forgets the lanes of earlier pipe files, for which events wait."""
    async with open_broker(f"log://{tmp_path}") as broker, Producer(broker.appender) as producer:
        await broker.admin.create_topic(TopicSpec(CONTROL, 1))
        await write_bookmark(producer, Bookmark(lanes=frozenset({"p/d"})), 1)
        assert (await read_bookmark(broker.reader)).lanes == {"p/d"}
        value = json.dumps({"version": 2, "penstock": "0.9.0", "marks": []}).encode()
        (await producer.send_to(CONTROL, {0: [Record(b"waiting", value, 2)]})).raise_first()
        with pytest.raises(NewerFormat, match=r"written by Penstock 0\.9\.0") as error:
            await read_bookmark(broker.reader)
    assert isinstance(error.value, BrokerError)  # every command prints it


def test_newer_marks_of_the_log_are_no_damage(tmp_path: Path) -> None:
    """Broken: the message names `penstock log repair`, which gives up what a newer version stored."""
    incarnation, magic = bytes(16), b"PSTKHWM2"
    path = tmp_path / "s.hwm"
    HighWaterMarks.create(path, incarnation, [7])
    content = path.read_bytes()
    path.write_bytes(magic + incarnation + crc32(magic + incarnation).to_bytes(4, "little") + content[28:])
    with pytest.raises(NewerFormat, match=r"the file of high-water marks of s has format 2"):
        HighWaterMarks.open(path, "s", incarnation)


def test_newer_files_of_a_fleet(tmp_path: Path) -> None:
    """Broken: an older command says that no fleet runs, while a newer one does; or a service reads the wrong configuration."""
    (tmp_path / STATE_FILE).write_text('{"version": 2, "penstock": "0.9.0"}')
    with pytest.raises(CommandFailed, match=r"fleet\.json has format 2, written by Penstock 0\.9\.0"):
        read_state(tmp_path)
    write_snapshot(tmp_path / "snapshot", {"/p.yaml": b""})
    index = tmp_path / "snapshot" / "files.json"
    index.write_text(index.read_text().replace('"":"1"', '"":"2"'))
    with pytest.raises(OSError, match="has format 2"):
        copy_in(tmp_path / "snapshot", Path("/p.yaml"))


def test_an_audit_entry_of_a_newer_version_is_no_entry() -> None:
    """Broken: a redrive takes the offsets of a later format for its own, and passes over dead letters that nobody redrove."""
    entry = Entry("redrive", 5, "ann@host", {}, "p.dead", 0, [(0, 9)], 10)
    assert decode_entry(msgspec.json.encode(entry)) == entry
    with pytest.raises(ValueError, match="the entry has format 2, written by a newer Penstock"):
        decode_entry(msgspec.json.encode(msgspec.structs.replace(entry, version=2)))
