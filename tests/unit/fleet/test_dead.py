"""Dead letters on the command line: found by what they say, sent again to the right place, each action on record."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from msgspec import structs

from services.core.audit import DISCARD, REDRIVE, ActedUpon, Entry, digest_of, write_entries
from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.producer import Producer, SendResult
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.event import FAULT, ID, ORIGIN, REDRIVEN
from services.core.ledger.report import TELEMETRY, decode_report, unpack_numbers
from services.core.pipe_file.existing_topics import Translation
from services.core.pipe_file.pipes import PipeFile
from services.core.pipe_file.stream import Stream
from services.core.pipe_file.topic_names import AUDIT, RETRIER_DEAD, renames_of
from services.core.provision import ensure_topics
from services.core.times import parse_time
from services.core.undelivered import dead_letter
from services.core.undelivered.causes import Causes, normalise
from services.core.undelivered.dead_letter import DeadLetter, Position
from services.core.undelivered.retry_state import read_state, unwrap
from services.expel.dedup import RetryTopicFilter
from services.fleet.dead.audit import AuditedActions, Auditor, read_audit
from services.fleet.dead.found import DeadLetterSearch, Filter, restore, with_payloads
from services.fleet.dead.redrive import REMEDIES, Redrive, RedriveTargets
from services.fleet.dead.view import letter_json
from services.fleet.doctor.checks.events import find_letters
from services.fleet.doctor.collectors import broker as collectors
from services.fleet.doctor.collectors.broker import collect_broker
from services.fleet.doctor.facts import Facts
from services.fleet.problem import CommandFailed
from services.fleet.verbs.dead import _redrive, list_found
from tests.support.dead_letters import BASE, DEAD
from tests.support.dead_letters import dead_letter as refused_letter
from tests.support.waiting_events import store, stored

HOOK = {"url": "https://example.org/hook"}
PIPES = PipeFile.model_validate(
    {
        "streams": {"orders": {}, "copy": {}},
        "pipes": {
            "late": {
                "sources": ["orders"],
                "destinations": [
                    {"name": "billing", "webhook": HOOK},
                    {"name": "ordered", "webhook": {**HOOK, "order": "key"}},
                    {"name": "once", "webhook": {**HOOK, "schedule": []}},
                    {"name": "copied", "stream": "copy"},
                ],
            }
        },
    }
)
ANY = Filter()


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with open_broker(f"log://{tmp_path}/data/log") as opened:
        await ensure_topics(opened.admin, PIPES)
        yield opened


def original(number: int) -> Record:
    headers = (("ce_id", b"e%d" % number), ("penstock_arrival", b"1"), ("odd", b"\x00\xff"))
    return Record(b"k%d" % number, b'{"n":%d}' % number, BASE + number, headers)


def letter(number: int, **said: object) -> Record:
    """Event `number` as a dead letter, first failed `number` seconds after BASE."""
    return refused_letter(original(number), number, pipe="late", **said)


def stored_letter(number: int) -> DeadLetter:
    """As it is found at offset `number`."""
    record = letter(number)
    return DeadLetter.of(Position("late.dead", 0, number), record, digest=digest_of(record))


async def bury(broker: Broker, letters: Sequence[Record]) -> None:
    await store(broker, "late.dead", letters)


async def numbers(broker: Broker, where: Filter = ANY, *, settled: bool = False) -> list[int]:
    found = await DeadLetterSearch.open(broker, where, settled=settled)
    return [one.position.offset async for page in found.pages() for one in page]


async def redrive(
    broker: Broker,
    positions: Sequence[Position] = (),
    where: Filter = ANY,
    *,
    to_stream: bool = False,
    by_event_time: Sequence[str] = (),
) -> Redrive:
    async with Producer(broker.appender) as producer:
        targets = RedriveTargets(PIPES, to_stream=to_stream, by_event_time=by_event_time)
        work = Redrive(targets, producer, Auditor(producer, "me@here", where.as_json()), 10_000)
        await work.run(with_payloads(broker.reader, (await DeadLetterSearch.open(broker, where, positions)).pages()))
    return work


async def test_filters(broker: Broker) -> None:
    """Broken: an operator redrives or discards other letters than those asked for."""
    said: list[dict[str, object]] = [{}, {"destination": "ordered"}, {"reason": "timeout"}, {"destination": ""}, {}]
    await bury(broker, [letter(number, **one) for number, one in enumerate(said)])
    assert await numbers(broker) == [0, 1, 2, 3, 4]
    assert await numbers(broker, Filter(pipe="late", destination="billing")) == [0, 2, 4]
    assert await numbers(broker, Filter(reason="timeout")) == [2]
    assert await numbers(broker, Filter(since=DEAD + 1000, until=DEAD + 3000)) == [1, 2]
    assert await numbers(broker, Filter(destination="new", lanes={"late/new"})) == []
    assert (
        await numbers(broker, Filter(destination="old", renames={"late/old": "late/ordered"}, lanes={"late/billing"}))
        == []
    )
    assert await numbers(broker, Filter(destination="nobody")) == []
    known = {"late/billing"}
    misspelt = (
        (Filter(destination="biling", lanes=known), "billing"),
        (Filter("late", "order", lanes=known), "late/ordered"),
    )
    for mistyped, meant in misspelt:
        with pytest.raises(CommandFailed, match=f"there is no destination .*; did you mean {meant}\\?"):
            await numbers(broker, mistyped)  # none found would read as all is well


@pytest.mark.parametrize("as_json", [False, True])
async def test_a_list_that_is_cut_short_says_so(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    """Broken: a script counts the lines of the list, finds 100, and its operator never sees the others."""
    await bury(broker, [letter(number) for number in range(5)])
    url = f"log://{tmp_path}/data/log"
    await list_found(url, ANY, 3, settled=False, as_json=as_json)
    out, err = capsys.readouterr()
    assert out.count("late.dead:0:") == 3
    assert err == "5 dead letters, 2 of them not shown. Try: --limit 0\n"
    await list_found(url, ANY, 0, settled=False, as_json=as_json)
    out, err = capsys.readouterr()
    assert out.count("late.dead:0:") == 5
    hint = "Try: penstock dead show POSITION; then penstock dead redrive POSITION, or dead discard POSITION"
    assert err == ("" if as_json else f"5 dead letters. {hint}\n")


async def test_a_list_of_letters_without_a_destination_says_how_to_redrive_them(
    broker: Broker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken: the hint below a transform's letters is a command that refuses them."""
    await bury(broker, [letter(0, destination="")])
    await list_found(f"log://{tmp_path}/data/log", ANY, 0, settled=False, as_json=False)
    assert (
        "correct the event, its `columns` or the transform, and penstock dead redrive POSITION --to-stream"
        in capsys.readouterr().err
    )


async def test_letters_of_a_pipe_that_is_gone_are_with_the_retrier(broker: Broker) -> None:
    """Broken: events that the retrier could not give to a removed pipe cannot be chosen by its name, and stay dead."""
    await bury(broker, [letter(0)])
    async with Producer(broker.appender) as producer:
        gone = refused_letter(original(1), 1, pipe="gone", reason="unknown_pipe")
        (await producer.send_to(RETRIER_DEAD, {0: [gone]})).raise_first()
    found = await DeadLetterSearch.open(broker, Filter(pipe="gone"))
    assert [one.position async for page in found.pages() for one in page] == [Position(RETRIER_DEAD, 0, 0)]
    with pytest.raises(CommandFailed, match=r"there is no topic nobody\.dead"):
        await numbers(broker, Filter(pipe="nobody"))


async def test_the_observer_is_told_of_what_is_redriven(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    """Broken: what is lost after a redrive counts as dead for ever; or without an observer nothing can be redriven."""

    def with_origin(number: int) -> Record:
        record = letter(number)
        return Record(
            record.key, record.value, record.timestamp, (*record.headers, ("penstock_origin", b"a:0:%d" % number))
        )

    await bury(broker, [with_origin(1), with_origin(2)])
    await redrive(broker)
    (told,) = [decode_report(record.value) for record in await stored(broker, TELEMETRY)]
    dues = {state.due // 1000 for state in (unwrap(record)[1] for record in await stored(broker, "late.retry"))}
    ((outcome, numbers, due),) = [(one.outcome, set(unpack_numbers(one.numbers)), one.due) for one in told.sets]
    assert (outcome, numbers, {due[0]} if due else None) == ("redriven", {1, 2}, dues)
    assert (told.node, told.pipe, told.destination, told.closed) == ("retrier", "late", "billing", True)
    await broker.admin.delete_topic(TELEMETRY)
    await bury(broker, [with_origin(3)])
    assert (await redrive(broker)).so_far.done == 1
    assert "the ledger gets no report" in capsys.readouterr().err


async def test_letters_of_two_lives_of_a_stream_are_both_sent(broker: Broker) -> None:
    """Broken: of two letters redriven together, both of the same place of a stream that was made anew, one is never sent."""
    await bury(broker, [letter(1), letter(2, offset=1), letter(3, offset=1)])
    await redrive(broker, where=Filter(destination="billing"))
    records = await stored(broker, "late.retry")
    assert len({(state.source, state.due) for state in (unwrap(record)[1] for record in records)}) == 1
    sorted_out = RetryTopicFilter("late", "billing").sort(Batch("late.retry", 0, range(3), records))
    assert [record.header("ce_id") for mine in sorted_out.mine for record in mine.records] == [b"e1", b"e2", b"e3"]
    assert sorted_out.duplicates == []


async def test_more_than_a_page_and_nothing_that_comes_later(broker: Broker) -> None:
    """Broken: a long list is cut off, or a redrive of what dies again at once never ends."""
    await bury(broker, [letter(number) for number in range(1200)])
    found = await DeadLetterSearch.open(broker, Filter())
    await bury(broker, [letter(5000)])
    assert await found.count() == 1200
    assert [one.position.offset async for page in found.pages() for one in page] == list(range(1200))


async def test_redriven_as_they_were_to_their_destination_alone(broker: Broker) -> None:
    """Broken: a redriven event is altered, given up at once, sent to others too, or sent again by the next redrive."""
    await bury(broker, [letter(number) for number in range(250)])
    before = int(time.time() * 1000)
    work = await redrive(broker, where=Filter(destination="billing"))
    assert (work.so_far.done, work.so_far.refused) == (250, {})
    written = [unwrap(record) for record in await stored(broker, "late.retry")]
    assert [record for record, _ in written] == [original(number) for number in range(250)]
    for number, (_, state) in enumerate(written):
        assert (state.pipe, state.destination, state.rounds, state.attempts) == ("late", "billing", 0, 0)
        assert (state.source, state.first_failure) == (f"orders:1:{number}", BASE + 1000 * number)
        assert before <= state.due <= time.time() * 1000
    assert await stored(broker, "orders") == []
    assert await numbers(broker) == []
    assert await numbers(broker, settled=True) == list(range(250))
    assert (await redrive(broker, where=Filter(pipe="late"))).so_far.done == 0
    entries = [entry async for entry in read_audit(broker.reader)]
    assert {(entry.action, entry.who, entry.topic, entry.partition) for entry in entries} == {
        (REDRIVE, "me@here", "late.dead", 0)
    }
    assert [entry.ranges for entry in entries] == [[(0, 99)], [(100, 199)], [(200, 249)]]
    assert [entry.count for entry in entries] == [100, 100, 50]
    assert entries[0].filters == {"destination": "billing"}


@pytest.mark.parametrize("to_stream", [True, False])
async def test_a_warning_before_late_events_are_sent_again(
    broker: Broker, tmp_path: Path, to_stream: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: an operator sends late events again, and nothing says that a result may already contain them."""
    warnings: list[str] = []

    async def note_warnings(work: Redrive, pages: AsyncIterator[list[DeadLetter]]) -> None:
        warnings.append(capsys.readouterr().err)
        await run(work, pages)

    run = Redrive.run
    monkeypatch.setattr(Redrive, "run", note_warnings)
    reasons = ["late", "schema_mismatch", "late"]
    await bury(broker, [letter(number, reason=reason, destination="") for number, reason in enumerate(reasons)])
    url = f"log://{tmp_path}/data/log"
    done, failure = await _redrive(url, Filter(pipe="late"), [], PIPES, "me@here", 10_000, to=None, to_stream=to_stream)
    assert failure is None
    assert (done.done, done.late) == ((3, 2) if to_stream else (0, 0))
    (before,) = warnings
    assert (
        "2 of these dead letters are `late`: results of the transform may already contain them" in before
    ) is to_stream


async def test_positions_are_taken_again(broker: Broker) -> None:
    """Broken: what was discarded by mistake, or redriven in vain, can never be sent again."""
    await bury(broker, [letter(number) for number in range(3)])
    async with Producer(broker.appender) as producer:
        await Auditor(producer, "me@here", {}).write(DISCARD, [stored_letter(1)])
    assert await numbers(broker) == [0, 2]
    assert (await redrive(broker, [Position("late.dead", 0, 1)])).so_far.done == 1
    assert await numbers(broker) == [0, 2]


async def test_every_webhook_takes_its_letters_again(broker: Broker) -> None:
    """Broken: what an ordered destination, or one without a schedule, refused by mistake can never be sent to it again."""
    await bury(broker, [letter(0, destination="ordered"), letter(1, destination="once")])
    work = await redrive(broker, where=Filter(pipe="late"))
    assert (work.so_far.done, work.so_far.refused) == (2, {})


async def test_what_cannot_go_stays_with_a_reason(broker: Broker) -> None:
    """Broken: a letter that nobody reads counts as redriven, and is lost to view."""
    odd = [
        letter(0, reason="damaged_batch"),
        letter(1, destination="copied"),
        letter(2, destination="copied"),
        letter(3, destination="gone"),
        letter(4, destination=""),
        Record(None, None, BASE, letter(5).headers),
        Record(None, b"{}", BASE, ((dead_letter.PIPE, b"late"), (dead_letter.DESTINATION, b"billing"))),
    ]
    await bury(broker, odd)
    work = await redrive(broker, where=Filter(pipe="late"))
    assert work.so_far.refused == {
        "damaged_batch": 1,
        "no_retries": 2,
        "unknown_destination": 1,
        "no_destination": 1,
        "no_payload": 1,
        "bad_source": 1,
    }
    assert work.so_far.examples["unknown_destination"] == Position("late.dead", 0, 3)
    assert work.so_far.done == 0
    assert await numbers(broker) == list(range(7))


async def test_to_the_stream_again(broker: Broker) -> None:
    """Broken: what a transform gave up cannot be tried again, or comes back as another event, or as a repeated one."""
    await bury(broker, [letter(0, destination=""), letter(1, destination="", source=TopicPartition("other", 0))])
    refused = (await redrive(broker, where=Filter(pipe="late"), to_stream=True, by_event_time=["orders"])).so_far
    assert (refused.done, refused.refused) == (0, {"unknown_stream": 1, "too_old": 1}), "Kafka would delete it at once"
    work = await redrive(broker, where=Filter(pipe="late"), to_stream=True)
    assert (work.so_far.done, work.so_far.refused) == (1, {"unknown_stream": 1})
    (again,) = await stored(broker, "orders")
    assert again.headers[-1] == (REDRIVEN, b"late.dead:0:0")
    assert structs.replace(again, headers=again.headers[:-1]) == original(0)


class Failing(Producer):
    """Cannot write the audit."""

    async def send_to(self, topic: str, parts: object) -> SendResult:
        if topic == AUDIT:
            raise Unavailable("no audit today")
        return await super().send_to(topic, parts)  # type: ignore[arg-type]


async def test_no_record_of_what_is_not_durable_and_at_most_one_batch_without(broker: Broker) -> None:
    """Broken: after a crash letters count as redriven that were not, or many batches are sent twice."""
    await bury(broker, [letter(number) for number in range(250)])
    async with Failing(broker.appender) as producer:
        work = Redrive(
            RedriveTargets(PIPES, to_stream=False),
            producer,
            Auditor(producer, "me@here", {}),
            10_000,
        )
        with pytest.raises(Unavailable):
            await work.run((await DeadLetterSearch.open(broker, Filter())).pages())
    assert len(await stored(broker, "late.retry")) == 100
    assert len(await numbers(broker)) == 250
    assert (await redrive(broker, where=Filter(pipe="late"))).so_far.done == 250
    assert len(await stored(broker, "late.retry")) == 350


async def test_nothing_is_done_that_cannot_be_on_record(broker: Broker) -> None:
    """Broken: on a fleet without the audit topic letters are sent again and again, and nobody knows."""
    async with Producer(broker.appender) as producer:
        await Auditor(producer, "me", {}).require_topic()
    await broker.admin.delete_topic(AUDIT)
    async with Producer(broker.appender) as producer:
        with pytest.raises(CommandFailed, match="there is no topic"):
            await Auditor(producer, "me", {}).require_topic()
    await bury(broker, [letter(0)])
    assert await numbers(broker) == [0]


async def test_stops_between_batches(broker: Broker) -> None:
    """Broken: Ctrl-C leaves letters that were sent and are not on record."""
    await bury(broker, [letter(number) for number in range(250)])
    asked = iter([False, True])
    async with Producer(broker.appender) as producer:
        targets = RedriveTargets(PIPES, to_stream=False)
        work = Redrive(targets, producer, Auditor(producer, "me", {}), 10_000, asked_to_stop=lambda: next(asked))
        await work.run((await DeadLetterSearch.open(broker, Filter())).pages())
    assert await numbers(broker) == list(range(100, 250))


async def test_foreign_records_in_the_audit_count_for_nothing(broker: Broker) -> None:
    """Broken: one bad record in the audit topic makes all the commands fail, or hides letters."""
    await store(broker, AUDIT, [Record(None, b"{}", 0), Record(None, None, 0)])
    await bury(broker, [letter(0)])
    assert await numbers(broker) == [0]


async def test_a_fate_is_of_a_letter_and_not_of_its_place(broker: Broker) -> None:
    """Broken: after a topic of dead letters was made anew, new letters read as discarded or redriven, and nobody sees them."""
    await bury(broker, [letter(n) for n in range(5)])
    async with Producer(broker.appender) as producer:
        await Auditor(producer, "me@here", {}).write(DISCARD, [stored_letter(n) for n in (0, 1, 2)])
        await Auditor(producer, "me@here", {}).write(REDRIVE, [stored_letter(n) for n in (1, 4)])
    assert await numbers(broker) == [3]
    await broker.admin.delete_topic("late.dead")
    await broker.admin.create_topic(TopicSpec("late.dead", 1))
    again = structs.replace(letter(2), timestamp=letter(2).timestamp + 1)  # the same event failed again in the same way
    await bury(broker, [letter(10), letter(1), again, letter(13), letter(14)])
    assert await numbers(broker) == [0, 2, 3, 4]  # the one at offset 1 is the same letter, written again
    assert await redriven_positions(broker, [0, 2])
    assert await numbers(broker) == [3, 4]


async def test_fates_in_entries_of_earlier_versions(broker: Broker) -> None:
    """Broken: after an upgrade, letters that were redriven before are open again, and a redrive sends them twice."""
    await bury(broker, [letter(n) for n in range(3)])
    actions = [
        ActedUpon("late.dead", 0, 0, digest_of(letter(0))[:6]),
        ActedUpon("late.dead", 0, 1, digest_of(letter(9))[:6]),
    ]
    async with Producer(broker.appender) as producer:
        await write_entries(producer, DISCARD, "me@here", {}, actions)
    assert await numbers(broker) == [1, 2]


async def redriven_positions(broker: Broker, offsets: Sequence[int]) -> bool:
    work = await redrive(broker, [Position("late.dead", 0, offset) for offset in offsets])
    return work.so_far.done == len(offsets)


def test_fates_where_the_ranges_of_several_lives_overlap() -> None:
    """Broken: of two lives of a topic, one hides what was done in the other."""

    def entry(*letters: tuple[int, bytes], ranges: list[tuple[int, int]]) -> Entry:
        return Entry(DISCARD, 0, "me", {}, "a.dead", 0, ranges, 0, b"".join(digest * 3 for _, digest in letters))

    wide = entry(*((n, b"w%d" % (n % 10)) for n in range(50)), ranges=[(0, 49)])
    narrow = entry(*((n, b"n%d" % (n % 10)) for n in (3, 4, 40)), ranges=[(3, 4), (40, 40)])
    fates = AuditedActions([narrow, wide])
    for n in range(50):
        assert fates.fate(Position("a.dead", 0, n), b"w%d" % (n % 10) * 3) == "discarded"
        expected = "discarded" if n in (3, 4, 40) else ""
        assert fates.fate(Position("a.dead", 0, n), b"n%d" % (n % 10) * 3) == expected
        assert fates.fate(Position("a.dead", 0, n), b"xxxxxx") == ""
    assert fates.fate(Position("a.dead", 0, 50), b"w0w0w0") == ""


def test_fates_of_ranges_in_any_order() -> None:
    """Broken: an open letter beside a redriven one is not listed, or a redriven one is."""

    def entry(action: str, *ranges: tuple[int, int], topic: str = "a.dead") -> Entry:
        return Entry(action, 0, "me", {}, topic, 0, list(ranges), 0)

    fates = AuditedActions(
        [entry(REDRIVE, (10, 12), (3, 3)), entry(DISCARD, (0, 3), (20, 20)), entry(REDRIVE, (13, 14))]
    )
    found = {n: fates.fate(Position("a.dead", 0, n), b"") for n in range(22)}
    redriven, discarded = {3, 10, 11, 12, 13, 14}, {0, 1, 2, 20}
    assert found == {n: "redriven" if n in redriven else "discarded" if n in discarded else "" for n in range(22)}
    assert fates.fate(Position("b.dead", 0, 10), b"") == ""
    assert fates.fate(Position("a.dead", 1, 10), b"") == ""


@pytest.mark.parametrize(
    ("details", "common"),
    [
        (["status 404: order 17 is unknown", "status 404:  order 2024 is unknown"], "status #: order # is unknown"),
        (['no field "amount"', 'no field "vat"'], "no field '…'"),
        (["id 0193e-7f2a gone", "id 5d08dc1 gone"], "id # gone"),
        (["late since 2026-11-21T08:00:00Z", "late since 2026-11-20T07:01:00Z"], "late since #"),
        (["Not Found"], "Not Found"),
    ],
)
def test_details_that_differ_only_in_values_are_one_cause(details: list[str], common: str) -> None:
    """Broken: a customer sees a thousand causes with one event each, or different causes as one."""
    assert {normalise(detail) for detail in details} == {common}


def test_causes_are_counted_and_dated() -> None:
    """Broken: a customer is told wrong counts, or when it began and ended."""
    causes = Causes(10)
    for number in (5, 2, 9):
        causes.add(DeadLetter.of(Position("late.dead", 0, number), letter(number, detail=f"no order {number}")))
    causes.add(DeadLetter.of(Position("late.dead", 0, 11), letter(1, reason="timeout")))
    first, second = causes.most_common()
    assert (first.reason, first.detail, first.count) == ("http_404", "no order #", 3)
    assert (first.first, first.last, first.example.position) == (DEAD + 2000, DEAD + 9000, Position("late.dead", 0, 9))
    assert (second.reason, second.count) == ("timeout", 1)


def test_times() -> None:
    """Broken: --since means another time than it says."""
    assert parse_time("2h", 10_000.0) == 2_800_000
    assert parse_time("2023-11-14T22:13:20Z", 0) == BASE
    for bad in ("yesterday", "2023-11-14T22:13:20", "2"):
        with pytest.raises(ValueError, match="is not a time"):
            parse_time(bad, 0)


async def test_the_doctor_counts_new_letters_that_nobody_redrove(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broken: the doctor stays red after each letter was sent again, or its command and --since miss letters whose events were
    tried for days."""
    monkeypatch.setattr(collectors, "WINDOW_S", 0.0)
    now = time.time_ns() // 1_000_000
    days = {"first_failure": now - 75 * 3600 * 1000, "now_ms": now - 60_000, "destination": "invoices"}
    await bury(broker, [letter(0), *(letter(number, **days) for number in (1, 2, 3))])
    billing = {"name": "billing", "renamed_from": "invoices", "webhook": HOOK}
    pipes = PIPES.model_dump(mode="json", exclude_unset=True, by_alias=True)
    pipes["pipes"]["late"]["destinations"][0] = billing
    facts = Facts(time.time(), pipes=PipeFile.model_validate(pipes))
    facts.broker.url = f"log://{tmp_path}/data/log"

    async def found() -> list[tuple[str, int]]:
        await collect_broker(facts)
        return [(finding.what, len(await numbers(broker, new))) for finding in find_letters(facts)]

    assert facts.pipes is not None
    new = Filter("late", "billing", since=now - 900_000, renames=renames_of(facts.pipes))
    assert await found() == [("3 new dead letters of late/billing: http_404.", 3)]
    await act(broker, REDRIVE, [1, 2])
    assert await found() == [("1 new dead letter of late/billing: http_404.", 1)]
    await act(broker, DISCARD, [3])
    assert await found() == []


async def act(broker: Broker, action: str, offsets: Sequence[int]) -> None:
    kept = await stored(broker, "late.dead")
    acted = [ActedUpon("late.dead", 0, offset, digest_of(kept[offset])) for offset in offsets]
    async with Producer(broker.appender) as producer:
        await write_entries(producer, action, "me@here", {}, acted)


async def test_json_names_what_is_not_text(broker: Broker) -> None:
    """Broken: a program that reads `dead list --json` fails on one odd letter."""
    strange = Record(b"k", b"\xff", 10**17, ((dead_letter.REASON, b"\xff"), (dead_letter.ATTEMPTS, b"many")))
    await bury(broker, [strange])
    (page,) = [page async for page in (await DeadLetterSearch.open(broker, Filter())).pages()]
    assert json.loads(await asyncio.to_thread(json.dumps, page[0].as_json()))["reason"] == "\N{REPLACEMENT CHARACTER}"


def without_value(full: Record) -> Record:
    return Record(full.key, None, full.timestamp, full.headers)


async def test_a_payload_that_was_too_large_for_a_letter_comes_from_its_source(broker: Broker) -> None:
    """Broken: an event that was too large for the broker with its reason on can be seen and sent again by nobody."""
    async with Producer(broker.appender) as producer:
        (await producer.send_to("orders", {1: [original(0), original(1)]})).raise_first()
    gone, other = letter(0, offset=7), letter(1, offset=0)
    await bury(broker, [*map(without_value, (letter(0), gone, other)), letter(1)])
    found = [
        DeadLetter.of(Position("late.dead", 0, offset), record)
        for offset, record in enumerate(await stored(broker, "late.dead"))
    ]
    whole = [await restore(broker.reader, one) for one in found]
    assert [one.record.value for one in whole] == [b'{"n":0}', None, None, b'{"n":1}']
    assert whole[3] is found[3]
    assert letter_json(whole[0], from_source=True)["payload_from"] == "source"
    assert letter_json(whole[1], from_source=False)["payload_from"] is None
    work = await redrive(broker, where=Filter(pipe="late"))
    assert (work.so_far.done, dict(work.so_far.refused)) == (2, {"no_payload": 2})
    sent = [unwrap(record)[0] for record in await stored(broker, "late.retry")]
    assert sent == [original(0), original(1)]


@pytest.mark.parametrize(
    ("rules", "event_id", "key"),
    [
        ({"id": "id"}, None, None),
        ({"id": {"header": "ce_id"}}, None, None),
        ({"id": "n", "key": "id.of", "time": "at"}, b"7", b"c"),
        ({}, b"billing-0-3", b"k"),
    ],
)
def test_a_corrected_rule_makes_an_event_of_a_bad_record(
    rules: dict[str, object], event_id: bytes | None, key: bytes | None
) -> None:
    """Broken: a dead letter of a topic of others stays `bad_record` for ever, also when its rule is corrected."""
    stored = Record(b"k", b'{"id": {"of": "c"}, "n": 7, "at": 1600000000}', BASE, (("h", b"1"),))
    batch = Batch("billing", 0, [3], [stored])
    (bad,) = Translation(Stream(topic="billing", id="id"))(batch, "topic-id").records
    assert bad.header(FAULT)
    place = {"source": TopicPartition("s", 0), "offset": 3}
    record = refused_letter(bad, 1, pipe="p", destination="d", reason="bad_record", **place)
    pipes = PipeFile.model_validate(
        {
            "streams": {"s": {"topic": "billing", **rules}},
            "pipes": {
                "p": {"sources": ["s"], "destinations": [{"name": "d", "webhook": {"url": "https://a.example"}}]}
            },
        }
    )
    found = RedriveTargets(pipes, to_stream=False).resolve(DeadLetter.of(Position("p.dead", 0, 0), record), BASE)
    if event_id is None:
        assert found == "bad_record"
        assert found in REMEDIES
        return
    assert not isinstance(found, str)
    made = found.record
    assert (made.header(ID), made.key, made.value, made.header(FAULT)) == (event_id, key, stored.value, None)
    assert made.header("h") == b"1"
    assert made.header(ORIGIN) == bad.header(ORIGIN)
    assert read_state(made).time == (1_600_000_000_000 if "time" in rules else BASE)
