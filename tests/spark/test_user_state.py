"""Transforms with state of their own (`transformWithState`): those of the examples, beside the real Spark and the log."""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import orjson
import pytest
from pyspark.sql import SparkSession

from services.core.broker.contract import TopicSpec
from services.core.broker.log.data_folder import DataFolder
from services.core.broker.log.topics import create_topic, delete_topic
from services.core.broker.record import Record
from services.core.event import read_id
from services.core.pipe_file.state_plan import StatePlan, compare_plans
from services.core.sample import SampleRecord
from services.core.yaml_source import BadConfiguration
from spark.brokers.log import LogSparkBroker
from spark.jobs.start_checks import check_suitability
from spark.settings import SelectedPipes, TransformSettings, load_pipes
from spark.trial import TrialSettings, try_pipe
from tests.spark.log_pipeline import NOW, LogPipeline, event, wait_for
from tests.spark.test_watermark import letters, send

EXAMPLES = Path(__file__).parents[2] / "examples"
START = NOW - NOW % 3_600_000
VISITS = [(0, "ann"), (2, "bob"), (20, "ann"), (100, "ann")]
CLICKS, PAYMENTS = "user STRING NOT NULL", "card STRING NOT NULL, amount DOUBLE"


def at(number: int, minute: float, **fields: object) -> Record:
    """An event at so many minutes after 22:00."""
    record = event(number, orjson.dumps(fields), key=b"k")
    return msgspec.structs.replace(record, timestamp=START + round(minute * 60_000))


def pay(number: int, minute: float, card: str = "visa", amount: float = 5.0) -> Record:
    return at(number, minute, card=card, amount=amount)


def use(pipeline: LogPipeline, name: str, *changes: tuple[str, str], **transform: object) -> SelectedPipes:
    """A pipe with the transform of an example, changed at these places."""
    text = (EXAMPLES / f"{name}.py").read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    (pipeline.folder / f"{name}.py").write_text(text)
    function, columns = {"sessions": ("close_sessions", CLICKS), "velocity": ("find_fast_cards", PAYMENTS)}[name]
    defaults = {"watermark": "1m", "interval": "50ms"} if name == "sessions" else {"interval": "50ms"}
    return pipeline.pipe(columns=columns, python=f"{name}.py:{function}", **defaults | transform)  # type: ignore[arg-type]


def results(records: Iterable[Record]) -> dict[str | None, bytes | None]:
    return {read_id(record): record.value for record in records}


def forget_last_batch(pipeline: LogPipeline) -> None:
    """As after a crash before the commit: the batch is planned and not done, and nothing of it was stored."""
    commits = pipeline.folder / "checkpoints/p/commits"
    newest = max(int(path.name) for path in commits.iterdir() if path.name.isdigit())
    for name in (f"{newest}", f".{newest}.crc"):
        (commits / name).unlink()
    folder = DataFolder.prepare(pipeline.log)
    delete_topic(folder, "p.out")
    create_topic(folder, TopicSpec("p.out", 3))


def test_timers_and_state_survive_a_restart(pipeline: LogPipeline) -> None:
    """If this fails, a session is lost, comes twice under two ids or with a wrong count after a crash, or late clicks vanish."""
    chosen = use(pipeline, "sessions")
    pipeline.start(chosen)
    send(pipeline, at(0, 0, user="ann"), at(1, 2, user="bob"), at(2, 20, user="ann"))
    pipeline.stop()
    pipeline.start(chosen)
    send(pipeline, at(3, 45, user="ann"))
    wait_for(lambda: len(pipeline.out) == 1, "the session of bob")
    send(pipeline, at(4, 3, user="bob"), at(5, 200, user="ann"))
    wait_for(lambda: len(pipeline.out) == 2, "the session of ann")
    wait_for(lambda: bool(pipeline.dead), "the late click of bob")
    pipeline.stop()
    ann = "ann 2023-11-14 22:00:00"
    expected = b'{"user":"ann","start":"2023-11-14T22:00:00.000Z","end":"2023-11-14T22:45:00.000Z","clicks":3}'
    assert results(pipeline.out)[ann] == expected
    assert letters(pipeline) == {("id-4", "late"): 1}
    forget_last_batch(pipeline)
    pipeline.start(chosen)
    wait_for(lambda: bool(pipeline.out), "the batch again")
    pipeline.stop()
    assert results(pipeline.out) == {ann: expected}
    assert pipeline.reported("filtered") == set(range(6))
    assert pipeline.reported("dead") == {4}
    assert not pipeline.reported("passed")


def test_alerts_at_once_and_the_same_again(pipeline: LogPipeline) -> None:
    """If this fails, an alert waits for another event, comes twice under two ids, an event on which the code fails stops
    the pipe, or batches without events take the machine."""
    chosen = use(pipeline, "velocity", ("append((row.at, row.amount))", "append((row.at, 1 / (1 / row.amount)))"))
    pipeline.start(chosen)
    send(pipeline, pay(0, 0), pay(1, 9), pay(2, 1), pay(3, 2, "amex"))
    assert not pipeline.out
    send(pipeline, pay(5, 9.6), pay(4, 9.5))
    wait_for(lambda: len(pipeline.out) == 2, "two alerts")
    pipeline.stop()
    alerts = results(pipeline.out)
    assert {name: orjson.loads(value or b"")["payments"] for name, value in alerts.items()} == {
        "velocity-id-4": 4,
        "velocity-id-5": 5,
    }
    forget_last_batch(pipeline)
    pipeline.start(chosen)
    wait_for(lambda: len(pipeline.out) == 2, "the batch again")
    assert results(pipeline.out) == alerts
    pipeline.send([pay(6, 9.7, amount=0), pay(7, 9.8)])
    wait_for(lambda: len(pipeline.out) == 3, "the alert of the batch with a payment on which the code fails")
    pipeline.stop()
    assert letters(pipeline) == {("id-6", "transform_error"): 1}
    assert orjson.loads(results(pipeline.out)["velocity-id-7"] or b"")["payments"] == 6
    assert all(report.read for report in pipeline.batches)


def test_state_expires(pipeline: LogPipeline) -> None:
    """If this fails, the state of keys that are gone grows for ever."""
    pipeline.start(use(pipeline, "velocity", ("24 * 60 * 60 * 1000", "1")))
    send(pipeline, *(pay(number, number) for number in range(3)))
    send(pipeline, pay(3, 3), pay(4, 4, "amex"), pay(5, 4, "amex"), pay(6, 4, "amex"), pay(7, 4, "amex"))
    wait_for(lambda: bool(pipeline.out), "the alert within a batch")
    pipeline.stop()
    assert list(results(pipeline.out)) == ["velocity-id-7"]


SILENCE = """
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

class Silence(StatefulProcessor):
    def init(self, handle):
        self._handle = handle
        self._newest = handle.getValueState("newest", "event STRING")

    def handleInputRows(self, key, rows, timerValues):
        self._newest.update((max(row.event["id"] for row in rows),))
        self._handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 1)
        return iter(())

    def handleExpiredTimer(self, key, timerValues, expiredTimerInfo):
        yield Row(id=f"silent-{self._newest.get()[0]}", user=key[0])

    def close(self):
        pass

def find_silence(clicks):
    return clicks.groupBy("user").transformWithState(
        Silence(), "id STRING, user STRING", outputMode="Append", timeMode="ProcessingTime")
"""
"""Timers by the clock."""


def test_timers_by_the_clock_need_no_events(pipeline: LogPipeline) -> None:
    """If this fails, nobody learns that no more events come."""
    (pipeline.folder / "silence.py").write_text(SILENCE)
    pipeline.start(pipeline.pipe(columns=CLICKS, python="silence.py:find_silence", interval="50ms"))
    send(pipeline, at(0, 0, user="ann"), at(1, 0, user="ann"), at(2, 5, user="bob"))
    wait_for(lambda: len(pipeline.out) == 2, "both are silent")
    pipeline.stop()
    assert set(results(pipeline.out)) == {"silent-id-1", "silent-id-2"}


FRAMES = """
import pandas as pd
from pyspark.sql import functions as f
from pyspark.sql.streaming import StatefulProcessor

class Count(StatefulProcessor):
    def init(self, handle):
        self._count = handle.getValueState("count", "n BIGINT")

    def handleInputRows(self, key, rows, timerValues):
        before = self._count.get()
        n = (before[0] if before else 0) + sum(len(frame) for frame in rows)
        self._count.update((n,))
        yield pd.DataFrame({"id": [f"{key[0]}-{n}"], "n": [n]})

    def close(self):
        pass

def count(clicks):
    return clicks.select("user", f.col("event.id").alias("click")).groupBy("user").transformWithStateInPandas(
        Count(), "id STRING, n BIGINT", outputMode="Append", timeMode="None")
"""
"""With pandas, and without timers."""


def test_frames_of_pandas(pipeline: LogPipeline) -> None:
    """If this fails, the documents promise more than there is."""
    (pipeline.folder / "frames.py").write_text(FRAMES)
    pipeline.start(pipeline.pipe(columns=CLICKS, python="frames.py:count", interval="50ms"))
    send(pipeline, at(0, 0, user="ann"), at(1, 0, user="ann"))
    send(pipeline, at(2, 0, user="ann"), at(3, 5, user="bob"))
    wait_for(lambda: len(pipeline.out) == 3, "the results of two batches")
    pipeline.stop()
    assert set(results(pipeline.out)) == {"ann-2", "ann-3", "bob-1"}


def refuse(pipeline: LogPipeline, chosen: SelectedPipes) -> str:
    settings, broker = TransformSettings(data=pipeline.folder), LogSparkBroker(str(pipeline.log))
    with pytest.raises(BadConfiguration) as caught:
        check_suitability(pipeline.session, settings, broker, chosen, [pipeline.prepare(chosen)])
    (problem,) = caught.value.problems
    assert problem.key == "pipes.p.transform.python"
    return problem.message


def test_what_cannot_run_is_said_before_the_start(pipeline: LogPipeline) -> None:
    """If this fails, a mistake in such a transform shows in the first batch, again and again, in Spark's words."""
    update = use(pipeline, "sessions", ('outputMode="Append"', 'outputMode="Update"'))
    assert "outputMode 'Update', and a result is written once. Try: outputMode='Append'" in refuse(pipeline, update)
    ttl = use(pipeline, "sessions", ('clicks BIGINT")', 'clicks BIGINT", ttlDurationMs=5)'))
    assert "state 'open' has ttlDurationMs, which is by the clock, and timeMode is 'EventTime'. Try: " in refuse(
        pipeline, ttl
    )
    clock = use(pipeline, "sessions", ("EventTime", "ProcessingTime"))
    assert pipeline.prepare(clock).idle_batches
    clock.file.pipes["p"].transform.model_fields_set.discard("interval")  # type: ignore[union-attr]
    assert "timers by the clock" in refuse(pipeline, clock)
    wrong = use(pipeline, "velocity", ('amount DOUBLE"', 'amount DOUBLES"'))
    assert "DOUBLES" in refuse(pipeline, wrong)
    nameless = use(pipeline, "velocity", ('.alias("id")', '.alias("name")'))
    assert "returns neither `event` nor `id`" in refuse(pipeline, nameless)
    chance = use(pipeline, "velocity", ('"card", "amount",', '"card", f.rand().alias("amount"),'))
    assert "gives another result when a batch is computed again" in refuse(pipeline, chance)
    event_time = '"event_time", f.unix_millis("event_time")', 'f.unix_millis("event.time")'
    assert "needs a watermark. Try: watermark: 10m" in refuse(
        pipeline, use(pipeline, "sessions", event_time, watermark=None)
    )
    assert "Try: selecting event_time before groupBy" in refuse(pipeline, use(pipeline, "sessions", event_time))
    repeated = use(pipeline, "velocity", deduplicate_within="1m")
    assert "deduplicate_within needs" in refuse(pipeline, repeated)
    first = "Velocity(),", "Velocity(), initialState=payments.groupBy('card'),"
    assert "has an initialState" in refuse(pipeline, use(pipeline, "velocity", first))


def plan_of(pipeline: LogPipeline, chosen: SelectedPipes) -> StatePlan:
    plan = pipeline.prepare(chosen).plan
    assert plan is not None
    return plan


def test_a_changed_processor_is_another_transform(pipeline: LogPipeline) -> None:
    """If this fails, a changed processor reads the state of the former one as if it were its own."""
    former = plan_of(pipeline, use(pipeline, "sessions"))
    changed = plan_of(pipeline, use(pipeline, "sessions", ("30 * 60", "20 * 60")))
    moved = plan_of(pipeline, use(pipeline, "sessions", ('.groupBy("user")', '.groupBy("user", "at")')))
    assert compare_plans(former, plan_of(pipeline, use(pipeline, "sessions", watermark="5m"))) == ""
    assert compare_plans(former, changed) == "the text of its Python file changed, and its functions compute the state"
    assert "the key of the user-written state was user, now user and " in compare_plans(former, moved)
    velocity = plan_of(pipeline, use(pipeline, "velocity"))
    assert "the content of the user-written state was timeMode EventTime, now" in compare_plans(former, velocity)


@pytest.mark.parametrize(
    ("pipe", "stream", "events", "expected"),
    [
        (
            "sessions",
            "clicks",
            [at(number, minute, user=user) for number, (minute, user) in enumerate(VISITS)],
            {"ann 2023-11-14 22:00:00": 2, "ann 2023-11-14 23:40:00": 1, "bob 2023-11-14 22:02:00": 1},
        ),
        ("velocity", "payments", [pay(number, number) for number in range(4)], {"velocity-id-3": 4}),
    ],
)
def test_a_trial_of_the_examples(
    spark: SparkSession, tmp_path: Path, pipe: str, stream: str, events: list[Record], expected: dict[str, int]
) -> None:
    """If this fails, `penstock try` shows no session, because no watermark passes in a sample; or an example does not run."""
    records = [SampleRecord(f"f:{number}", stream, 0, str(number), record) for number, record in enumerate(events)]
    (tmp_path / "sample").write_bytes(msgspec.msgpack.encode(records))
    settings = TrialSettings(
        pipes=EXAMPLES / "state.yaml", only=pipe, data=tmp_path / "data", sample=tmp_path / "sample"
    )
    result = try_pipe(spark, settings, load_pipes(settings), 1_000_000)
    found = {read_id(record): orjson.loads(record.value or b"") for record in result.outputs}
    assert {name: row.get("clicks", row.get("payments")) for name, row in found.items()} == expected
    assert not result.dead
