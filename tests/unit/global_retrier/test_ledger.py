"""What the retrier tells: what left it, for whom, and not what only waits."""

from pathlib import Path

from services.core.broker.contract import Lag
from services.core.broker.producer import Producer
from services.core.broker.record import Batch, Record, TopicPartition
from services.core.ledger.report import TELEMETRY, decode_report, unpack_numbers
from services.core.pipe_file.topic_names import RETRY_IN
from services.core.undelivered.retry_state import wrap
from services.global_retrier.delay_queue import DelayedRecord, DelayQueue
from services.global_retrier.metrics import RetrierLedger, RetrierMetrics
from services.global_retrier.mover import Mover
from tests.unit.global_retrier.river import River, make_state, open_river

SOURCE = TopicPartition(RETRY_IN, 0)


def wait(river: River, number: int, due_in: int, pipe: str = "late") -> Record:
    now = river.clock.now_ms()
    headers = (("ce_id", b"e"), ("penstock_origin", b"a:0:%d" % number))
    return wrap(Record(None, b"{}", 5, headers), make_state(now + due_in, number, pipe=pipe), now)


async def read_told(river: River) -> dict[tuple[str, str | None, str], set[int]]:
    batch = await river.broker.reader.read(TELEMETRY, 0, 0, max_records=1000)
    found: dict[tuple[str, str | None, str], set[int]] = {}
    for record in batch.records if batch is not None else ():
        report = decode_report(record.value)
        assert report.node == "retrier"
        for one in report.sets:
            found.setdefault((report.pipe, report.destination, one.outcome), set()).update(unpack_numbers(one.numbers))
    return found


async def test_what_left_is_told_for_its_destination(tmp_path: Path) -> None:
    """Broken: an event that the retrier gave up counts as waiting for ever, or one that waits as given back."""
    async with open_river(tmp_path) as river, Producer(river.appender) as producer:
        mover = Mover(producer, river.broker.admin, RetrierMetrics(), river.clock, RetrierLedger(producer))
        records = [wait(river, 0, -1), wait(river, 1, 5000), wait(river, 2, -1, "early"), wait(river, 3, -1, "gone")]
        records.append(Record(None, b"no retry record", 5))
        queue = DelayQueue(SOURCE)
        queue.add(Batch(*SOURCE, range(len(records)), records), river.clock.now_ms())
        items: list[DelayedRecord] = queue.pop_ready(river.clock.now_ms())
        await mover.move(SOURCE, items)
        await mover.ledger.report()
        told = {
            ("late", "ops", "released"): {0},
            ("early", "ops", "released"): {2},
            ("gone", "ops", "dead"): {3},
        }
        assert await read_told(river) == told
        await mover.move(SOURCE, items[:1])
        await mover.ledger.report()
        assert await read_told(river) == told, "twice is the same"


async def test_how_late_it_is_says_nothing_of_what_only_waits(tmp_path: Path) -> None:
    """Broken: an event that waits for a day makes the retrier late, and none that it loses is ever called lost; or a backlog does
    not, and what waits for it is called lost."""
    async with open_river(tmp_path) as river, Producer(river.appender) as producer:
        ledger = RetrierLedger(producer)

        async def tell(**lags: int) -> int | None:
            await ledger.set_lags(
                {TopicPartition(f"penstock.{topic}", 0): Lag(1, millis) for topic, millis in lags.items()}
            )
            ledger.add("released", [])
            await ledger.close()
            batch = await river.broker.reader.read(TELEMETRY, 0, 0, max_records=1000)
            assert batch is not None
            report = decode_report(batch.records[-1].value)
            assert (report.pipe, report.destination) == ("", None)
            return report.behind_ms

        waiting = {"retry-in": 0, "delay-1s": 0, "delay-64s": 64_000, "delay-65536s": 60_000_000}
        assert (await tell(**waiting) or 0) < 1000
        assert 5000 <= (await tell(**waiting | {"delay-64s": 69_000}) or 0) < 6000
        assert 7000 <= (await tell(**waiting | {"retry-in": 7000}) or 0) < 8000
        assert 900 <= (await tell(**waiting | {"delay-1s": 900}) or 0) < 1900
