"""Reading dead letters for ever: everything once, whatever happens to one topic."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from services.core.broker.connect import open_broker
from services.core.broker.contract import Broker, Reader, TopicSpec
from services.core.broker.errors import Unavailable
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record
from services.core.pipe_file.pipes import PipeFile
from services.core.provision import ensure_topics
from services.observer.dead_letters import CAUSES, PAGE, DeadLetterReader, FailureTable
from tests.support.waiting_events import store
from tests.unit.observer.letters import DEAD, HOOK, PIPES, letter

TOPIC = "shop.dead"
BILLING = ("shop", "billing")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with open_broker(f"log://{tmp_path}/data/log") as opened:
        await ensure_topics(opened.admin, PIPES)
        yield opened


async def bury(broker: Broker, letters: Sequence[Record], topic: str = TOPIC) -> None:
    await store(broker, topic, letters)


async def read_all(reader: DeadLetterReader, topic: str = TOPIC) -> None:
    for _ in range(20):
        if not await reader.advance(topic):
            return
    raise AssertionError("it never comes to an end")


def read_by(book: FailureTable, broker: Broker, *topics: str) -> DeadLetterReader:
    return DeadLetterReader(broker.reader, topics or (TOPIC,), book.count)


async def test_everything_once_from_the_beginning_and_on(broker: Broker) -> None:
    """Broken: a customer is told too few failures, or each again at every look."""
    await bury(broker, [letter(number) for number in range(2 * PAGE + 1)])
    book = FailureTable(PIPES)
    reader = read_by(book, broker)
    at_first = reader.catching_up
    await read_all(reader)
    assert (at_first, reader.catching_up) == (True, False)
    assert book.all()[BILLING].causes.letters == 2 * PAGE + 1
    await bury(broker, [letter(5000)])
    await read_all(reader)
    assert (book.all()[BILLING].causes.letters, book.all()[BILLING].last) == (2 * PAGE + 2, DEAD + 5_000_000)
    again = FailureTable(PIPES)
    await read_all(read_by(again, broker))
    assert again.all()[BILLING].causes.letters == 2 * PAGE + 2


async def test_a_topic_with_more_partitions_than_ours(broker: Broker) -> None:
    """Broken: somebody gave the topic more partitions, which no start refuses, and the failures in them are not shown."""
    await broker.admin.add_partitions(TOPIC, 3)
    async with Producer(broker.appender) as producer:
        parts = {partition: [letter(number) for number in range(PAGE + 1)] for partition in range(3)}
        (await producer.send_to(TOPIC, parts)).raise_first()
    book = FailureTable(PIPES)
    reader = read_by(book, broker)
    await read_all(reader)
    assert not reader.catching_up
    assert book.all()[BILLING].causes.letters == 3 * (PAGE + 1)


async def test_what_is_nobodys_is_passed_over(broker: Broker) -> None:
    """Broken: letters that name whatever they like fill the memory, or stop the reader."""
    odd = [letter(1, destination=""), letter(2, destination="gone"), letter(3, pipe="other"), Record(None, None, 1)]
    await bury(broker, [*odd, letter(4)])
    book = FailureTable(PIPES)
    await read_all(read_by(book, broker))
    assert {name: failures.causes.letters for name, failures in book.all().items()} == {
        BILLING: 1,
        ("shop", "search"): 0,
    }


async def test_letters_of_a_former_name_are_the_present_ones(broker: Broker) -> None:
    """Broken: a destination gets a new name, and its failures are not shown any more."""
    await bury(broker, [letter(1, destination="bills"), letter(2)])
    text = {"name": "billing", "renamed_from": "bills", "webhook": HOOK}
    pipes = {"streams": {"orders": {}}, "pipes": {"shop": {"sources": ["orders"], "destinations": [text]}}}
    book = FailureTable(PipeFile.model_validate(pipes))
    await read_all(read_by(book, broker))
    assert book.all()[BILLING].causes.letters == 2


async def test_a_topic_made_anew_is_read_from_its_beginning(broker: Broker) -> None:
    """Broken: the observer says nothing more after its topic was made anew, or fails for ever."""
    book = FailureTable(PIPES)
    reader = read_by(book, broker)
    await bury(broker, [letter(number) for number in range(5)])
    await read_all(reader)
    await broker.admin.delete_topic(TOPIC)
    await read_all(reader)
    await broker.admin.create_topic(TopicSpec(TOPIC, 1))
    await bury(broker, [letter(9)])
    await read_all(reader)
    assert book.all()[BILLING].causes.letters == 6


class Failing:
    """An Admin of which one topic cannot be read until it is told otherwise."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.broken = True

    def __getattr__(self, name: str) -> object:
        return getattr(self._reader, name)

    async def read(self, topic: str, partition: int, offset: int, *, max_records: int) -> Batch | None:
        if self.broken and topic == TOPIC:
            raise Unavailable("the disk is away")
        return await self._reader.read(topic, partition, offset, max_records=max_records)


async def test_a_broken_topic_stops_no_other_and_is_read_when_it_is_back(broker: Broker) -> None:
    """Broken: one pipe's disk trouble hides the failures of all, or hides itself."""
    await bury(broker, [letter(1)])
    await bury(broker, [letter(2)], "penstock.dead")
    book, failing = FailureTable(PIPES), Failing(broker.reader)
    reader = DeadLetterReader(failing, [TOPIC, "penstock.dead"], book.count)  # type: ignore[arg-type]
    assert not await reader.advance(TOPIC)
    await read_all(reader, "penstock.dead")
    assert reader.problems == {TOPIC: "the disk is away"}
    assert reader.catching_up
    assert book.all()[BILLING].causes.letters == 1
    failing.broken = False
    await read_all(reader)
    assert (reader.problems, reader.catching_up, book.all()[BILLING].causes.letters) == ({}, False, 2)


async def test_a_million_different_details_take_bounded_memory(broker: Broker) -> None:
    """Broken: a receiver that answers each event differently fills the observer's memory, or its failures are not counted."""
    words = ["".join(chr(97 + (number // 26**place) % 26) for place in range(3)) for number in range(3000)]
    await bury(broker, [letter(number, detail=word) for number, word in enumerate(words)])
    await bury(broker, [letter(number, reason="http_500") for number in range(400)])
    book = FailureTable(PIPES)
    await read_all(read_by(book, broker))
    causes = book.all()[BILLING].causes.most_common()
    assert len(causes) <= 2 * CAUSES + 1
    assert sum(cause.count for cause in causes) == 3400
    assert (causes[0].reason, causes[0].count, causes[-1].reason) == ("http_500", 400, "other")
    assert causes[-1].first == DEAD
